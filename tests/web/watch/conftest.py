"""A site over a small store of its own, as a real server; what it is asked goes over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from .running import Site, site_over_a_store


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with site_over_a_store(tmp_path / "disk") as running:
        yield running
