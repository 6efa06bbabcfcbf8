"""Load or compute: always the prefix with the least expected time, by trying them all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.store.policy import PrefillCost, Prompt, choose

COST = PrefillCost(0.0, 1e-3, 0.0)


def prompt(tokens: int = 1001, copy_s: float = 0.0) -> Prompt:
    return Prompt(tokens, 100, COST, copy_s)


def at(**seconds: float):  # type: ignore[no-untyped-def]
    return lambda source, blocks: seconds[source] * blocks


def test_a_fast_tier_is_loaded_and_a_slow_one_computed() -> None:
    fast = choose(prompt(), ["disk"] * 10, 0, at(disk=0.01))
    assert (fast.blocks, fast.load_s) == (10, pytest.approx(0.1))
    assert fast.expected_s == pytest.approx(0.101)
    assert fast.recompute_s == pytest.approx(1.001)
    assert choose(prompt(), ["disk"] * 10, 0, at(disk=0.2)).blocks == 0


def test_the_fast_part_of_a_prefix_is_loaded_and_the_rest_computed() -> None:
    choice = choose(prompt(), ["ram"] * 4 + ["objects"] * 6, 0, at(ram=0.0, objects=0.3))
    assert choice.blocks == 4
    assert choice.expected_s == pytest.approx(0.601)


def test_latency_is_paid_once_so_a_far_tier_is_worth_it_for_a_long_prefix_only() -> None:
    def far(source: str, blocks: int) -> float:
        return 0.3 + 0.01 * blocks

    assert choose(prompt(301), ["objects"] * 3, 0, far).blocks == 0
    assert choose(prompt(), ["objects"] * 10, 0, far).blocks == 10


def test_a_gain_within_the_noise_is_left() -> None:
    assert choose(prompt(), ["disk"] * 10, 0, at(disk=0.0995)).blocks == 0
    assert choose(prompt(), ["disk"] * 10, 0, at(disk=0.09)).blocks == 10


def test_what_the_engine_has_already_is_not_counted() -> None:
    choice = choose(prompt(), ["disk"] * 2, 8, at(disk=0.01))
    assert choice.recompute_s == pytest.approx(0.201)
    assert choice.blocks == 2


def test_nothing_found_is_computed() -> None:
    assert choose(prompt(), [], 0, at()).blocks == 0


@given(
    st.lists(st.sampled_from(["ram", "disk", "objects"]), max_size=12),
    st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0, 0.01), st.integers(1, 2000),
    st.floats(0, 1e-3), st.floats(0, 1e-6),
)  # fmt: skip
def test_no_other_prefix_is_expected_to_be_faster(
    sources: list[str],
    disk_s: float,
    objects_s: float,
    copy_s: float,
    tokens: int,
    token_s: float,
    pair_s: float,
) -> None:
    one = Prompt(tokens, 100, PrefillCost(0.01, token_s, pair_s), copy_s)
    times = {"ram": 0.0, "disk": disk_s, "objects": objects_s}
    choice = choose(one, sources, 0, lambda source, blocks: times[source] * blocks)

    def expected(blocks: int) -> float:
        part = sources[:blocks]
        load_s = max((times[name] * part.count(name) for name in set(part)), default=0.0)
        rest = tokens - blocks * 100
        return load_s + blocks * copy_s + one.cost.seconds(max(1, rest) if blocks else tokens, blocks * 100)

    best = min(expected(blocks) for blocks in range(len(sources) + 1))
    assert choice.expected_s <= best / 0.98 + 1e-9
    assert choice.expected_s <= choice.recompute_s
    assert choice.expected_s == pytest.approx(expected(choice.blocks))
