"""The policies of the eviction study, against what they must equal or cannot beat."""

from __future__ import annotations

from itertools import pairwise

import pytest
from benchmarks.eviction import (
    STUDY,
    Arc,
    SecondUse,
    TinyLfu,
    by_turn,
    continued,
    oracle,
    play,
    play_graced,
    synthetic,
    turns,
)
from hypothesis import given, settings
from hypothesis import strategies as st

PROMPTS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 8)), min_size=1, max_size=60)


def chains_of(prompts: list[tuple[int, int]]) -> list[list[int]]:
    """Prompts of `length` blocks; all begin with block 0."""
    return [[0, *(100 * which + at for at in range(1, length))] for which, length in prompts]


def prefix_lru(chains: list[list[int]], room: int) -> int:
    order: list[int] = []
    hits = 0
    for chain in chains:
        hits += next((at for at, block in enumerate(chain) if block not in order), len(chain))
        order = [block for block in order if block not in chain] + chain[::-1]
        order = order[-room:]
    return hits


@given(PROMPTS, st.integers(8, 20))
def test_without_grace_it_is_prefix_lru(prompts: list[tuple[int, int]], room: int) -> None:
    chains = chains_of(prompts)
    assert play_graced(chains, room, [0.0] * len(chains)) == prefix_lru(chains, room)


@settings(max_examples=30)
@given(PROMPTS, st.integers(8, 20))
def test_no_policy_hits_more_than_an_infinite_cache(prompts: list[tuple[int, int]], room: int) -> None:
    chains = chains_of(prompts)
    most = prefix_lru(chains, 1000)
    for count in STUDY.values():
        assert 0 <= count(chains, room) <= most


@pytest.mark.parametrize("cache", [Arc(50), TinyLfu(50, 0.1), TinyLfu(50, 0.5), SecondUse(50)])
def test_a_cache_keeps_to_its_room(cache: Arc | TinyLfu | SecondUse) -> None:
    for chain in synthetic("bursts", 600):
        play([chain], cache)
        assert sum(block in cache for block in range(2000)) <= 50


def test_a_loop_larger_than_the_cache_defeats_lru_and_a_scan_all() -> None:
    loop = [[100 * which + at for at in range(10)] for which in range(10)] * 20
    scan = [[10 * which + at for at in range(10)] for which in range(200)]
    assert play_graced(loop, 50, [0.0] * len(loop)) == 0
    assert play(scan, Arc(50)) == by_turn(scan, 50, 200) == 0


def test_turns_and_what_is_continued() -> None:
    chains = [[0, 1, 2], [0, 5], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert turns(chains, 1000) == [0, 0, 1, 2]
    assert continued(chains) == [True, False, True, False]
    assert oracle(chains, 5) == 1 + 3 + 4


def test_synthetic_traffic_repeats_itself() -> None:
    for kind in ("shared documents", "documents that change", "bursts"):
        made = synthetic(kind, 600)
        assert made == synthetic(kind, 600)
        parents: dict[int, int] = {}
        for chain in made:
            for one, two in pairwise(chain):
                assert parents.setdefault(two, one) == one, "a block has one parent"
