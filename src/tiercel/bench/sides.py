"""A side that is a server somebody else runs: it is only asked, and left as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tiercel.bench.client import Client
from tiercel.bench.run import Server
from tiercel.errors import ConfigError

# What a request to `tiercel serve` with its own engine says to go without the store.
WITHOUT_STORE = {"tiercel": {"no_store": True, "no_load": True}}
# What only such a server has; others ignore fields that they do not know.
_OWN_ENGINE = "/v1/cache/decisions?limit=1"


def require_hints(url: str, api_key: str | None) -> None:
    """Raises ConfigError unless the server at `url` goes without the store when told."""

    async def asked() -> bool:
        async with Client(url, None, api_key) as client:
            return await client.has(_OWN_ENGINE)

    if not asyncio.run(asked()):
        raise ConfigError(
            f"--baseline-hints: {url} has no {_OWN_ENGINE}; accepted: a tiercel serve with its own engine"
        )


@dataclass(frozen=True, slots=True)
class UrlSide:
    """A running server. `extra` goes into the body of every request."""

    name: str
    what: str
    url: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    token_bytes: int | None = None
    resident: bool = True

    def begin(self) -> Server:
        """It runs already."""
        return Server(self.url, self.extra)

    def end(self) -> None:
        """It goes on running."""
