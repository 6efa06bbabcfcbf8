"""What is kept and what is not: admission on second sight, and a daily budget for writing to a tier."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.store.support import (
    RECORD,
    FaultyTier,
    assert_nothing_leaked,
    branch,
    chain,
    disk,
    drop_ram,
    file_bytes,
    get,
    make_store,
    put,
)

from tiercel.blocks import Chain
from tiercel.store import LaneOptions, SecondSight, Sight, TieredStore, WriteMode
from tiercel.store.policy import WriteBudget


def second_sight(root: Path, slots: int = 64) -> TieredStore:
    return make_store((disk(root), LaneOptions()), slots=slots, admission=SecondSight())


def test_at_once_is_the_default(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions())) as store:
        assert put(store, chain(4)) == 4
        assert store.stats().counters.not_admitted == 0


def test_d37_prompts_that_never_come_back_cost_nothing_and_those_that_do_are_kept(tmp_path: Path) -> None:
    with second_sight(tmp_path / "c") as store:
        for seed in range(200):
            assert put(store, chain(4, seed)) == 0
        assert store.flush(10)
        assert file_bytes(tmp_path / "c") == 0
        assert store.stats().counters.not_admitted == 800
        assert put(store, chain(4, seed=7)) == 4
        assert get(store, chain(4, seed=7)) == ["ram"] * 4
        assert store.flush(10)
        assert file_bytes(tmp_path / "c") == 4 * RECORD
        assert_nothing_leaked(store)


def test_what_prompts_share_is_kept_with_the_second_of_them(tmp_path: Path) -> None:
    with second_sight(tmp_path / "c") as store:
        assert put(store, branch(5, 3, seed=1)) == 0
        assert put(store, branch(5, 3, seed=2)) == 5
        assert put(store, branch(5, 3, seed=3)) == 0
        assert store.lookup(branch(5, 3, seed=1)).blocks == 5
        assert put(store, branch(5, 3, seed=1)) == 3


def test_the_same_request_that_tries_again_is_no_second_sight(tmp_path: Path) -> None:
    with second_sight(tmp_path / "c") as store:
        assert put(store, chain(4)) == 0
        assert put(store, chain(4), sight=Sight.AGAIN) == 0
        assert put(store, chain(4), start=2, sight=Sight.AGAIN) == 0
        assert store.stats().counters.not_admitted == 4
        assert put(store, chain(4)) == 4


def test_what_is_surely_used_again_is_stored_at_once(tmp_path: Path) -> None:
    with second_sight(tmp_path / "c") as store:
        assert put(store, chain(4), sight=Sight.SURE) == 4
        assert store.stats().counters.not_admitted == 0


def test_low_priority_is_for_ram_alone_until_somebody_uses_it(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions())) as store:
        put(store, chain(3), sight=Sight.LOW)
        put(store, chain(2, seed=1))
        assert store.flush(10)
        assert file_bytes(tmp_path / "c") == 2 * RECORD
        assert get(store, chain(3)) == ["ram"] * 3
        assert store.flush(10)
        assert file_bytes(tmp_path / "c") == 5 * RECORD
        assert_nothing_leaked(store)


def test_a_chain_stays_in_one_piece(tmp_path: Path) -> None:
    with second_sight(tmp_path / "c") as store:
        put(store, chain(6))
        # Blocks 4 and 5 are seen for the second time, their parents are not there.
        assert put(store, chain(6), start=4) == 0
        assert store.lookup(chain(6)).blocks == 0
        assert put(store, chain(6)) == 6
        assert store.lookup(chain(6)).blocks == 6


def test_what_was_evicted_is_stored_again_without_waiting_for_another_sight(tmp_path: Path) -> None:
    with make_store(slots=64, admission=SecondSight()) as store:
        put(store, chain(4))
        assert put(store, chain(4)) == 4
        drop_ram(store)
        assert store.lookup(chain(4)).blocks == 0
        assert put(store, chain(4)) == 4


def budgeted(root: Path, blocks_at_once: int, write: WriteMode = WriteMode.THROUGH) -> LaneOptions:
    return LaneOptions(write=write, write_per_day_bytes=24 * blocks_at_once * RECORD)


@pytest.mark.parametrize("write", [WriteMode.THROUGH, WriteMode.ON_EVICT])
def test_a_tier_takes_no_more_than_its_budget_and_ram_keeps_the_rest(
    tmp_path: Path, write: WriteMode
) -> None:
    options = budgeted(tmp_path, 5, write)
    with make_store((disk(tmp_path / "c"), options), slots=64) as store:
        assert put(store, chain(12)) == 12
        assert not store.flush(10), "not everything could be written"
        tier = store.stats().tiers[0]
        assert (tier.counters.written_blocks, tier.counters.over_budget) == (5, 7)
        assert file_bytes(tmp_path / "c") == 5 * RECORD
        assert get(store, chain(12)) == ["ram"] * 12
        store.flush(1)
        assert store.stats().tiers[0].counters.over_budget == 7, "each block is counted once"
        assert_nothing_leaked(store)


def test_without_a_budget_all_is_written(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions()), slots=64) as store:
        put(store, chain(12))
        assert store.flush(10)
        assert file_bytes(tmp_path / "c") == 12 * RECORD


def test_what_is_written_is_the_beginning_of_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget frees up again in the middle of a prompt: its tail alone would be of no use."""
    answers = iter([True] * 4 + [False] * 2 + [True] * 100)
    monkeypatch.setattr(WriteBudget, "affords", lambda *_: next(answers))
    with make_store((disk(tmp_path / "c"), budgeted(tmp_path, 1)), slots=64) as store:
        put(store, chain(10))
        with store.lock:
            on_disk = [
                store.below.has_locked(key) or bool(store.ram.get(key).holds) for key in chain(10).keys
            ]
        assert on_disk == [True] * 4 + [False] * 6


