"""Load, recompute, or split: which part of a cached prefix is worth fetching for this request, now.

Pure arithmetic on the state of the links and the engine; nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from tiercel.plan.simulate.costs import PrefillCost, TierSpec

Stretch = tuple[int, int]
"""(tier number, blocks)."""


@dataclass(frozen=True, slots=True)
class Loads:
    """Blocks to load per tier, and when each link is done; `ready_s` is the last of them."""

    blocks: tuple[int, ...]
    link_done_s: tuple[float, ...]
    ready_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with a request of which `cached_blocks` leading blocks are somewhere.

    `used_tokens` come from the cache, of which the first `near_tokens` are computed anyway while the rest
    loads (a split); `first_token_s` is the expected time of the first token.
    """

    used_tokens: int
    near_tokens: int
    loads: Loads
    first_token_s: float


@dataclass(frozen=True, slots=True)
class Situation:
    """A request at a host: the time, its length, when an engine is free, when each link is free.

    All bytes from lower tiers pass tier 0 on their way, so its link carries everything.
    """

    now_s: float
    input_tokens: int
    engine_free_s: float
    link_free_s: Sequence[float]
    tiers: Sequence[TierSpec]
    prefill: PrefillCost
    block_bytes: int
    block_tokens: int

    def loads(self, blocks: Sequence[int]) -> Loads:
        """When the links would be done with these blocks per tier."""
        done = list(self.link_free_s)
        ready = self.now_s
        for number, tier in enumerate(self.tiers):
            carried = sum(blocks) if number == 0 else blocks[number]
            if not carried:
                continue
            start = max(self.now_s, done[number])
            done[number] = start + tier.latency_s + carried * self.block_bytes / tier.bytes_per_s
            ready = max(ready, done[number])
        return Loads(tuple(blocks), tuple(done), ready)

    def usable(self, blocks: int) -> int:
        """Tokens that `blocks` leading blocks save: the last token is always computed, for its logits."""
        return min(blocks * self.block_tokens, max(self.input_tokens - 1, 0))

    def whole(self, blocks: Sequence[int]) -> Plan:
        """The plan that loads `blocks` (per tier) first and then computes the rest."""
        loads = self.loads(blocks)
        used = self.usable(sum(blocks))
        start = max(loads.ready_s, self.engine_free_s, self.now_s)
        return Plan(used, 0, loads, start + self.prefill.seconds(self.input_tokens - used, used))


def decide(situation: Situation, stretches: Sequence[Stretch], *, always_load: bool, split: bool) -> Plan:
    """Return the plan with the earliest expected first token; equal ones: the one that computes least.

    Within one stretch the time until all is loaded is the largest of a few straight lines of the length,
    and the computing saved grows at least linearly; so the best length is at an end of the stretch, or
    where another line becomes the largest (such as the load ending just as the engine is free).
    """
    nothing = [0] * len(situation.tiers)
    if always_load:
        return situation.whole(_per_tier(nothing, stretches))
    best = situation.whole(nothing)
    taken = nothing
    for number, blocks in stretches:
        for more in (*_bends(situation, taken, number, blocks), blocks):
            plan = situation.whole(_per_tier(taken, [(number, more)]))
            if plan.first_token_s <= best.first_token_s:
                best = plan
        taken = _per_tier(taken, [(number, blocks)])
    if split and stretches:
        overlapped = _split(situation, stretches)
        if overlapped.first_token_s < best.first_token_s:
            best = overlapped
    return best


def _per_tier(taken: Sequence[int], stretches: Sequence[Stretch]) -> list[int]:
    blocks = list(taken)
    for number, more in stretches:
        blocks[number] += more
    return blocks


def _bends(situation: Situation, taken: Sequence[int], number: int, blocks: int) -> list[int]:
    """Lengths inside a stretch, ascending, next to which another line decides when all is loaded.

    The lines: the engine and the tiers before (level), the link of tier 0 and the stretch's own link.
    """
    level = max(situation.engine_free_s, situation.loads(taken).ready_s)
    lines = [(level, 0.0)]
    for tier_number in sorted({0, number}):
        tier = situation.tiers[tier_number]
        carried = sum(taken) if tier_number == 0 else taken[tier_number]
        start = max(situation.now_s, situation.link_free_s[tier_number]) + tier.latency_s
        per_block_s = situation.block_bytes / tier.bytes_per_s
        lines.append((start + carried * per_block_s, per_block_s))
    found = set()
    for (base, slope), (other_base, other_slope) in combinations(lines, 2):
        if slope != other_slope:
            crossing = (other_base - base) / (slope - other_slope)
            if -1 < crossing < blocks:
                found |= {int(crossing), int(crossing) + 1}
    return sorted(more for more in found if 0 < more < blocks)


def _split(situation: Situation, stretches: Sequence[Stretch]) -> Plan:
    """Compute the first x blocks of the prefix while the others load, both ending together (Cake's idea)."""
    cached = sum(blocks for _, blocks in stretches)
    low, high = 0, cached
    while low < high:
        middle = (low + high) // 2
        computed, loads = _halves(situation, stretches, middle)
        if computed >= loads.ready_s:
            high = middle
        else:
            low = middle + 1
    plans = [_split_at(situation, stretches, x) for x in {max(low - 1, 0), low}]
    return min(plans, key=lambda plan: plan.first_token_s)


def _halves(situation: Situation, stretches: Sequence[Stretch], near_blocks: int) -> tuple[float, Loads]:
    """When the near part is computed, and the loads of the far part."""
    start = max(situation.now_s, situation.engine_free_s)
    computed = start + situation.prefill.seconds(situation.usable(near_blocks), 0)
    far, skip = [0] * len(situation.tiers), near_blocks
    for number, blocks in stretches:
        far[number] += max(blocks - skip, 0)
        skip = max(skip - blocks, 0)
    return computed, situation.loads(far)


def _split_at(situation: Situation, stretches: Sequence[Stretch], near_blocks: int) -> Plan:
    computed, loads = _halves(situation, stretches, near_blocks)
    used = situation.usable(sum(blocks for _, blocks in stretches))
    rest_s = situation.prefill.seconds(situation.input_tokens - used, used)
    plan = Plan(used, situation.usable(near_blocks), loads, max(computed, loads.ready_s) + rest_s)
    # All computed or all loaded is no split; the caller has these among its whole plans.
    return plan if sum(loads.blocks) else replace(plan, used_tokens=0, near_tokens=0)
