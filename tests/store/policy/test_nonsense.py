"""Nonsense (suspended, stalled, zero-length, long idle) spoils no more than a few decisions.

A small world with an engine and a tier of known speed: requests do what is believed to be best, and what they
see is what is believed next. A decision is wrong if its true time is well above that of the best one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.store.policy import Choice, PrefillCost, PrefillEstimator, Prompt, TierSpeed, choose

BLOCK = 256
COST = PrefillCost(0.02, 3e-4, 4e-8)
# What is cached of a prompt, and what it is long.
SIZES = [(15, 4000), (3, 1000), (30, 8000), (7, 3000)]
FAST_S, SLOW_S = 0.004, 0.5
WRONG = 1.1
# "A few requests": what a tier that turned slow may cost, and as much for an engine that was misjudged.
FEW = 5
HOUR_S = 3600.0


@dataclass
class World:
    """One engine, one tier that reads one block at a time, a clock."""

    read_s: float = FAST_S
    cost: PrefillCost = COST
    now_s: float = 1000.0
    prefill: PrefillEstimator = field(default_factory=PrefillEstimator)
    speed: TierSpeed = field(default_factory=lambda: TierSpeed(1))

    def read(self, seconds: float, blocks: int = 1) -> None:
        one = self.speed.began(self.now_s)
        self.now_s += seconds
        self.speed.ended(one, blocks, self.now_s)

    def load_s(self, blocks: int) -> float:
        """What loading is believed to take."""
        return self.speed.seconds(blocks, 0, self.now_s)

    def request(self, cached: int, tokens: int) -> float:
        """Serve one prompt; how much longer it took than the best decision would have."""
        believed = self.prefill.cost()
        blocks = cached
        if believed is not None:
            blocks = self.choice(
                believed, cached, tokens, lambda n: self.speed.seconds(n, 0, self.now_s)
            ).blocks
        took_s = self.true_s(blocks, tokens)
        for _ in range(blocks):
            self.read(self.read_s)
        rest, context = tokens - blocks * BLOCK, blocks * BLOCK
        self.prefill.observe(rest, context, self.cost.seconds(rest, context))
        self.now_s += self.cost.seconds(rest, context)
        if not blocks and self.now_s - self.speed.observed_at_s > 5.0:
            self.read(self.read_s)  # priced out: the store reads one block for nobody now and then
        best = self.choice(self.cost, cached, tokens, lambda n: n * self.read_s).blocks
        return took_s / self.true_s(best, tokens)

    def choice(self, cost: PrefillCost, cached: int, tokens: int, seconds: Callable[[int], float]) -> Choice:
        return choose(Prompt(tokens, BLOCK, cost), ["disk"] * cached, 0, lambda _, blocks: seconds(blocks))

    def true_s(self, blocks: int, tokens: int) -> float:
        return blocks * self.read_s + self.cost.seconds(tokens - blocks * BLOCK, blocks * BLOCK)

    def run(self, requests: int, seed: int) -> list[float]:
        pick = random.Random(seed)
        return [self.request(*pick.choice(SIZES)) for _ in range(requests)]


def settled(read_s: float = FAST_S, seed: int = 0) -> World:
    """A world that has served for a while, loading and computing."""
    world = World(read_s)
    for cached, tokens in SIZES:
        world.prefill.observe(tokens, 0, world.cost.seconds(tokens))
        world.request(cached, tokens)
    world.run(20, seed)
    return world


def stall(world: World) -> None:
    world.read(100.0)


def suspended(world: World) -> None:
    """The machine sleeps for a night in the middle of a read and of a prefill, with a clock that goes on."""
    world.read(8 * HOUR_S)
    world.prefill.observe(4000, 0, 8 * HOUR_S)


def slept_while_computing(world: World) -> None:
    world.prefill.observe(3000, 1024, 900.0)


def computed_in_no_time(world: World) -> None:
    world.prefill.observe(8000, 0, 0.0)
    world.prefill.observe(8000, 0, 2e-6)


def loaded_nothing(world: World) -> None:
    world.read(0.0, blocks=0)
    world.read(50.0, blocks=0)


def loaded_in_no_time(world: World) -> None:
    world.read(0.0)


def clock_set_back(world: World) -> None:
    one = world.speed.began(world.now_s)
    world.speed.ended(one, 1, world.now_s - HOUR_S)


def idle(world: World) -> None:
    world.now_s += 9 * HOUR_S


NONSENSE = [
    stall, suspended, slept_while_computing, computed_in_no_time, loaded_nothing, loaded_in_no_time,
    clock_set_back, idle,
]  # fmt: skip


def wrong(times: list[float]) -> int:
    return sum(time > WRONG for time in times)


@pytest.mark.parametrize("read_s", [FAST_S, SLOW_S], ids=["worth loading", "not worth loading"])
def test_control_without_nonsense_every_decision_is_right(read_s: float) -> None:
    assert wrong(settled(read_s).run(50, seed=1)) == 0


@pytest.mark.parametrize("read_s", [FAST_S, SLOW_S], ids=["worth loading", "not worth loading"])
@pytest.mark.parametrize("nonsense", NONSENSE, ids=lambda one: one.__name__)
def test_one_piece_of_nonsense_spoils_no_decision(nonsense: Callable[[World], None], read_s: float) -> None:
    world = settled(read_s)
    nonsense(world)
    assert wrong(world.run(30, seed=2)) == 0


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([FAST_S, SLOW_S]),
    st.lists(st.tuples(st.sampled_from(NONSENSE), st.integers(0, 3)), max_size=6),
    st.integers(0, 2**16),
)
def test_any_run_of_nonsense_spoils_only_a_few_decisions(
    read_s: float, events: list[tuple[Callable[[World], None], int]], seed: int
) -> None:
    """Several in a row, with few or no good requests between them."""
    world = settled(read_s, seed)
    spoiled = 0
    for nonsense, good in events:
        nonsense(world)
        spoiled += wrong(world.run(good, seed))
    after = world.run(20, seed)
    assert wrong(after[:10]) + spoiled <= FEW * max(1, len(events)), after
    assert wrong(after[10:]) == 0, after


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([1 / 8, 1 / 3, 3.0, 8.0]), st.integers(0, 2**16))
def test_an_engine_that_turns_faster_or_slower_at_all_sizes_is_judged_anew_after_a_few_requests(
    factor: float, seed: int
) -> None:
    """Also where it always loads, and the sizes that it computed once are not seen again."""
    world = settled(0.05, seed)
    world.cost = PrefillCost(COST.fixed_s * factor, COST.token_s * factor, COST.pair_s * factor)
    assert wrong(world.run(30, seed)) <= 2 * FEW


@pytest.mark.parametrize(("before", "after"), [(FAST_S, SLOW_S), (SLOW_S, FAST_S)])
def test_a_tier_that_changed_while_the_engine_was_idle_for_hours_is_found_out(
    before: float, after: float
) -> None:
    world = settled(before)
    idle(world)
    world.read_s = after
    times = world.run(30, seed=3)
    assert wrong(times) > 0, "the control: it was believed to be as before"
    # One that turned slow is found out by using it, one that turned fast by a read every 5 s.
    few = FEW if after > before else 3 * FEW
    assert wrong(times[few:]) == 0, times


def test_nothing_but_nonsense_is_no_belief() -> None:
    world = World()
    for nonsense in (suspended, loaded_nothing, clock_set_back, idle):
        nonsense(world)
    assert world.prefill.cost() is None
    assert world.run(20, seed=4)[FEW:] == pytest.approx([1.0] * 15, rel=WRONG - 1)
