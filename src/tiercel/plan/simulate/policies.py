"""Hit counts of eviction policies over a trace at given capacities: the points of miss-ratio curves.

One cache, no time: a request looks its chain up, counts the leading blocks that are cached, then stores
the whole chain. Blocks have equal size. Nothing here knows of bytes, tiers or seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiercel.plan.simulate.fifo import fifo_leading_blocks, s3fifo_leading_blocks
from tiercel.plan.simulate.optimum import optimum_hits
from tiercel.plan.simulate.runs import Runs
from tiercel.plan.simulate.stack import lru_hits, prefix_lru_hits
from tiercel.plan.simulate.trace import Trace


@dataclass(frozen=True, slots=True)
class Hits:
    """What one policy served at one capacity."""

    capacity_blocks: int
    blocks: int
    tokens: int


def _tiercel(trace: Trace, runs: Runs, capacities: Sequence[int]) -> list[tuple[int, int]]:
    return prefix_lru_hits(runs, trace.block_tokens, capacities)


def _lru(trace: Trace, runs: Runs, capacities: Sequence[int]) -> list[tuple[int, int]]:
    return lru_hits(runs, trace.block_tokens, capacities)


def _optimum(trace: Trace, runs: Runs, capacities: Sequence[int]) -> list[tuple[int, int]]:
    return optimum_hits(runs, trace.block_tokens, capacities)


def _fifo(trace: Trace, runs: Runs, capacities: Sequence[int]) -> list[tuple[int, int]]:
    return [_total(trace, row) for row in fifo_leading_blocks(trace, capacities)]


def _s3fifo(trace: Trace, runs: Runs, capacities: Sequence[int]) -> list[tuple[int, int]]:
    return [_total(trace, s3fifo_leading_blocks(trace, capacity)) for capacity in capacities]


def _total(trace: Trace, leading: npt.NDArray[np.int64]) -> tuple[int, int]:
    tokens = np.minimum(leading * trace.block_tokens, trace.input_tokens)
    return int(leading.sum()), int(tokens.sum())


# Name → what it is, in one line, and how it is counted; the order is the order of tables and legends.
POLICIES: dict[str, tuple[str, Callable[[Trace, Runs, Sequence[int]], list[tuple[int, int]]]]] = {
    "tiercel": ("LRU that knows prefixes: leaves go before their parents", _tiercel),
    "lru": ("LRU over blocks, touched in reading order", _lru),
    "fifo": ("first in, first out", _fifo),
    "s3-fifo": ("small, main and ghost queue (S3-FIFO)", _s3fifo),
    "opt": ("offline optimum (Belady): the bound for any policy", _optimum),
}


def policy_hits(name: str, trace: Trace, runs: Runs, capacities_blocks: Sequence[int]) -> list[Hits]:
    """Return the hits of policy `name` at each capacity; `runs` must come from `join_runs(trace)`."""
    counted = POLICIES[name][1](trace, runs, capacities_blocks)
    return [Hits(c, blocks, tokens) for c, (blocks, tokens) in zip(capacities_blocks, counted, strict=True)]
