"""Join blocks that are always asked for together into runs, so that simulating costs per run, not per block.

A block and its parent belong together when equally many requests use them: every request that has the
block has the parent, so equal counts mean the same requests. This loses nothing: a cache that drops
leaves first holds a leading part of each run, and a leading part is one number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiercel.plan.simulate.trace import Trace


@dataclass(frozen=True, slots=True)
class Runs:
    """`refs[offsets[i]:offsets[i + 1]]` are the runs that request i touches, root first.

    `weights[run]` is its length in blocks. `padding_tokens[i]` is by how much request i's last block is
    short of a full one (0 if the log leaves incomplete blocks out).
    """

    refs: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    weights: npt.NDArray[np.int64]
    padding_tokens: npt.NDArray[np.int64]

    @property
    def run_count(self) -> int:
        return len(self.weights)


def join_runs(trace: Trace, *, run_blocks_max: int | None = None) -> Runs:
    """Return the runs of a trace; `run_blocks_max` also cuts them at multiples of that depth."""
    blocks, offsets = trace.blocks, trace.offsets
    lengths = np.diff(offsets)
    padding = np.maximum(lengths * trace.block_tokens - trace.input_tokens, 0)
    if not len(blocks):
        return Runs(np.zeros(0, np.int32), np.zeros_like(offsets), np.zeros(0, np.int64), padding)
    uses = np.bincount(blocks, minlength=trace.block_count)
    starts = (trace.parents < 0) | (uses != uses[trace.parents])
    if run_blocks_max is not None:
        depth = np.arange(len(blocks), dtype=np.int64) - np.repeat(offsets[:-1], lengths)
        starts[blocks[depth % run_blocks_max == 0]] = True
    at_start = starts[blocks]
    positions = np.flatnonzero(at_start)
    numbers = np.cumsum(starts, dtype=np.int32) - 1
    refs = numbers[blocks[positions]]
    # A request always begins a run, so the distance to the next start is the run's length.
    weights = np.zeros(int(numbers[-1]) + 1, dtype=np.int64)
    weights[refs] = np.diff(np.append(positions, len(blocks)))
    before = np.concatenate(([0], np.cumsum(at_start, dtype=np.int64)))
    return Runs(refs.astype(np.int32), before[offsets], weights, padding)


def next_uses(runs: Runs) -> npt.NDArray[np.int64]:
    """For each reference, the index of the next reference to the same run, or -1."""
    order = np.argsort(runs.refs, kind="stable")
    same = runs.refs[order[1:]] == runs.refs[order[:-1]]
    following = np.full(len(runs.refs), -1, dtype=np.int64)
    following[order[:-1][same]] = order[1:][same]
    return following
