"""What tiers around another tier share: all calls go to the inner one, and so do the extras that it offers.

Owns its buffers: page-aligned, one per thread, as long as its largest batch. Changes nothing by itself.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Collection, Iterator, Sequence

from tiercel.blocks import BlockKey
from tiercel.tiers.base import Outcome, Stored, Tier, Usage
from tiercel.tiers.extras import Oddments, Part, Peeks, Recycles, Shared, Tidies


class Around:
    """A `Tier` over another one, without `read` and `write`: those are what it is for."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self._local = threading.local()

    @property
    def name(self) -> str:
        return self.inner.name

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self.inner.contains(keys)

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self.inner.delete(keys)

    def scan(self) -> Iterator[Stored]:
        return self.inner.scan()

    def usage(self) -> Usage:
        return self.inner.usage()

    def close(self) -> None:
        self.inner.close()

    def _scratch(self, size_bytes: int) -> memoryview:
        held: memoryview | None = getattr(self._local, "scratch", None)
        if held is None or len(held) < size_bytes:
            held = self._local.scratch = memoryview(mmap.mmap(-1, size_bytes))
        return held[:size_bytes]


class _ForwardsShared:
    inner: Shared

    def changes(self, afresh: bool) -> Iterator[Part]:
        return self.inner.changes(afresh)

    def dates(self, keys: Sequence[BlockKey]) -> list[float | None]:
        return self.inner.dates(keys)

    def touch(self, keys: Sequence[BlockKey], ages_s: Sequence[float]) -> list[Outcome]:
        return self.inner.touch(keys, ages_s)


class ForwardsRecycles:
    """`Recycles`, forwarded."""

    inner: Recycles

    def recycle(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self.inner.recycle(keys)


class ForwardsPeeks:
    """`Peeks`, forwarded."""

    inner: Peeks

    def peek(self, keys: Sequence[BlockKey]) -> list[bytes | Outcome]:
        return self.inner.peek(keys)


class _ForwardsTidies:
    inner: Tidies

    def oddments(self, remove: bool) -> Oddments:
        return self.inner.oddments(remove)

    def prune(self, tags: Collection[bytes]) -> None:
        self.inner.prune(tags)


def offering(kind: type, inner: Tier, recycles: type = ForwardsRecycles, peeks: type = ForwardsPeeks) -> type:
    """`kind`, an `Around`, with whatever extras `inner` offers."""
    forwards = tuple(
        forward
        for offer, forward in (
            (Shared, _ForwardsShared),
            (Recycles, recycles),
            (Peeks, peeks),
            (Tidies, _ForwardsTidies),
        )
        if isinstance(inner, offer)
    )
    return type(kind.__name__, (*forwards, kind), {})
