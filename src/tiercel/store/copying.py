"""Copies records from one tier to another: what was used last first, what is there already not again.

Every record is checked on the way; a bad one is left behind. Stores may use both places meanwhile. It never
deletes anything, and never writes beyond the cap it is given.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tiercel.blocks import TAG_BYTES, verify
from tiercel.errors import TierError
from tiercel.store.inspect import EVERY_CODEC, CachePlace, batched, in_order
from tiercel.tiers import Fate, Outcome, Stored
from tiercel.tiers.extras import Shared

_BATCH_RECORDS = 8
# Such a record is no block of ours, whatever its header says.
_RECORD_BYTES_MAX = 1 << 30
_FAILURES_MAX = 32


@dataclass(slots=True)
class CopyReport:
    """What became of the records of a copy. `left_out`: no room for them under the cap, or in the place."""

    copied: int = 0
    copied_bytes: int = 0
    there_already: int = 0
    bad: int = 0
    failed: int = 0
    left_out: int = 0
    records: int = 0

    def add(self, other: CopyReport) -> None:
        """Take in what became of one batch."""
        self.copied += other.copied
        self.copied_bytes += other.copied_bytes
        self.there_already += other.there_already
        self.bad += other.bad
        self.failed += other.failed
        self.left_out += other.left_out


def copy(
    source: CachePlace,
    target: CachePlace,
    *,
    tags: frozenset[bytes] | None = None,
    cap_bytes: int | None = None,
    threads: int = 2,
    progress: Callable[[CopyReport], None] = lambda report: None,
) -> CopyReport:
    """Copy the records of some scopes (None: of all) and check each; `cap_bytes` bounds the whole target.

    Blocks; `progress(so far)` is called on this thread, and may raise to end it: what is copied then stays.
    Raises `TierError` when a place is out of reach. Memory: the listing, and a batch for each thread.
    """
    listed = [one for one in source.records() if tags is None or one.key[:TAG_BYTES] in tags]
    # Newest first: parents are dated younger than their children, so what is copied can be used at once.
    listed.sort(key=lambda one: one.used_s, reverse=True)
    report = CopyReport(records=len(listed))
    copier = _Copier(source, target, None if cap_bytes is None else cap_bytes - _held_bytes(target))
    for part in in_order(copier.copy, batched(iter(listed), _BATCH_RECORDS), threads):
        report.add(part)
        progress(report)
    return report


def _held_bytes(place: CachePlace) -> int:
    return sum(one.record_bytes for one in place.records())


class _Copier:
    """Copies batches on several threads, each with buffers of its own."""

    def __init__(self, source: CachePlace, target: CachePlace, room_bytes: int | None) -> None:
        self._source = source
        self._target = target
        self._room_bytes = room_bytes
        self._full = False
        self._failures = 0
        self._own = threading.local()
        self._lock = threading.Lock()

    def copy(self, batch: Sequence[Stored]) -> CopyReport:
        report = CopyReport()
        with self._target.one_line():
            there = self._target.tier.contains([one.key for one in batch])
        wanted = []
        for one, is_there in zip(batch, there, strict=True):
            if is_there:
                report.there_already += 1
            elif one.record_bytes > _RECORD_BYTES_MAX:
                report.bad += 1
            elif self._reserve(one.record_bytes):
                wanted.append(one)
            else:
                report.left_out += 1
        written = self._write(self._read(wanted, report), report)
        if written and isinstance(self._target.tier, Shared):
            now_s = time.time()
            self._target.tier.touch(
                [one.key for one in written], [max(0.0, now_s - one.used_s) for one in written]
            )
        return report

    def _reserve(self, size: int) -> bool:
        with self._lock:
            if self._full or (self._room_bytes is not None and self._room_bytes < size):
                # Smaller ones later would only be children without their parents.
                self._full = True
                return False
            if self._room_bytes is not None:
                self._room_bytes -= size
        return True

    def _read(self, wanted: Sequence[Stored], report: CopyReport) -> list[tuple[Stored, memoryview]]:
        buffers = list(self._buffers([one.record_bytes for one in wanted]))
        outcomes = self._source.tier.read([one.key for one in wanted], buffers)
        sound = []
        for one, buffer, outcome in zip(wanted, buffers, outcomes, strict=True):
            if outcome.fate is Fate.OK:
                found = verify(buffer, one.key, EVERY_CODEC)
                if not isinstance(found, str):
                    sound.append((one, buffer))
                    continue
            if outcome.fate in (Fate.OK, Fate.CORRUPT):
                report.bad += 1
            elif outcome.fate is not Fate.MISSING:
                self._count_failure(self._source, outcome)
                report.failed += 1
        return sound

    def _write(self, sound: Sequence[tuple[Stored, memoryview]], report: CopyReport) -> list[Stored]:
        outcomes = self._target.tier.write([one.key for one, _ in sound], [buffer for _, buffer in sound])
        written = []
        for (one, _), outcome in zip(sound, outcomes, strict=True):
            if outcome.fate is Fate.OK:
                self._failures = 0
                written.append(one)
                report.copied += 1
                report.copied_bytes += one.record_bytes
            elif outcome.fate is Fate.FULL:
                self._full = True
                report.left_out += 1
            else:
                self._count_failure(self._target, outcome)
                report.failed += 1
        return written

    def _count_failure(self, place: CachePlace, outcome: Outcome) -> None:
        self._failures += 1
        if self._failures >= _FAILURES_MAX:
            raise TierError(f"{place.shown}: does not answer: {outcome.reason}")

    def _buffers(self, sizes: Sequence[int]) -> Iterator[memoryview]:
        total = sum(sizes)
        held: memoryview | None = getattr(self._own, "buffer", None)
        if held is None or len(held) < total:
            # A map is page aligned, and so are the records in it: direct I/O and checks need that.
            held = self._own.buffer = memoryview(mmap.mmap(-1, max(total, mmap.PAGESIZE)))
        at = 0
        for size in sizes:
            yield held[at : at + size]
            at += size