def test_what_was_dropped_from_the_queue_is_given_back_to_the_budget(tmp_path: Path) -> None:
    tier = FaultyTier(disk(tmp_path / "c"))
    options = LaneOptions(write_per_day_bytes=24 * 5 * RECORD, deadline_s=0.2)
    with make_store((tier, options), slots=64) as store:
        with store.lock:
            traffic = store.below.traffic[0]
            budget = traffic._budget
            assert budget is not None
            before = budget._left
        put(store, chain(3))
        assert store.flush(10)
        with store.lock:
            spent = before - budget._left
        assert spent == pytest.approx(3 * RECORD, rel=1e-3)
        # The queue is dropped before any of it was written.
        with store.lock:
            traffic._write_tasks = 100
            put_in = [store.ram.get(key) for key in chain(3).keys]
            for entry in put_in:
                assert entry is not None
                store.below.traffic[0].lane.index.forget([entry.key])
                entry.offered = 0
            assert traffic.spill_locked(put_in[0])  # type: ignore[arg-type]
            assert before - budget._left == pytest.approx(4 * RECORD, rel=1e-3)
            traffic._drop_waiting_locked()
            assert before - budget._left == pytest.approx(3 * RECORD, rel=1e-3)
            traffic._write_tasks = 0


def test_a_block_stored_again_is_not_written_back_when_its_tier_evicts_it(tmp_path: Path) -> None:
    """It would take the room of its own parent, which is the next coldest."""
    options = LaneOptions(cap_bytes=14 * RECORD)
    with make_store((disk(tmp_path / "c"), options), slots=40, reserved=8) as store:
        put(store, chain(2))
        assert store.flush(10)
        drop_ram(store)
        get(store, chain(1))
        assert put(store, chain(2)) == 1, "the second block is stored again, its tier has it"
        for other in (chain(5, 1), chain(8, 2)):
            put(store, other)
            store.flush(10)
        with store.lock:
            assert [store.below.has_locked(key) for key in chain(2).keys] == [True, False]


def in_tier(store: TieredStore, of: Chain) -> list[bool]:
    with store.lock:
        return [store.below.has_locked(key) for key in of.keys]


@pytest.mark.parametrize(("blocks", "rewritten"), [(4, 3), (9, 0)])
def test_a_prompt_that_goes_on_takes_its_beginning_along_where_its_tier_evicted_it(
    tmp_path: Path, blocks: int, rewritten: int
) -> None:
    """RAM still has it. Of one that is larger than the tier the beginning would only push itself out."""
    long = chain(blocks)
    begun = chain(blocks - 1)
    with make_store((disk(tmp_path / "c"), LaneOptions(cap_bytes=8 * RECORD)), slots=40, reserved=8) as store:
        put(store, begun)
        assert store.flush(10)
        put(store, chain(8, 1))
        assert store.flush(10)
        assert not any(in_tier(store, begun)), "evicted there"
        assert get(store, begun) == ["ram"] * len(begun), "and kept here"
        before = store.stats().tiers[0].counters.written_blocks
        assert put(store, long) == 1
        assert store.flush(10)
        assert store.stats().tiers[0].counters.written_blocks - before == rewritten + 1
        drop_ram(store)
        assert get(store, long) == ["disk"] * (rewritten + 1 if rewritten else 0)
        assert_nothing_leaked(store)
