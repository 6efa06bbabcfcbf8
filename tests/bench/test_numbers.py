"""Percentiles against numpy and against counting by hand; what is noise and what is not."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.bench.numbers import MARGIN, ROUNDS_MIN, Ratio, Rounds, compare, spread, t_quantile, verdict_of

SECONDS = st.lists(st.floats(0.0001, 1000.0), min_size=1, max_size=300)


@given(SECONDS)
def test_percentiles_are_numpys_where_there_are_enough_values(values: list[float]) -> None:
    found = spread(values)
    assert found.count == len(values)
    assert found.max == max(values)
    for share, told, needed in ((50, found.p50, 1), (90, found.p90, 10), (99, found.p99, 100)):
        if len(values) < needed:
            assert told is None
        else:
            assert told == pytest.approx(np.percentile(np.array(values), share))


@given(SECONDS)
def test_percentiles_are_where_counting_puts_them(values: list[float]) -> None:
    ordered = sorted(values)
    found = spread(values)
    for share, told in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        if told is not None:
            place = (len(ordered) - 1) * share
            low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
            assert low - 1e-9 <= told <= high + 1e-9


def test_nothing_has_no_percentiles() -> None:
    assert spread([]).p50 is None
    assert spread([]).max is None


def side(factor: float, *, seed: int, rounds: int = 6, drift: float = 0.05, noise: float = 0.05) -> Rounds:
    """`rounds` of 8 requests, each around 1 s times `factor`; whole rounds are off by `drift`."""
    chance, own = random.Random(seed), random.Random(99)
    found: dict[int, dict[Hashable, float]] = {}
    for number in range(rounds):
        of_round = factor * math.exp(chance.gauss(0, drift))
        found[number] = {}
        for name in range(8):
            alike = math.exp(own.gauss(0, 0.5))
            found[number][name] = of_round * alike * math.exp(chance.gauss(0, noise))
    return found


def compared(one: Rounds, two: Rounds, **more: Any) -> Ratio:
    found = compare(one, two, **more)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("factor", "verdict"), [(0.5, "faster"), (2.0, "slower"), (0.8, "faster"), (1.25, "slower")]
)
@pytest.mark.parametrize("paired", [True, False])
def test_a_difference_is_found_and_measured(factor: float, verdict: str, paired: bool) -> None:
    found = compared(side(1.0, seed=1, rounds=12), side(factor, seed=2, rounds=12), paired=paired)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= 1 / factor <= found.high
    assert found.ratio == pytest.approx(1 / factor, rel=0.15)
    assert found.verdict == (verdict if paired or factor in (0.5, 2.0) else found.verdict)


def test_the_same_is_the_same() -> None:
    assert compared(side(1.0, seed=1, drift=0.005), side(1.0, seed=2, drift=0.005)).verdict in (
        "same",
        "unclear",
    )
    one = side(1.0, seed=1)
    same = compared(one, one)
    assert (same.verdict, same.ratio, same.low, same.high) == ("same", 1.0, 1.0, 1.0)


@pytest.mark.parametrize("drift", [0.02, 0.3])
@pytest.mark.parametrize("paired", [True, False])
def test_a_machine_with_moods_is_rarely_taken_for_a_difference(drift: float, paired: bool) -> None:
    """Whole rounds are slower at random, as where others work too: of 100 runs about 5 may be wrong."""
    verdicts = [
        compared(
            side(1.0, seed=seed, drift=drift), side(1.0, seed=seed + 1000, drift=drift), paired=paired
        ).verdict
        for seed in range(100)
    ]
    assert sum(one in ("faster", "slower") for one in verdicts) <= 10


def test_pairs_see_what_unpaired_runs_cannot() -> None:
    """Requests differ by far more than the sides do: only the same ones against each other tell."""
    one, two = side(1.0, seed=1, drift=0.01, noise=0.01), side(0.9, seed=2, drift=0.01, noise=0.01)
    assert compared(one, two).verdict == "faster"
    assert compared(one, two, paired=False).verdict == "unclear"


def test_a_larger_margin_takes_a_difference_away() -> None:
    one, two = side(1.0, seed=1, drift=0.01, noise=0.01), side(0.9, seed=2, drift=0.01, noise=0.01)
    assert compared(one, two, margin=MARGIN).verdict == "faster"
    assert compared(one, two, margin=0.2).verdict == "same"


def test_too_few_rounds_get_no_interval() -> None:
    few, enough = ROUNDS_MIN - 1, ROUNDS_MIN
    short = compared(side(1.0, seed=1, rounds=few), side(0.1, seed=2, rounds=few))
    assert (short.verdict, short.low) == ("too few", None)
    assert compared(side(1.0, seed=1, rounds=enough), side(0.1, seed=2, rounds=enough)).verdict == "faster"


def test_only_requests_of_both_sides_are_paired_and_none_is_nothing() -> None:
    one: Rounds = {1: {"a": 1.0, "b": 5.0}, 2: {"c": 4.0}, 3: {"d": 1.0}}
    two: Rounds = {1: {"b": 2.5, "x": 9.0}, 2: {"c": 2.0}}
    found = compared(one, two)
    assert (found.base, found.other, found.rounds) == (4.5, 2.25, 2)
    assert found.ratio == pytest.approx(2.0)
    assert compare(one, {}) is None
    assert compare(one, {1: {"y": 1.0}}) is None


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.04, 2.0, "faster"), (1.02, 2.0, "unclear"), (0.5, 0.96, "slower"), (0.5, 0.99, "unclear"),
        (0.98, 1.02, "same"), (0.9, 1.1, "unclear"), (None, None, "too few"),
    ],
)  # fmt: skip
def test_the_rule(low: float | None, high: float | None, verdict: str) -> None:
    assert verdict_of(low, high, MARGIN) == verdict


def test_students_t_against_drawing_it() -> None:
    random_t = np.random.default_rng(1)
    for freedom in (1, 2, 5, 30, 100):
        drawn = random_t.standard_t(freedom, 400_000)
        assert t_quantile(freedom) == pytest.approx(np.quantile(drawn, 0.975), rel=0.03)
    assert [t_quantile(one) for one in (0.5, 1.9)] == [math.inf, t_quantile(1)]
    assert sorted(map(t_quantile, range(1, 200)), reverse=True) == list(map(t_quantile, range(1, 200)))
