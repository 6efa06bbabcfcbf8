"""What a tier may offer beside the `Tier` protocol, each by having the methods; nobody needs any of it.

The store and the tools ask `isinstance(tier, Shared)` and do without where the answer is no. A tier that
wraps another offers what it forwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tiercel.blocks import BlockKey
from tiercel.tiers.base import Outcome, Stored

# Parents are dated younger than their children, so that whoever evicts by age takes leaves first. More than
# a block takes to be computed and written, or the order of writing would undo it. Bounded, because a depth
# may be read before the record is verified, and a file dated an hour back would pass for an abandoned one.
_DEPTH_AGE_S = 1.0
_DEPTH_MAX = 1800


@dataclass(frozen=True, slots=True)
class Part:
    """All records of a place whose keys begin with `prefix`, at one moment. Empty when none are left."""

    prefix: bytes
    records: list[Stored]


@dataclass(frozen=True, slots=True)
class Oddments:
    """Files of a place that are no records: unfinished ones of writers that are gone, and foreign ones."""

    leftovers: int = 0
    other_files: int = 0


@runtime_checkable
class Shared(Protocol):
    """A place where other processes write, read and delete too, and that can tell what they did."""

    def changes(self, afresh: bool) -> Iterator[Part]:
        """The parts that changed since the last call; all of them when `afresh`, and the first time.

        Prefixes are of one length. A part is taken as known once the next is asked for. May raise `OSError`.
        Called by one thread at a time.
        """

    def dates(self, keys: Sequence[BlockKey]) -> list[float | None]:
        """When each record was last used by anybody (wall clock, seconds); None where it is not there."""

    def touch(self, keys: Sequence[BlockKey], ages_s: Sequence[float]) -> list[Outcome]:
        """Date each record as last used that many seconds ago, for all who share the place."""


@runtime_checkable
class Recycles(Protocol):
    """A place where a record is written faster over one that is no longer wanted."""

    def recycle(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """As `delete`, to make room for records that are written next."""


@runtime_checkable
class Peeks(Protocol):
    """A place that hands out the beginning of a record without the rest."""

    def peek(self, keys: Sequence[BlockKey]) -> list[bytes | Outcome]:
        """The first 4 KiB of each record (the header), or why not. Is no use of the record."""


@runtime_checkable
class Tidies(Protocol):
    """A place where more than records may lie."""

    def oddments(self, remove: bool) -> Oddments:
        """Count what is no record; with `remove` delete what dead writers left, and only that."""

    def prune(self, tags: Collection[bytes]) -> None:
        """Remove what empty scopes leave behind, such as folders."""


def age_s(depth: int) -> float:
    """How much older than its use the date of a block is that has `depth` blocks before it."""
    return min(depth, _DEPTH_MAX) * _DEPTH_AGE_S
