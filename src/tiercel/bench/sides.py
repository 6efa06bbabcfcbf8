"""A side that is a server somebody else runs: it is only asked, and left as it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tiercel.bench.run import Server

# What a request to `tiercel serve` with its own engine says to go without the store.
WITHOUT_STORE = {"tiercel": {"no_store": True, "no_load": True}}


@dataclass(frozen=True, slots=True)
class UrlSide:
    """A running server. `extra` goes into the body of every request."""

    name: str
    what: str
    url: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    token_bytes: int | None = None

    def begin(self) -> Server:
        """It runs already."""
        return Server(self.url, self.extra)

    def end(self) -> None:
        """It goes on running."""
