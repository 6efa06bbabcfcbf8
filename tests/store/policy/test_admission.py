"""Second sight: once is not enough, the same request twice is once, and memory is bounded."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.blocks import BlockKey
from tiercel.store import SecondSight, Sight


def key(number: int) -> BlockKey:
    return BlockKey(b"scope---" + random.Random(number).randbytes(24))


def test_a_block_is_admitted_when_it_comes_by_for_the_second_time() -> None:
    seen = SecondSight()
    assert [seen.admits(key(1)) for _ in range(4)] == [False, True, True, True]
    assert not seen.admits(key(2)), "one that was never seen"


def test_the_same_request_trying_again_is_no_second_sight() -> None:
    seen = SecondSight()
    assert not seen.admits(key(1))
    assert [seen.admits(key(1), Sight.AGAIN) for _ in range(3)] == [False] * 3
    assert seen.admits(key(1))
    assert seen.admits(key(1), Sight.AGAIN), "admitted, and only had no room"


def test_what_is_sure_is_admitted_and_remembered() -> None:
    seen = SecondSight()
    assert seen.admits(key(1), Sight.SURE)
    assert seen.admits(key(1))


def test_memory_is_what_it_says_whatever_it_sees() -> None:
    seen = SecondSight(1024)
    before = seen.memory_bytes
    assert before == 8 * 1024
    for number in range(5000):
        assert not seen.admits(key(number))
    assert seen.memory_bytes == before
    assert SecondSight().memory_bytes == 2 << 20


def test_the_latest_are_remembered_and_the_oldest_are_forgotten() -> None:
    seen = SecondSight(4096)
    for number in range(20_000):
        seen.admits(key(number))
    assert all(seen.admits(key(number), Sight.NEW) for number in range(19_000, 20_000))
    again = sum(seen.admits(key(number), Sight.NEW) for number in range(1000))
    assert again == 0, "the window has an end"


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from(Sight)), max_size=200))
def test_as_long_as_nothing_is_forgotten_it_counts_exactly(asked: list[tuple[int, Sight]]) -> None:
    seen, known = SecondSight(4096), dict[int, int]()
    for number, sight in asked:
        sights = known.get(number, 0)
        if sight is Sight.SURE:
            sights = 2
        elif sight in (Sight.NEW, Sight.LOW) or not sights:
            sights = min(2, sights + 1)
        known[number] = sights
        assert seen.admits(key(number), sight) == (sights == 2)


@pytest.mark.parametrize("keys", [1, 16, 100])
def test_the_smallest_tables_work(keys: int) -> None:
    seen = SecondSight(keys)
    for _ in range(100):
        seen.admits(BlockKey(os.urandom(32)))
    assert not seen.admits(key(1))
    assert seen.admits(key(1))
