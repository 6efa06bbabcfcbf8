"""The decision against trying every prefix length and every split."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercel.plan.simulate.costs import PrefillCost, TierSpec
from tiercel.plan.simulate.decide import Situation, Stretch, decide

STRETCHES = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), max_size=4)
RATES = st.tuples(*[st.sampled_from([50.0, 500.0, 5000.0, 50000.0])] * 3)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Situation, list[Stretch]]:
    stretches = draw(STRETCHES)
    rates = draw(RATES)
    latency_s = draw(st.sampled_from([0.0, 0.5]))
    cached = sum(blocks for _, blocks in stretches)
    situation = Situation(
        now_s=10.0,
        input_tokens=4 * (cached + draw(st.integers(0, 5))) + 1,
        engine_free_s=draw(st.floats(0, 40)),
        link_free_s=tuple(draw(st.floats(0, 20)) for _ in range(3)),
        tiers=tuple(TierSpec(str(i), 10**9, rate, latency_s) for i, rate in enumerate(rates)),
        prefill=PrefillCost(draw(st.sampled_from([0.01, 0.1, 1.0])), draw(st.sampled_from([0.0, 0.01]))),
        block_bytes=1000,
        block_tokens=4,
    )
    return situation, stretches


def every_prefix(situation: Situation, stretches: list[Stretch]) -> list[float]:
    """Expected first token for each number of leading blocks that could be loaded."""
    taken = [0, 0, 0]
    times = [situation.whole(taken).first_token_s]
    for number, blocks in stretches:
        for _ in range(blocks):
            taken[number] += 1
            times.append(situation.whole(list(taken)).first_token_s)
    return times


@given(situations())
def test_no_prefix_length_is_better(case: tuple[Situation, list[Stretch]]) -> None:
    situation, stretches = case
    plan = decide(situation, stretches, always_load=False, split=False)
    assert plan.first_token_s <= min(every_prefix(situation, stretches)) + 1e-9


@given(situations())
def test_a_cache_never_makes_the_expected_first_token_later(case: tuple[Situation, list[Stretch]]) -> None:
    situation, stretches = case
    without = situation.whole([0, 0, 0]).first_token_s
    for split in (False, True):
        assert decide(situation, stretches, always_load=False, split=split).first_token_s <= without


@given(situations())
def test_a_split_is_never_worse_than_load_or_compute(case: tuple[Situation, list[Stretch]]) -> None:
    situation, stretches = case
    plain = decide(situation, stretches, always_load=False, split=False).first_token_s
    assert decide(situation, stretches, always_load=False, split=True).first_token_s <= plain


@given(situations())
def test_always_load_takes_everything(case: tuple[Situation, list[Stretch]]) -> None:
    situation, stretches = case
    plan = decide(situation, stretches, always_load=True, split=False)
    assert sum(plan.loads.blocks) == sum(blocks for _, blocks in stretches)
