"""A day's budget is a day's budget, whatever the blocks and however they come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.store.policy import WriteBudget

DAY_BYTES = 24_000_000
HOUR_BYTES = 1_000_000


def test_an_hours_share_at_once_then_at_the_days_rate() -> None:
    budget = WriteBudget(DAY_BYTES, 0.0)
    written = 0
    while budget.affords(100_000, 0.0):
        budget.spend(100_000)
        written += 100_000
    assert written == HOUR_BYTES
    assert not budget.affords(100_000, 359.0)
    assert budget.affords(100_000, 361.0)


def test_what_was_not_written_is_given_back_but_never_hoarded() -> None:
    budget = WriteBudget(DAY_BYTES, 0.0)
    budget.spend(HOUR_BYTES)
    assert not budget.affords(1000, 0.0)
    budget.give_back(5000)
    assert budget.affords(5000, 0.0)
    assert not budget.affords(5001, 0.0)
    budget.give_back(10 * HOUR_BYTES)
    budget.spend(HOUR_BYTES)
    assert not budget.affords(1, 0.0)


def test_idle_days_are_not_saved_up_and_a_clock_that_goes_back_gives_nothing() -> None:
    budget = WriteBudget(DAY_BYTES, 0.0)
    budget.spend(HOUR_BYTES)
    assert budget.affords(HOUR_BYTES, 10 * 86400.0)
    budget.spend(HOUR_BYTES)
    assert not budget.affords(1000, 5.0)
    assert not budget.affords(1000, 10 * 86400.0)


@given(
    st.lists(st.tuples(st.floats(0, 20_000), st.integers(1, 5 * HOUR_BYTES)), min_size=1, max_size=200),
)
def test_over_any_time_it_writes_no_more_than_it_may(steps: list[tuple[float, int]]) -> None:
    budget, now_s, written, largest = WriteBudget(DAY_BYTES, 0.0), 0.0, 0, 0
    for pause_s, record_bytes in steps:
        now_s += pause_s
        if budget.affords(record_bytes, now_s):
            budget.spend(record_bytes)
            written += record_bytes
            largest = max(largest, record_bytes)
        assert written <= HOUR_BYTES + now_s * DAY_BYTES / 86400 + largest + 1


@pytest.mark.parametrize("record_bytes", [HOUR_BYTES * 3, HOUR_BYTES * 30])
def test_blocks_larger_than_an_hours_share_are_written_at_the_days_rate(record_bytes: int) -> None:
    budget, written = WriteBudget(DAY_BYTES, 0.0), 0
    days = 20
    for minute in range(days * 24 * 60):
        if budget.affords(record_bytes, minute * 60.0):
            budget.spend(record_bytes)
            written += record_bytes
    assert abs(written - days * DAY_BYTES) <= record_bytes + HOUR_BYTES
