"""LRU at every capacity in one pass over the trace, by stack distances.

Think of the cache as a stack, most recently used on top: a cache of C blocks holds the top C. A block's
distance is the number of blocks above it, so it is a hit for every C above that. Distances are sums over
a Fenwick tree of run lengths in order of last use (Mattson 1970; Bennett and Kruskal 1975).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tiercel.plan.simulate.runs import Runs

COLD = 2**62
"""Distance of a run that was never seen before: out of reach of any capacity."""


class _Fenwick:
    """Weights at positions 0..size-1 with prefix sums in O(log size)."""

    __slots__ = ("size", "total", "tree")

    def __init__(self, size: int) -> None:
        self.size = size
        self.total = 0
        self.tree = [0] * (size + 1)

    def add(self, position: int, weight: int) -> None:
        self.total += weight
        tree, size, i = self.tree, self.size, position + 1
        while i <= size:
            tree[i] += weight
            i += i & -i

    def above(self, position: int) -> int:
        """Sum of the weights at positions greater than `position`."""
        tree, i, below = self.tree, position + 1, 0
        while i:
            below += tree[i]
            i &= i - 1
        return self.total - below


def stack_distances(runs: Runs, *, leaf_first: bool) -> npt.NDArray[np.int64]:
    """Blocks above each referenced run when its request arrives, or COLD; same order as `runs.refs`.

    With `leaf_first` a chain is touched from its leaf to its root, so that the root ends on top.
    """
    distances = np.full(len(runs.refs), COLD, dtype=np.int64)
    weights = runs.weights.tolist()
    last = [-1] * runs.run_count
    fenwick = _Fenwick(len(runs.refs))
    offsets = runs.offsets.tolist()
    position = 0
    for start, end in pairwise(offsets):
        chain = runs.refs[start:end].tolist()
        previous, above = -2, 0
        for i, run in enumerate(chain):
            seen = last[run]
            if seen < 0:
                break  # nothing below a new run was seen before
            # Touched just before its parent and not since: it lies right under it, no need to sum.
            if leaf_first and seen == previous - 1:
                above += weights[chain[i - 1]]
            else:
                above = fenwick.above(seen)
            distances[start + i] = above
            previous = seen
        for run in reversed(chain) if leaf_first else chain:
            if last[run] >= 0:
                fenwick.add(last[run], -weights[run])
            fenwick.add(position, weights[run])
            last[run] = position
            position += 1
    return distances


def prefix_lru_hits(runs: Runs, block_tokens: int, capacities: Sequence[int]) -> list[tuple[int, int]]:
    """(block hits, token hits) per capacity for chains touched leaf first.

    Parents are always above their children, so whatever is cached is a leading part of the chain.
    """
    distances = stack_distances(runs, leaf_first=True)
    weights = runs.weights[runs.refs]
    last = _last_refs(runs)
    counted = []
    for capacity in capacities:
        blocks = int(np.clip(capacity - distances, 0, weights).sum())
        whole = distances[last.refs] + weights[last.refs] <= capacity
        counted.append((blocks, blocks * block_tokens - int(last.padding_tokens[whole].sum())))
    return counted


def lru_hits(runs: Runs, block_tokens: int, capacities: Sequence[int]) -> list[tuple[int, int]]:
    """(block hits, token hits) per capacity for chains touched root first, as a plain LRU would.

    The root-most block of a run lies deepest and is lost first; all that follows it is then useless. So
    the run is a hit only where the deepest block of it and of every run before it is cached.
    """
    distances = stack_distances(runs, leaf_first=False)
    weights = runs.weights[runs.refs]
    needed = _running_max(distances + weights, runs.offsets)
    last = _last_refs(runs)
    counted = []
    for capacity in capacities:
        blocks = int(weights[needed <= capacity].sum())
        whole = needed[last.refs] <= capacity
        counted.append((blocks, blocks * block_tokens - int(last.padding_tokens[whole].sum())))
    return counted


class _LastRefs:
    """The last run of every request that has one, with the tokens its last block is short of."""

    __slots__ = ("padding_tokens", "refs")

    def __init__(self, refs: npt.NDArray[np.int64], padding_tokens: npt.NDArray[np.int64]) -> None:
        self.refs = refs
        self.padding_tokens = padding_tokens


def _last_refs(runs: Runs) -> _LastRefs:
    some = np.diff(runs.offsets) > 0
    return _LastRefs(runs.offsets[1:][some] - 1, runs.padding_tokens[some])


def _running_max(values: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Maximum so far within each request."""
    reached = values.copy()
    lengths = np.diff(offsets)
    for step in range(1, int(lengths.max(initial=0))):
        at = offsets[:-1][lengths > step] + step
        reached[at] = np.maximum(reached[at], reached[at - 1])
    return reached
