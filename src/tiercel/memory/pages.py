"""Host memory in pages, for records of any length: each is a list of pages, wherever some are free.

A record is whole pages, so no byte is lost to rounding and nothing fragments. A page is touched when it is
first written; those that were used before are handed out first. Knows nothing of blocks, keys or eviction.

Locking: none here. `take` and `give` belong to one owner and are called under its lock; `write` and `read`
need none, as pages belong to who took them. All of one record moves in one call that lets other threads run.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiercel.blocks import PAGE_BYTES
from tiercel.memory.slab import advise_huge, private_slab

_PAGE = np.dtype(f"V{PAGE_BYTES}")

PageNumbers = NDArray[np.int32]


class Pages:
    """`total_bytes` of memory in whole pages. Raises `MemoryLimitError` when they do not fit the host."""

    def __init__(self, total_bytes: int, what: str) -> None:
        self.total = total_bytes // PAGE_BYTES
        self._map = private_slab(self.total * PAGE_BYTES, what)
        advise_huge(self._map)
        self._pages = np.frombuffer(self._map, _PAGE)
        # Those given back, as a stack; none from `_fresh` on was ever handed out.
        self._given = np.empty(self.total, np.int32)
        self._given_count = 0
        self._fresh = 0

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return self.total - self._fresh + self._given_count

    def take(self, count: int) -> PageNumbers | None:
        """Hand out so many pages, or None when fewer are free."""
        if count > self.free:
            return None
        again = min(count, self._given_count)
        fresh = count - again
        self._given_count -= again
        self._fresh += fresh
        return np.concatenate(
            (
                self._given[self._given_count : self._given_count + again],
                np.arange(self._fresh - fresh, self._fresh, dtype=np.int32),
            )
        )

    def give(self, numbers: PageNumbers) -> None:
        """Take pages back."""
        count = self._given_count + len(numbers)
        self._given[self._given_count : count] = numbers
        self._given_count = count

    def write(self, numbers: PageNumbers, record: memoryview) -> None:
        """Copy a record, as long as these pages, into them."""
        self._pages[numbers] = np.frombuffer(record, _PAGE)

    def read(self, numbers: PageNumbers, record: memoryview) -> None:
        """Copy these pages to a record as long as they are."""
        # Numbers are ours and in range; checking them once more would copy everything twice.
        np.take(self._pages, numbers, out=np.frombuffer(record, _PAGE), mode="clip")

    def close(self) -> None:
        """Give the memory back. Nothing else may be called any more."""
        del self._pages
        self._map.close()
