"""The offline optimum: no eviction policy, however clever, hits more blocks than this.

Belady's rule for blocks of equal size, with the freedom not to keep a block at all: drop what is used
again furthest in the future. A child is never used before its parent, so ties broken towards the leaf
keep every cached chain whole, and the bound holds for prefix caches too.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tiercel.plan.simulate.runs import Runs, next_uses


def optimum_hits(runs: Runs, block_tokens: int, capacities: Sequence[int]) -> list[tuple[int, int]]:
    """(block hits, token hits) per capacity."""
    following = next_uses(runs)
    return [_hits_at(runs, following, block_tokens, capacity) for capacity in capacities]


def _hits_at(
    runs: Runs, following: npt.NDArray[np.int64], block_tokens: int, capacity_blocks: int
) -> tuple[int, int]:
    refs, offsets = runs.refs, runs.offsets.tolist()
    weights, padding = runs.weights.tolist(), runs.padding_tokens.tolist()
    kept = [0] * runs.run_count  # leading blocks of each run that are cached
    # Negated index of the next reference: the smallest is the furthest, and in one request the leaf.
    # Entries whose time has come are never on top while anything is cached, so none need be removed.
    furthest: list[int] = []
    used = blocks = padded = 0
    for request, (start, end) in enumerate(pairwise(offsets)):
        whole = end > start
        upcoming = following[start:end].tolist()
        for run, then in zip(refs[start:end].tolist(), upcoming, strict=True):
            cached, weight = kept[run], weights[run]
            blocks += cached
            whole = whole and cached == weight
            kept[run] = weight if then >= 0 else 0
            used += kept[run] - cached
            if then >= 0:
                heappush(furthest, -then)
        if whole:
            padded += padding[request]
        while used > capacity_blocks:
            run = int(refs[-furthest[0]])
            dropped = min(kept[run], used - capacity_blocks)
            kept[run] -= dropped
            used -= dropped
            if not kept[run]:
                heappop(furthest)
    return blocks, blocks * block_tokens - padded
