"""Percentiles against numpy and against counting by hand; what is noise and what is not."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.bench.numbers import CLUSTERS_MIN, MARGIN, _Sorted, compare, spread, verdict_of

SECONDS = st.lists(st.floats(0.0001, 1000.0), min_size=1, max_size=300)
Side = dict[Hashable, tuple[Hashable, float]]


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


def side(factor: float, *, seed: int, sessions: int = 20, noise: float = 0.05) -> Side:
    """`sessions` of 3 requests, each around 1 s times `factor`; a session's requests are alike."""
    chance, own = random.Random(seed), random.Random(99)
    found: Side = {}
    for session in range(sessions):
        of_session = math.exp(own.gauss(0, 0.3))
        for turn in range(3):
            value = factor * of_session * math.exp(chance.gauss(0, noise))
            found[session, turn] = (session, value)
    return found


@pytest.mark.parametrize(
    ("factor", "verdict"), [(0.5, "faster"), (2.0, "slower"), (0.8, "faster"), (1.25, "slower")]
)
def test_a_difference_is_found_and_measured(factor: float, verdict: str) -> None:
    found = compare(side(1.0, seed=1), side(factor, seed=2))
    assert found is not None
    assert found.verdict == verdict
    assert found.low is not None
    assert found.high is not None
    assert found.low <= 1 / factor <= found.high
    assert found.ratio == pytest.approx(1 / factor, rel=0.1)


def test_the_same_is_the_same_and_noise_is_unclear() -> None:
    same = compare(side(1.0, seed=1, noise=0.002), side(1.0, seed=2, noise=0.002))
    assert same is not None
    assert same.verdict == "same"
    noise = compare(side(1.0, seed=3, noise=0.8), side(1.0, seed=4, noise=0.8))
    assert noise is not None
    assert noise.verdict == "unclear"


@pytest.mark.parametrize("seed", range(20))
def test_chance_alone_is_rarely_taken_for_a_difference(seed: int) -> None:
    found = compare(side(1.0, seed=seed, noise=0.1), side(1.0, seed=seed + 1000, noise=0.1))
    assert found is not None
    assert found.verdict in ("unclear", "same")


def test_pairs_see_what_unpaired_runs_cannot() -> None:
    """Sessions differ by far more than the sides do: only the same requests against each other tell."""
    one, two = side(1.0, seed=1, noise=0.01), side(0.9, seed=2, noise=0.01)
    paired, unpaired = compare(one, two), compare(one, two, paired=False)
    assert paired is not None
    assert unpaired is not None
    assert paired.verdict == "faster"
    assert unpaired.verdict == "unclear"


def test_a_larger_margin_takes_a_difference_away() -> None:
    one, two = side(1.0, seed=1, noise=0.01), side(0.9, seed=2, noise=0.01)
    narrow, wide = compare(one, two, margin=MARGIN), compare(one, two, margin=0.2)
    assert narrow is not None
    assert wide is not None
    assert (narrow.verdict, wide.verdict) == ("faster", "same")


def test_too_few_sessions_get_no_interval() -> None:
    few, enough = CLUSTERS_MIN - 1, CLUSTERS_MIN
    short = compare(side(1.0, seed=1, sessions=few), side(0.1, seed=2, sessions=few))
    whole = compare(side(1.0, seed=1, sessions=enough), side(0.1, seed=2, sessions=enough))
    assert short is not None
    assert whole is not None
    assert (short.verdict, short.low) == ("too few", None)
    assert whole.verdict == "faster"


def test_only_requests_of_both_sides_are_paired_and_none_is_nothing() -> None:
    one: Side = {1: (1, 1.0), 2: (2, 5.0)}
    two: Side = {2: (2, 2.5), 3: (3, 9.0)}
    found = compare(one, two)
    assert found is not None
    assert (found.base, found.other, found.ratio, found.count) == (5.0, 2.5, 2.0, 1)
    assert compare(one, {}) is None
    assert compare({1: (1, 0.0)}, {1: (1, 1.0)}) is None


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.04, 2.0, "faster"), (1.02, 2.0, "unclear"), (0.5, 0.96, "slower"), (0.5, 0.99, "unclear"),
        (0.98, 1.02, "same"), (0.9, 1.1, "unclear"), (None, None, "too few"),
    ],
)  # fmt: skip
def test_the_rule(low: float | None, high: float | None, verdict: str) -> None:
    assert verdict_of(low, high, MARGIN) == verdict


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(0.001, 100)), min_size=1, max_size=40),
    st.integers(0, 2**32),
)
def test_a_resample_is_the_median_of_what_was_drawn(values: list[tuple[int, float]], seed: int) -> None:
    named = list(dict.fromkeys(session for session, _ in values))
    drawn = np.random.default_rng(seed).integers(0, 3, (4, len(named)))
    drawn[:, 0] += 1
    found = _Sorted(values).medians(drawn)
    for row, median in zip(drawn, found, strict=True):
        times = dict(zip(named, row, strict=True))
        drawn_values = [value for session, value in values for _ in range(times[session])]
        assert median == pytest.approx(np.median(drawn_values))
