"""What people look at is what is there: whose blocks, what prompts share, faults; and it steers."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.support import (
    RECORD,
    FaultyTier,
    branch,
    chain,
    disk,
    drop_ram,
    eventually,
    get,
    make_store,
    put,
    raising,
    scope,
)

from tiercel.blocks import BlockKey
from tiercel.store import Decision, LaneOptions, overview, overview_json
from tiercel.store.overview import tree


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look anew each time."""
    monkeypatch.setattr(overview, "_KEPT_S", 0.0)


def test_whose_blocks_lie_where(tmp_path: Path) -> None:
    with make_store((disk(tmp_path), LaneOptions())) as store:
        assert put(store, chain(4)) == 4
        assert put(store, chain(3, of=scope("b", salt="secret-of-b"))) == 3
        assert store.flush(10)
        drop_ram(store)
        assert get(store, chain(2)) == ["disk"] * 2
        seen = store.overview()
        assert [(one.model, one.blocks) for one in seen.scopes] == [
            ("model-a", {"disk": 4, "ram": 2}), ("model-b", {"disk": 3}),
        ]  # fmt: skip
        assert seen.scopes[0].nbytes == {"disk": 4 * RECORD, "ram": 2 * store.arena.slot_bytes}
        assert seen.scopes[0].tag == chain(1).root[:8].hex()
        assert seen.more_scopes == 0
        assert (seen.scopes[0].salt, len(seen.scopes[1].salt)) == ("", 8)
        assert "secret-of-b" not in json.dumps(overview_json(seen))
        assert seen.stats.ram_blocks == 2
        assert abs(seen.at_s - time.time()) < 60
        few = store.overview(1)
        assert [one.model for one in few.scopes] == ["model-a"]
        assert few.more_scopes == 1


def test_what_prompts_share_is_a_tree(tmp_path: Path) -> None:
    with make_store((disk(tmp_path), LaneOptions()), slots=32) as store:
        assert put(store, branch(4, 2, seed=1)) == 6
        assert put(store, branch(4, 3, seed=2)) == 3
        assert put(store, chain(2, of=scope("b"))) == 2
        assert store.flush(10)
        shared, larger, smaller, other = store.overview().prefixes
        assert (shared.level, shared.start, shared.length, shared.below, shared.branches) == (0, 0, 4, 5, 2)
        assert shared.blocks == {"ram": 4, "disk": 4}
        assert shared.nbytes == {"ram": 4 * RECORD, "disk": 4 * RECORD}
        assert [(one.parent, one.level, one.start, one.length) for one in (larger, smaller)] == [
            (shared.prefix, 1, 4, 3), (shared.prefix, 1, 4, 2),
        ]  # fmt: skip
        assert (other.parent, other.length, other.tag) == ("", 2, chain(1, of=scope("b")).root[:8].hex())
        assert store.chain_of(shared.prefix) == branch(4, 2, seed=1)[:4]
        assert store.chain_of(larger.prefix) == branch(4, 3, seed=2)
        assert store.chain_of("no such one") is None
        assert store.drop(branch(4, 3, seed=2)) == 3
        assert [one.length for one in store.overview().prefixes] == [6, 2], "what is gone is not shown"


def test_faults_and_decisions_are_shown(tmp_path: Path) -> None:
    tier = FaultyTier(disk(tmp_path))
    with make_store((tier, LaneOptions())) as store:
        assert store.overview().faults == ()
        assert put(store, chain(4)) == 4
        assert store.flush(10)
        drop_ram(store)
        tier.faults["read"] = raising
        assert get(store, chain(4)) == []
        assert tier.fired
        (fault,) = store.overview().faults
        assert (fault.tier, fault.kind) == ("disk", "read")
        assert "Denied: denied" in fault.text
        # Reads that nobody waits for any more may fail between two looks.
        assert eventually(
            lambda: store.overview().faults[0].count == store.stats().tiers[0].counters.failed > 0
        )
        assert abs(fault.at_s - time.time()) < 60
        store.reports.add(Decision(prompt_tokens=3, block_tokens=2, reason="short", done=True))
        seen = overview_json(store.overview())
        assert [one["reason"] for one in seen["decisions"]] == ["short"]
        assert seen["stats"]["requests"]["hit_rate"] == 0.0
        assert seen["stats"]["tiers"][0]["left"]["capacity"] == 0
        json.dumps(seen)


def test_looking_is_kept_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "_KEPT_S", 60.0)
    with make_store() as store:
        assert put(store, chain(2)) == 2
        assert len(store.overview().prefixes) == 1
        assert put(store, chain(2, seed=1)) == 2
        seen = store.overview()
        assert len(seen.prefixes) == 1
        assert seen.stats.ram_blocks == 4, "figures are of this moment"


def test_the_lock_is_held_for_few_blocks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "_AT_ONCE", 2)
    with make_store() as store:
        assert put(store, chain(7)) == 7
        assert [one.blocks for one in store.overview().prefixes] == [{"ram": 7}]


def test_what_is_left_of_a_prompt_without_its_beginning_is_no_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_store(slots=40) as store:
        for seed in (1, 2, 3):
            assert put(store, chain(7, seed)) == 7
        whole = [(one.start, one.length) for one in store.overview().prefixes]
        assert whole == [(0, 7)] * 3, "the control"
        monkeypatch.setattr(overview, "_LINKS_MAX", 15)
        seen = store.overview()
        assert [(one.start, one.length) for one in seen.prefixes] == [(0, 7)] * 2
        found = {store.chain_of(one.prefix) for one in seen.prefixes}
        assert found == {chain(7, 3), chain(7, 2)}


keys = st.integers(0, 12).map(lambda number: BlockKey(bytes([number]) * 32))


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(keys, st.lists(keys, max_size=4).map(tuple)), st.sets(keys), st.integers(1, 6))
def test_any_links_make_a_tree(
    links: dict[BlockKey, tuple[BlockKey, ...]], cached: set[BlockKey], nodes_max: int
) -> None:
    # Also what no hash would give: circles, a block behind two others, and behind itself.
    nodes, paths = tree(links, {key: {"ram": 1} for key in cached}, nodes_max)
    assert len(nodes) <= nodes_max
    shown: set[BlockKey] = set()
    level: dict[str, int] = {"": -1}
    for one in nodes:
        own = paths[one.prefix][-one.length :]
        assert set(own) <= cached
        assert shown.isdisjoint(own), "each block is in one node"
        shown.update(own)
        assert one.level == level[one.parent] + 1, "parents come first"
        level[one.prefix] = one.level
        assert one.blocks == {"ram": one.length}
        assert len(paths[one.prefix]) == one.start + one.length
