"""What tests of tiers over a network share: a proxy in front of a module's own `server`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.servers.proxy import FaultProxy


@pytest.fixture
def proxy(server: Any) -> Iterator[FaultProxy]:
    with FaultProxy("127.0.0.1", server.port) as one:
        yield one
