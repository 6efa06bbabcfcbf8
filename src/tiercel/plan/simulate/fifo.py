"""FIFO and S3-FIFO over blocks, with hits counted as the leading cached part of each chain.

Chains are stored leaf first, so that a parent goes in after its children and comes out after them. Both
functions return the leading cached blocks of every request.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tiercel.plan.simulate.trace import Trace

SMALL_SHARE = 0.1  # of the capacity, as in the S3-FIFO paper (SOSP 2023), like the next two
FREQUENCY_MAX = 3
FREQUENCY_TO_STAY = 2  # hits in the small queue that earn a place in the main one
_TABLE_BYTES_MAX = 256 << 20
_NEVER = -(2**40)


def fifo_leading_blocks(trace: Trace, capacities: Sequence[int]) -> list[npt.NDArray[np.int64]]:
    """Leading cached blocks per request, one array per capacity.

    A block that went in as number i is still there while fewer than C went in after it, so the whole
    state is one number per block; capacities are simulated side by side as rows.
    """
    rows_max = max(1, _TABLE_BYTES_MAX // (8 * max(1, trace.block_count)))
    leading: list[npt.NDArray[np.int64]] = []
    for first in range(0, len(capacities), rows_max):
        leading.extend(_fifo_rows(trace, np.array(capacities[first : first + rows_max], dtype=np.int64)))
    return leading


def _fifo_rows(trace: Trace, capacities: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    entered = np.full((trace.block_count, len(capacities)), _NEVER, dtype=np.int64)
    stored = np.zeros(len(capacities), dtype=np.int64)
    leading = np.zeros((trace.request_count, len(capacities)), dtype=np.int64)
    offsets = trace.offsets.tolist()
    for request, (start, end) in enumerate(pairwise(offsets)):
        chain = trace.blocks[start:end]
        numbers = entered[chain]
        cached = numbers > stored - capacities
        leading[request] = np.logical_and.accumulate(cached).sum(axis=0)
        # Leaf first: the last row of the chain gets the smallest new number.
        ranks = np.cumsum(~cached[::-1], axis=0)[::-1]
        entered[chain] = np.where(cached, numbers, stored + ranks)
        if len(ranks):
            stored += ranks[0]
    return leading.T


def s3fifo_leading_blocks(trace: Trace, capacity_blocks: int) -> npt.NDArray[np.int64]:
    """Leading cached blocks per request under S3-FIFO at one capacity."""
    leading = np.zeros(trace.request_count, dtype=np.int64)
    if capacity_blocks < 1:
        return leading
    cache = _S3Fifo(trace.block_count, capacity_blocks)
    offsets = trace.offsets.tolist()
    for request, (start, end) in enumerate(pairwise(offsets)):
        leading[request] = cache.request(trace.blocks[start:end])
    return leading


class _S3Fifo:
    """New blocks enter the small queue; those hit there move to the main one, the rest leave soon.

    A ghost remembers the last `capacity - small` blocks that left the small queue: coming back, such a
    block enters the main queue at once.
    """

    def __init__(self, block_count: int, capacity_blocks: int) -> None:
        self.capacity = capacity_blocks
        self.small_max = max(1, int(capacity_blocks * SMALL_SHARE))
        self.ghost_max = capacity_blocks - self.small_max
        self.small: deque[int] = deque()
        self.main: deque[int] = deque()
        # One byte array seen twice: Python reads single bytes faster, numpy whole chains.
        self.frequency = bytearray(block_count)
        self.frequency_view = np.frombuffer(self.frequency, dtype=np.uint8)
        self.cached = bytearray(block_count)
        self.cached_view = np.frombuffer(self.cached, dtype=np.bool_)
        self.ghost_number = array("q", [_NEVER]) * block_count
        self.ghosts = 0

    def request(self, chain: npt.NDArray[np.int32]) -> int:
        """Look a chain up, count its leading hits, store what is missing."""
        cached = self.cached_view[chain]
        present = chain[cached]
        if len(present):
            self.frequency_view[present] = np.minimum(self.frequency_view[present] + 1, FREQUENCY_MAX)
        if len(present) == len(chain):
            return len(chain)
        self._store(chain[~cached][::-1].tolist())
        return int(np.argmin(cached))

    def _store(self, blocks: list[int]) -> None:
        # The hot loop: names are looked up once, and the common eviction does not leave the function.
        cached, frequency, ghost_number = self.cached, self.frequency, self.ghost_number
        small, main = self.small, self.main
        small_max, capacity = self.small_max, self.capacity
        used = len(small) + len(main)
        for block in blocks:
            if used < capacity:
                used += 1
            elif len(small) >= small_max and frequency[small[-1]] < FREQUENCY_TO_STAY:
                self._forget(small.pop())
            else:
                self._evict()
            remembered = ghost_number[block] > self.ghosts - self.ghost_max
            ghost_number[block] = _NEVER
            (main if remembered else small).appendleft(block)
            cached[block] = 1
            frequency[block] = 0

    def _forget(self, block: int) -> None:
        """Take a block out that left the small queue, and remember it as a ghost."""
        self.cached[block] = 0
        self.ghosts += 1
        self.ghost_number[block] = self.ghosts

    def _evict(self) -> None:
        if len(self.small) >= self.small_max and self._evict_small():
            return
        if not self._evict_main():
            self._evict_small()

    def _evict_small(self) -> bool:
        while self.small:
            block = self.small.pop()
            if self.frequency[block] < FREQUENCY_TO_STAY:
                self._forget(block)
                return True
            self.frequency[block] = 0
            self.main.appendleft(block)
        return False

    def _evict_main(self) -> bool:
        while self.main:
            block = self.main.pop()
            if not self.frequency[block]:
                self.cached[block] = 0
                return True
            self.frequency[block] -= 1
            self.main.appendleft(block)
        return False
