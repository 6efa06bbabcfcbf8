"""Records in this process' own memory, below the arena: with a codec the same room holds more blocks there.

What lies here ends with the process, and nobody else can reach it. A record takes as many pages as it is long
and not one more, so `size_bytes` is all that the tier ever takes, and it takes that as it fills. Encoding and
decoding are `tiercel.tiers.coded`'s.

Locking: one lock protects the table and the free pages; bytes are copied without it. Pages go back only when
nobody copies from or to them any more.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tiercel.blocks import PAGE_BYTES, BlockKey
from tiercel.memory import PageNumbers, Pages
from tiercel.tiers.base import MISSING, OK, Fate, Outcome, Stored, Usage

# So long does a writer wait for pages of dropped records that are still being read, which takes milliseconds.
_READERS_S = 1.0
_CLOSED = Outcome(Fate.FAILED, "closed")


class _Held:
    """A record's pages, whether it is to be found, and how many copy from or to it now."""

    __slots__ = ("copies", "listed", "pages", "used_s")

    def __init__(self, pages: PageNumbers) -> None:
        self.pages = pages
        self.listed = False
        self.copies = 0
        self.used_s = time.time()

    @property
    def record_bytes(self) -> int:
        return len(self.pages) * PAGE_BYTES


class MemoryTier:
    """A table of records in `size_bytes` of memory, rounded down to pages.

    Raises `MemoryLimitError` when so much does not fit the host or its control group.
    """

    def __init__(self, size_bytes: int, *, name: str = "memory") -> None:
        self.name = name
        self._pages = Pages(size_bytes, f"tier {name}")
        self._records: dict[BlockKey, _Held] = {}
        # Dropped while they were read: their pages come back soon.
        self._leaving: set[_Held] = set()
        self._copies = 0
        self._closed = False
        self._lock = threading.Condition(threading.Lock())

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._lock:
            return [key in self._records for key in keys]

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        return [self._read(key, record) for key, record in zip(keys, records, strict=True)]

    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        return [self._write(key, record) for key, record in zip(keys, records, strict=True)]

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        with self._lock:
            if self._closed:
                return [_CLOSED] * len(keys)
            return [OK if self._drop(key) else MISSING for key in keys]

    def scan(self) -> Iterator[Stored]:
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, "closed")
            listed = [Stored(key, held.record_bytes, held.used_s) for key, held in self._records.items()]
        yield from listed

    def usage(self) -> Usage:
        with self._lock:
            if self._closed:
                return Usage()
            return Usage(self._pages.free * PAGE_BYTES, self._pages.total * PAGE_BYTES)

    def close(self) -> None:
        """Drop everything. The memory goes back now, or with the last copy that is under way."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._records.clear()
            self._lock.notify_all()
            if not self._copies:
                self._pages.close()

    # Inner workings.

    def _read(self, key: BlockKey, record: memoryview) -> Outcome:
        with self._lock:
            if self._closed:
                return _CLOSED
            held = self._records.get(key)
            if held is None:
                return MISSING
            size = held.record_bytes
            if size > len(record):
                return Outcome(Fate.CORRUPT, f"record has {size} bytes")
            held.used_s = time.time()
            self._begin_copy(held)
        with self._copying(held):
            self._pages.read(held.pages, record[:size])
        return OK

    def _write(self, key: BlockKey, record: memoryview) -> Outcome:
        if not len(record) or len(record) % PAGE_BYTES:
            return Outcome(Fate.FAILED, f"{len(record)} bytes are no whole pages")
        with self._lock:
            pages = self._room(key, len(record) // PAGE_BYTES)
            if pages is None:
                return _CLOSED if self._closed else Outcome(Fate.FULL, "no room left")
            held = _Held(pages)
            self._begin_copy(held)
        with self._copying(held):
            self._pages.write(pages, record)
            with self._lock:
                if self._closed:
                    return _CLOSED
                self._drop(key)
                self._records[key] = held
                held.listed = True
        return OK

    def _room(self, key: BlockKey, count: int) -> PageNumbers | None:
        """Pages for a record: free ones, else of the one it replaces, else what readers give back."""
        until_s = time.monotonic() + _READERS_S
        while not self._closed:
            pages = self._pages.take(count)
            if pages is not None:
                return pages
            if self._drop(key):
                continue
            left_s = until_s - time.monotonic()
            if not self._leaving or left_s <= 0:
                return None
            self._lock.wait(left_s)
        return None

    def _drop(self, key: BlockKey) -> bool:
        """Find a record no more. Whether it was there."""
        held = self._records.pop(key, None)
        if held is None:
            return False
        held.listed = False
        if held.copies:
            self._leaving.add(held)
        else:
            self._pages.give(held.pages)
        return True

    def _begin_copy(self, held: _Held) -> None:
        held.copies += 1
        self._copies += 1

    @contextmanager
    def _copying(self, held: _Held) -> Iterator[None]:
        """Lets go of a record at the end, and of what nobody needs any more."""
        try:
            yield
        finally:
            with self._lock:
                held.copies -= 1
                self._copies -= 1
                if self._closed:
                    if not self._copies:
                        self._pages.close()
                elif not held.listed and not held.copies:
                    self._leaving.discard(held)
                    self._pages.give(held.pages)
                    self._lock.notify_all()
