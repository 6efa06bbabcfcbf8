"""The `Tier` protocol: one kind of place where records lie. Small, blocking and batch first.

A tier moves whole records (header and payload, see `tiercel.blocks.record`) and answers with one
outcome per key. It never raises for a bad, missing or refused block, keeps no index, decides nothing
about eviction and verifies no checksum: the store does all that once, for every tier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from tiercel.blocks import BlockKey


class Fate(Enum):
    """What became of one key in one call."""

    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"
    FULL = "full"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A fate with the reason behind it, for counters and logs.

    `stored_bytes` is what the record takes in the place, where that is not the length of the buffer.
    """

    fate: Fate
    reason: str = ""
    stored_bytes: int | None = None


OK = Outcome(Fate.OK)
MISSING = Outcome(Fate.MISSING)


@dataclass(frozen=True, slots=True)
class Stored:
    """A record found by `scan`: bytes at rest, and when it was last written or read (seconds, wall clock)."""

    key: BlockKey
    record_bytes: int
    used_s: float


@dataclass(frozen=True, slots=True)
class Usage:
    """What the place itself says: bytes still free there and in all, or None where it cannot tell."""

    free_bytes: int | None = None
    total_bytes: int | None = None


class Tier(Protocol):
    """All calls block, may run on several threads at once, and own no buffer beyond the call."""

    @property
    def name(self) -> str:
        """Short name for figures and logs, such as `disk`."""

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each record seems to be there (a promise is not needed: reading decides).

        May raise `OSError` when the place cannot be asked, so that it counts as a failure.
        """

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        """Fill each buffer with the record of its key. A record longer than its buffer is CORRUPT."""

    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        """Store each record under its key, replacing what is there; a reader never sees half of one."""

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Remove records; one that is not there is MISSING."""

    def scan(self) -> Iterator[Stored]:
        """Every record in the place, in any order. May raise `OSError` when the place is gone."""

    def usage(self) -> Usage:
        """What the place says about its own room."""

    def close(self) -> None:
        """Release what the tier holds open. Further calls answer FAILED."""
