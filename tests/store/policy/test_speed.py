"""A tier's speed: medians of the latest reads, and a read that hangs counts while it hangs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.store.policy import TierSpeed


def read(speed: TierSpeed, at_s: float, seconds: float, blocks: int = 1) -> float:
    one = speed.began(at_s)
    speed.ended(one, blocks, at_s + seconds)
    return at_s + seconds


def test_before_the_first_read_a_tier_is_believed_to_be_a_disk() -> None:
    assert 0 < TierSpeed(2).seconds(10, 0, 0.0) < 0.2


def test_times_add_up_with_what_is_asked_and_what_waits() -> None:
    speed, now_s = TierSpeed(2), 0.0
    for _ in range(5):
        now_s = read(speed, now_s, 0.1)
    assert speed.seconds(0, 9, now_s) == 0
    assert speed.seconds(1, 0, now_s) == pytest.approx(0.1)
    assert speed.seconds(4, 0, now_s) == pytest.approx(0.4)
    assert speed.seconds(4, 3, now_s) == pytest.approx(0.7)


def test_reads_side_by_side_are_known_to_overlap_once_seen() -> None:
    speed, now_s = TierSpeed(2), 0.0
    for _ in range(4):
        one, two = speed.began(now_s), speed.began(now_s)
        now_s += 0.2
        speed.ended(one, 1, now_s)
        speed.ended(two, 1, now_s)
    assert speed.gap_s(now_s) == pytest.approx(0.1)
    assert speed.seconds(10, 0, now_s) == pytest.approx(0.2 + 0.9)


def test_one_stall_is_no_verdict_and_a_lasting_change_is_seen_after_three_reads() -> None:
    speed, now_s = TierSpeed(1), 0.0
    for _ in range(8):
        now_s = read(speed, now_s, 0.01)
    now_s = read(speed, now_s, 100.0)
    assert speed.read_s(now_s) == pytest.approx(0.01)
    for _ in range(2):
        now_s = read(speed, now_s, 1.0)
    assert speed.read_s(now_s) == pytest.approx(1.0)
    for _ in range(3):
        now_s = read(speed, now_s, 0.01)
    assert speed.read_s(now_s) == pytest.approx(0.01)


def pair(speed: TierSpeed, at_s: float, seconds: float) -> float:
    one, two = speed.began(at_s), speed.began(at_s)
    speed.ended(one, 1, at_s + seconds)
    speed.ended(two, 1, at_s + seconds)
    return at_s + seconds


@pytest.mark.parametrize(("before_s", "after_s"), [(0.01, 1.0), (1.0, 0.01)], ids=["slow", "fast"])
def test_a_change_seen_only_in_company_is_believed_of_a_read_alone(before_s: float, after_s: float) -> None:
    speed, now_s = TierSpeed(2), 0.0
    for _ in range(5):
        now_s = pair(speed, read(speed, now_s, before_s), before_s)
    assert speed.read_s(now_s) == pytest.approx(before_s)
    for _ in range(2):
        now_s = pair(speed, now_s, after_s)
    assert after_s / 2 <= speed.read_s(now_s) <= after_s


@pytest.mark.parametrize(("before_s", "after_s"), [(0.01, 1.0), (1.0, 0.01)], ids=["slow", "fast"])
def test_a_change_seen_only_alone_is_believed_of_reads_in_company(before_s: float, after_s: float) -> None:
    speed, now_s = TierSpeed(2), 0.0
    for _ in range(5):
        now_s = pair(speed, read(speed, now_s, before_s), before_s)
    assert speed.gap_s(now_s) == pytest.approx(before_s / 2)
    for _ in range(3):
        now_s = read(speed, now_s, after_s)
    assert after_s / 2 <= speed.gap_s(now_s) <= after_s


def test_a_read_far_faster_than_usual_is_promising_until_it_is_usual() -> None:
    speed, now_s = TierSpeed(2), 0.0
    assert not speed.promising()
    for _ in range(5):
        now_s = read(speed, now_s, 1.0)
    assert not speed.promising()
    now_s = read(speed, now_s, 0.01)
    assert speed.promising()
    for _ in range(2):
        now_s = read(speed, now_s, 0.01)
    assert not speed.promising()


def test_a_read_that_hangs_counts_while_it_hangs() -> None:
    speed, now_s = TierSpeed(2), 0.0
    for _ in range(5):
        now_s = read(speed, now_s, 0.01)
    hanging = speed.began(now_s)
    assert speed.seconds(1, 0, now_s + 7.0) == pytest.approx(7.0)
    speed.ended(hanging, 1, now_s + 7.0)
    assert speed.seconds(1, 0, now_s + 7.0) == pytest.approx(0.01)


def test_a_read_that_brought_nothing_says_nothing() -> None:
    speed = TierSpeed(1)
    read(speed, 0.0, 0.001, blocks=0)
    assert speed.observed == 0


@given(st.lists(st.tuples(st.floats(-10, 1e6), st.floats(-5, 1e5), st.integers(0, 9)), max_size=60))
def test_no_clock_makes_it_negative_or_raises(reads: list[tuple[float, float, int]]) -> None:
    speed = TierSpeed(3)
    for at_s, seconds, blocks in reads:
        read(speed, at_s, seconds, blocks)
    assert speed.seconds(5, 2, 0.0) >= 0
