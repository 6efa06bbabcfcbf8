"""The cost of computing is learned from what was seen, and nonsense is not believed for long."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.store.policy import PrefillCost, PrefillEstimator

TRUE = PrefillCost(0.02, 3e-4, 4e-8)
SIZES = [(64, 0), (256, 0), (1000, 0), (2048, 2048), (8000, 0), (512, 6000), (100, 4000)]


def learned(cost: PrefillCost, rounds: int, noise: float = 0.1, seed: int = 0) -> PrefillEstimator:
    pick, estimator = random.Random(seed), PrefillEstimator()
    for _ in range(rounds):
        for tokens, context in SIZES:
            seconds = cost.seconds(tokens, context) * pick.uniform(1 - noise, 1 + noise)
            estimator.observe(tokens, context, seconds)
    return estimator


def off(estimator: PrefillEstimator, cost: PrefillCost) -> float:
    believed = estimator.cost()
    assert believed is not None
    return max(abs(believed.seconds(*size) / cost.seconds(*size) - 1) for size in SIZES)


def test_nothing_is_believed_before_anything_was_seen() -> None:
    assert PrefillEstimator().cost() is None


def test_one_request_is_enough_for_a_first_belief_in_proportion_to_its_tokens() -> None:
    estimator = PrefillEstimator()
    estimator.observe(1000, 0, 0.5)
    cost = estimator.cost()
    assert cost is not None
    assert cost.seconds(1000) == pytest.approx(0.5)
    assert cost.seconds(4000) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "cost", [TRUE, PrefillCost(0, 1e-4, 0), PrefillCost(0.5, 1e-5, 0), PrefillCost(0, 0, 1e-7)]
)
def test_linear_and_quadratic_terms_are_told_apart(cost: PrefillCost) -> None:
    assert off(learned(cost, 6), cost) < 0.15


@given(
    st.floats(0, 0.5), st.floats(1e-6, 1e-2), st.floats(0, 1e-6), st.integers(0, 2**16),
    st.lists(st.sampled_from([1e-3, 0.01, 20.0, 100.0]), max_size=len(SIZES)),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_an_outlier_among_five_of_each_size_does_not_mislead(
    fixed_s: float, token_s: float, pair_s: float, seed: int, nonsense: list[float]
) -> None:
    cost = PrefillCost(fixed_s, token_s, pair_s)
    estimator = learned(cost, 5, noise=0.05, seed=seed)
    pick = random.Random(seed)
    for factor, (tokens, context) in zip(nonsense, pick.sample(SIZES, len(SIZES)), strict=False):
        estimator.observe(tokens, context, cost.seconds(tokens, context) * factor)
        # Four of five in a row would be a change, not outliers.
        estimator.observe(tokens, context, cost.seconds(tokens, context))
    assert off(estimator, cost) < 0.5


def test_a_lasting_change_is_believed_within_a_few_requests_of_each_size() -> None:
    estimator = learned(TRUE, 10)
    slower = PrefillCost(TRUE.fixed_s * 3, TRUE.token_s * 3, TRUE.pair_s * 3)
    for _ in range(3):
        for size in SIZES:
            estimator.observe(*size, slower.seconds(*size))
    assert off(estimator, slower) < 0.2


def test_a_change_seen_at_a_few_sizes_is_believed_for_all() -> None:
    estimator = learned(TRUE, 10)
    slower = PrefillCost(TRUE.fixed_s * 4, TRUE.token_s * 4, TRUE.pair_s * 4)
    for number in range(5):
        assert (off(estimator, slower) < 0.2) == (number >= 4), number
        size = SIZES[number % 2]
        estimator.observe(*size, slower.seconds(*size))


def test_a_stall_of_a_hundred_seconds_changes_nothing() -> None:
    estimator = learned(TRUE, 5)
    before = off(estimator, TRUE)
    estimator.observe(1000, 0, 100.0)
    assert off(estimator, TRUE) < before + 0.1


@pytest.mark.parametrize(
    ("tokens", "context", "seconds"),
    [(0, 0, 1.0), (-4, 0, 1.0), (5, -1, 1.0), (5, 0, 0.0), (5, 0, -1.0), (5, 0, float("nan")),
     (5, 0, float("inf")), (5, 0, 1e9)],
)  # fmt: skip
def test_what_cannot_be_is_not_noted(tokens: int, context: int, seconds: float) -> None:
    estimator = PrefillEstimator()
    estimator.observe(tokens, context, seconds)
    assert estimator.observed == 0


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10**6), st.floats(1e-6, 3600)), min_size=1,
                max_size=40))  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_whatever_was_seen_more_tokens_never_cost_less(seen: list[tuple[int, int, float]]) -> None:
    estimator = PrefillEstimator()
    for one in seen:
        estimator.observe(*one)
    cost = estimator.cost()
    assert cost is not None
    assert min(cost.fixed_s, cost.token_s, cost.pair_s) >= 0
    assert 0 <= cost.seconds(10) <= cost.seconds(1000) <= cost.seconds(1000, 5000) < float("inf")
    assert cost.seconds(0) == 0


def test_many_sizes_are_kept_bounded() -> None:
    estimator = PrefillEstimator()
    for power in range(20):
        for context in range(20):
            estimator.observe(1 << power, 1 << context, 1.0)
    assert len(estimator._seen) <= 64
