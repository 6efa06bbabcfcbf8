"""Several tenants share RAM and tiers: one that floods replaces its own blocks, not those of others."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.support import (
    RECORD,
    assert_nothing_leaked,
    branch,
    chain,
    disk,
    drop_ram,
    get,
    make_store,
    put,
    scope,
)

from tiercel.blocks import BlockKey, Chain
from tiercel.store import LaneOptions, Sight, TieredStore
from tiercel.store.lane_index import LaneIndex
from tiercel.tiers import Stored

OTHERS = ("b", "c", "d")


def prompt(tenant: str, blocks: int, seed: int = 0) -> Chain:
    return chain(blocks, seed, scope(salt=tenant))


def in_ram(store: TieredStore, of: Chain) -> int:
    return sum(source == "ram" for source in store.lookup(of, 0).sources)


def listed(store: TieredStore, of: Chain) -> int:
    index = store.below.traffic[0].lane.index
    with store.lock:
        return sum(index.has(key, 0.0) for key in of.keys)


def test_a_flood_of_one_tenant_leaves_another_its_share_of_ram() -> None:
    with make_store(slots=24, reserved=4) as store:
        put(store, prompt("b", 10))
        for seed in range(30):
            put(store, prompt("a", 7, seed))
            if seed == 15:
                get(store, prompt("b", 10))
        assert in_ram(store, prompt("b", 10)) == 10
        assert store.ram.evictions >= 190, "the flood went through its own share"
        assert in_ram(store, prompt("a", 7, 29)) == 7, "and what it stored last is there"
        assert_nothing_leaked(store)


def test_in_one_scope_the_same_flood_pushes_it_out() -> None:
    with make_store(slots=24, reserved=4) as store:
        put(store, prompt("b", 10, 99))
        for seed in range(30):
            put(store, prompt("b", 7, seed))
        assert in_ram(store, prompt("b", 10, 99)) == 0


def test_what_a_tenant_has_beyond_its_share_others_may_take() -> None:
    with make_store(slots=24, reserved=4) as store:
        put(store, prompt("a", 20))
        put(store, prompt("b", 10))
        assert in_ram(store, prompt("b", 10)) == 10
        assert in_ram(store, prompt("a", 20)) == 10, "the beginning of its prompt"


def test_a_tenant_that_is_alone_may_use_all() -> None:
    with make_store(slots=24, reserved=4) as store:
        put(store, prompt("a", 20))
        assert in_ram(store, prompt("a", 20)) == 20


def test_one_that_does_not_come_back_has_no_share_any_more() -> None:
    with make_store(slots=24, reserved=4) as store:
        put(store, prompt("b", 10))
        for seed in range(120):
            put(store, prompt("a", 7, seed))
        assert in_ram(store, prompt("b", 10)) == 0
        assert sum(in_ram(store, prompt("a", 7, seed)) for seed in range(120)) == 20


def test_a_pinned_prompt_stays_and_the_others_of_its_tenant_make_room() -> None:
    with make_store(slots=24, reserved=4) as store:
        put(store, prompt("a", 9))
        assert store.pin(prompt("a", 9), 60.0) == 9
        put(store, prompt("a", 9, seed=1))
        put(store, prompt("b", 10))
        assert in_ram(store, prompt("a", 9)) == 9
        assert in_ram(store, prompt("b", 10)) == 10
        assert in_ram(store, prompt("a", 9, seed=1)) == 1


def test_a_prompt_larger_than_its_share_keeps_its_head() -> None:
    with make_store(slots=24, reserved=4) as store:
        put(store, prompt("b", 10))
        assert put(store, prompt("a", 30)) == 30
        assert in_ram(store, prompt("b", 10)) == 10
        assert in_ram(store, prompt("a", 30)) == 9, "and the last block written, which is no prefix"


def test_a_flood_leaves_another_its_share_of_a_tier(tmp_path: Path) -> None:
    options = LaneOptions(cap_bytes=20 * RECORD)
    with make_store((disk(tmp_path / "c"), options), slots=64, reserved=8) as store:
        put(store, prompt("b", 10))
        assert store.flush(20)
        for seed in range(12):
            put(store, prompt("a", 7, seed))
            assert store.flush(20)
        assert listed(store, prompt("b", 10)) == 10
        assert store.stats().tiers[0].counters.evicted_blocks >= 60
        drop_ram(store)
        assert get(store, prompt("b", 10)) == ["disk"] * 10
        assert sum(listed(store, prompt("a", 7, seed)) for seed in range(12)) == 10


def test_scopes_found_at_the_start_share_too_but_for_those_left_long_ago() -> None:
    index = LaneIndex(30, lambda key: False)
    index.begin_scan()
    day_s = 24 * 3600.0
    for tag, age_s in ((b"young___", 0.0), (b"hour____", 3600.0), (b"old_____", 2 * day_s)):
        for at in range(10):
            key = BlockKey(tag + at.to_bytes(24, "big"))
            index.learn_scanned(Stored(key, 1, 10 * day_s - age_s), 0.0)
    index.end_scan()
    new = {BlockKey(b"young___" + at.to_bytes(24, "little")): 1 for at in range(1 << 20, (1 << 20) + 15)}
    room = index.reserve(new, 0.0)
    assert room is not None
    assert Counter(key[:8] for key in room.evicted) == {b"old_____": 10, b"young___": 5}


USES = st.lists(st.tuples(st.sampled_from("flood own look".split()), st.integers(0, 40)), max_size=30)


@pytest.mark.parametrize("tenants", [2, 3, 4])
def test_no_flood_pushes_a_working_set_below_its_share(tenants: int) -> None:
    """Each of the others keeps what it uses, as long as that is no more than an equal share of RAM."""

    @settings(max_examples=25)
    @given(USES)
    def property_of(uses: list[tuple[str, int]]) -> None:
        room = 24
        share = room // tenants
        with make_store(slots=room + 4, reserved=4) as store:
            others = [prompt(name, share) for name in OTHERS[: tenants - 1]]
            for own in others:
                put(store, own)
            for what, seed in uses:
                if what == "flood":
                    put(store, prompt("a", 1 + seed % 13, seed))
                elif what == "own":
                    put(store, others[seed % len(others)])
                else:
                    store.lookup(prompt("a", 9, seed), 0)
                for own in others:
                    assert in_ram(store, own) == share

    property_of()


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.booleans()), max_size=40))
def test_a_lone_tenants_blocks_go_as_if_there_were_no_quotas(uses: list[tuple[int, int, bool]]) -> None:
    """Plain prefix LRU, kept as a list: chains are touched leaf first, the front goes."""
    order: list[bytes] = []
    with make_store(slots=14, reserved=2) as store:
        for seed, length, look in uses:
            of = prompt("a", length, seed)
            found = sum(1 for _ in store.lookup(of, 0).sources)
            keys = of.keys[:found] if look else of.keys
            if not look:
                put(store, of)
            missing = [key for key in keys if key not in order]
            order = [key for key in order if key not in keys] + list(reversed(keys))
            del order[: max(0, len(order) - 12)]
            assert look <= (not missing)
            with store.lock:
                assert {entry.key for entry in store.ram.entries()} == set(order)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(1, 4), st.booleans()), max_size=30
    )
)
def test_leaves_go_before_their_parents_whoever_loses(uses: list[tuple[str, int, int, bool]]) -> None:
    with make_store(slots=16, reserved=2) as store:
        for tenant, seed, length, look in uses:
            of = prompt(tenant, length, seed)
            store.lookup(of, 0) if look else put(store, of)
            for other in "abc":
                for each in range(3):
                    with store.lock:
                        there = [store.ram.get(key) is not None for key in prompt(other, 4, each).keys]
                    assert there == sorted(there, reverse=True), "a parent left before its child"


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(1, 4), st.booleans()), max_size=20
    )
)
def test_a_tiers_index_keeps_its_cap_and_its_chains_whoever_loses(
    uses: list[tuple[str, int, int, bool]],
) -> None:
    index = LaneIndex(14, lambda key: False)
    for tenant, seed, length, look in uses:
        keys = prompt(tenant, length, seed).keys
        index.touch(keys)
        for key in keys if not look else ():
            if index.has(key, 0.0):
                continue
            asked = Counter(one[:8] for one in [*index.keys_of(None), key])
            scopes = len(asked)
            room = index.reserve({key: 1}, 0.0)
            assert room is not None
            for gone in room.evicted:
                assert gone[:8] == key[:8] or asked[gone[:8]] * scopes > 14, "it had no more than its share"
                asked[gone[:8]] -= 1
            index.left(room.evicted)
            index.used_bytes -= 1
            index.enter(key, 1)
            index.written([key])
            index.touch(keys[: keys.index(key) + 1])
        assert index.used_bytes == len(index) == len(index.keys_of(None)) <= 14
        for other in "abc":
            for each in range(3):
                there = [index.has(key, 0.0) for key in prompt(other, 4, each).keys]
                assert there == sorted(there, reverse=True), "a parent left before its child"


# Low priority.


def low(store: TieredStore, of: Chain) -> int:
    return put(store, of, sight=Sight.LOW)


@pytest.mark.parametrize(("sight", "left"), [(Sight.LOW, [7, 7]), (Sight.NEW, [0, 0])])
def test_a_flood_of_low_priority_takes_the_place_of_other_low_prompts(sight: Sight, left: list[int]) -> None:
    """The control is the same flood of normal priority: what is used only now and then is pushed out."""
    with make_store(slots=24, reserved=4) as store:
        put(store, chain(6, seed=1000), sight=sight)
        for seed in range(2):
            put(store, chain(7, seed))
        for flood in range(9):
            for seed in range(5):
                of = chain(6, seed=2000 + 10 * flood + seed)
                assert put(store, of, sight=sight) == 6
                assert in_ram(store, of) == 6, "the latest is there"
            assert [in_ram(store, chain(7, seed)) for seed in range(2)] == left
        assert_nothing_leaked(store)


def test_low_priority_goes_to_no_tier_and_one_that_is_used_again_does(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions())) as store:
        low(store, chain(3))
        put(store, chain(3, seed=1))
        assert store.flush(20)
        assert (listed(store, chain(3)), listed(store, chain(3, seed=1))) == (0, 3)
        assert store.lookup(chain(3), 0).blocks == 3
        assert store.flush(20)
        assert listed(store, chain(3)) == 0, "looking is no use"
        assert get(store, chain(3)) == ["ram"] * 3
        assert store.flush(20)
        assert listed(store, chain(3)) == 3


def test_what_a_low_prompt_shares_with_others_stays_theirs() -> None:
    with make_store(slots=24, reserved=4) as store:
        put(store, chain(8))
        low(store, branch(4, 6, seed=1))
        low(store, chain(9, seed=2))
        assert in_ram(store, chain(8)) == 8
        put(store, branch(4, 6, seed=1))
        low(store, chain(9, seed=3))
        assert in_ram(store, branch(4, 6, seed=1)) == 10, "a normal request has made it its own"


def test_low_priority_takes_nothing_from_another_tenants_share() -> None:
    with make_store(slots=24, reserved=4) as store:
        low(store, prompt("b", 10))
        for seed in range(9):
            put(store, prompt("a", 7, seed))
        assert in_ram(store, prompt("b", 10)) == 10, "within its share, and used of late"
        for seed in range(9):
            low(store, prompt("c", 7, seed))
        assert in_ram(store, prompt("a", 7, 8)) == 7


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.integers(1, 5), st.sampled_from("plxg")),
        max_size=30,
    )
)
def test_leaves_go_before_their_parents_also_of_low_priority(uses: list[tuple[str, int, int, str]]) -> None:
    with make_store(slots=16, reserved=2) as store:
        for tenant, seed, length, what in uses:
            of = prompt(tenant, length, seed)
            if what == "g":
                get(store, of)
            elif what == "x":
                store.lookup(of, 0)
            else:
                put(store, of, sight=Sight.LOW if what == "l" else Sight.NEW)
            for other in "ab":
                for each in range(3):
                    with store.lock:
                        there = [store.ram.get(key) is not None for key in prompt(other, 5, each).keys]
                    assert there == sorted(there, reverse=True), "a parent left before its child"
            with store.lock:
                for order in store.ram._order.values():
                    assert len(order) <= 2 * len(store.ram) + 65
