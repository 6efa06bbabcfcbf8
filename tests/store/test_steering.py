"""Putting a prompt away and forgetting one: its own blocks, and never what others need."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
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
    eventually,
    file_bytes,
    get,
    make_store,
    payload_of_key,
    put,
    raising,
)

from tiercel.blocks import BlockKey
from tiercel.store import LaneOptions, TieredStore, WriteMode
from tiercel.store.sessions import tenant_of
from tiercel.tiers import Fate, Outcome


def ram_blocks(store: TieredStore) -> int:
    return store.stats().ram_blocks


class Slow(FaultyTier):
    delay_s = 0.0

    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        time.sleep(self.delay_s)
        return super().write(keys, records)


# Demote.


@pytest.mark.parametrize("write", [WriteMode.THROUGH, WriteMode.ON_EVICT])
def test_a_paused_agent_frees_ram_and_comes_back_from_disk(tmp_path: Path, write: WriteMode) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions(write=write)), slots=32) as store:
        put(store, chain(6))
        put(store, chain(6, seed=1))
        assert store.demote(chain(6), 10) == 6
        assert ram_blocks(store) == 6
        assert store.stats().counters.demoted == 6
        assert store.lookup(chain(6)).sources == ("disk",) * 6
        assert store.prefetch(chain(6)).result(10) == 6
        assert get(store, chain(6)) == ["ram"] * 6
        assert_nothing_leaked(store)


def test_what_another_conversation_in_ram_shares_stays_there(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions()), slots=32) as store:
        mine, other = branch(4, 3, seed=1), branch(4, 3, seed=2)
        put(store, mine)
        put(store, other)
        assert store.demote(mine, 10) == 3
        assert get(store, other) == ["ram"] * 7
        assert store.demote(other, 10) == 7, "nobody else in RAM needs the beginning any more"
        assert ram_blocks(store) == 0


def test_the_only_copy_of_a_block_stays(tmp_path: Path) -> None:
    with make_store(slots=32) as store:
        put(store, chain(4))
        assert store.demote(chain(4), 0.2) == 0
        assert get(store, chain(4)) == ["ram"] * 4
    tier = FaultyTier(disk(tmp_path / "c"))
    tier.faults["write"] = raising
    with make_store((tier, LaneOptions()), slots=32) as store:
        put(store, chain(4))
        assert store.demote(chain(4), 1.0) == 0
        assert tier.fired, "the tier did refuse"
        assert get(store, chain(4)) == ["ram"] * 4


def test_it_waits_for_the_tier_no_longer_than_the_deadline(tmp_path: Path) -> None:
    tier = Slow(disk(tmp_path / "c"))
    with make_store((tier, LaneOptions()), slots=32) as store:
        tier.delay_s = 1.0
        put(store, chain(4))
        started_s = time.monotonic()
        assert store.demote(chain(4), 0.1) == 0
        assert time.monotonic() - started_s < 1.0
        assert get(store, chain(4)) == ["ram"] * 4
        assert store.demote(chain(4), 20) == 4


def test_pinned_blocks_and_those_in_use_stay_in_ram(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions()), slots=32) as store:
        put(store, chain(4))
        assert store.flush(10)
        store.pin(chain(2), 60)
        with store.acquire(chain(3)) as lease:
            assert len(lease.ready(10)) == 3
            assert store.demote(chain(4), 0.2) == 1
        assert store.demote(chain(4), 5) == 1
        store.unpin(chain(2))
        assert store.demote(chain(4), 5) == 2
        assert_nothing_leaked(store)


def test_the_answer_that_followed_goes_along(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions()), slots=32) as store:
        put(store, chain(6))
        assert store.demote(chain(4), 10) == 6
        assert store.demote(chain(4), 1) == 0


# Drop.


def test_a_dropped_prompt_is_gone_everywhere(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions()), slots=32) as store:
        put(store, chain(6))
        put(store, chain(3, seed=1))
        assert store.flush(10)
        assert store.drop(chain(6), 10) == 6
        assert store.lookup(chain(6)).blocks == 0
        assert get(store, chain(6)) == []
        assert file_bytes(tmp_path / "c") == 3 * RECORD
        assert get(store, chain(3, seed=1)) == ["ram"] * 3
        assert store.stats().counters.dropped == 6
        assert store.drop(chain(6), 10) == 0
        assert put(store, chain(6)) == 6, "and may be stored again"
        assert_nothing_leaked(store)


@pytest.mark.parametrize("in_ram", [True, False])
def test_what_prompts_share_stays_until_the_last_of_them_is_dropped(tmp_path: Path, in_ram: bool) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions()), slots=32) as store:
        mine, other = branch(4, 3, seed=1), branch(4, 3, seed=2)
        put(store, mine)
        put(store, other)
        assert store.flush(10)
        if not in_ram:
            drop_ram(store)
        assert store.drop(mine, 10) == 3
        assert store.lookup(mine).blocks == 4
        assert get(store, other) == (["ram"] if in_ram else ["disk"]) * 7
        assert store.drop(other, 10) == 7
        assert file_bytes(tmp_path / "c") == 0


def test_all_that_begins_with_a_dropped_prompt_goes_with_it(tmp_path: Path) -> None:
    """Two answers to one prompt, one of them with a further turn: all of them hold the prompt."""
    with make_store((disk(tmp_path / "c"), LaneOptions()), slots=32) as store:
        put(store, branch(4, 3, seed=1))
        put(store, branch(4, 3, seed=2))
        put(store, branch(2, 3, seed=3))
        assert store.flush(10)
        assert store.drop(branch(4, 0, seed=0), 10) == 8
        assert get(store, branch(2, 3, seed=3)) == ["ram"] * 5
        assert file_bytes(tmp_path / "c") == 5 * RECORD


def test_the_beginning_of_several_prompts_is_nobodys_to_put_away(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions()), slots=32) as store:
        put(store, branch(4, 3, seed=1))
        put(store, branch(4, 3, seed=2))
        assert store.demote(branch(4, 0, seed=0), 1) == 0
        assert get(store, branch(4, 3, seed=1)) == ["ram"] * 7


def test_dropping_nothing_drops_nothing(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions()), slots=32) as store:
        put(store, chain(4))
        assert store.drop(chain(0), 1) == 0
        assert store.demote(chain(0), 1) == 0
        assert get(store, chain(4)) == ["ram"] * 4


def test_a_prompt_and_the_answer_that_followed_it_go_together(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions()), slots=32) as store:
        put(store, chain(6))
        assert store.drop(chain(4), 10) == 6
        assert store.stats().ram_blocks == 0


def test_what_is_being_written_and_read_while_it_is_dropped_is_not_found_after(tmp_path: Path) -> None:
    tier = Slow(disk(tmp_path / "c"))
    with make_store((tier, LaneOptions()), slots=32) as store:
        tier.delay_s = 0.3
        put(store, chain(4))
        with store.acquire(chain(4)) as lease:
            block = lease.ready(1)[0]
            assert store.drop(chain(4), 10) == 4
            assert bytes(block.payload) == payload_of_key(chain(4).keys[0]), "handed out is handed out"
            lease.advance(1)
            assert lease.ready(1) == []
        assert store.flush(10)
        assert file_bytes(tmp_path / "c") == 0
        assert store.lookup(chain(4), 0.5).blocks == 0
        assert_nothing_leaked(store)


def test_a_prompt_dropped_while_it_is_stored_is_not_stored(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions()), slots=32) as store:
        with store.begin_store(chain(6), 0, 6, 4096) as lease:
            for block in lease.take(2):
                block.payload[:] = payload_of_key(chain(6).keys[block.index])
            store.drop(chain(6), 5)
            assert lease.take(2) == []
            assert lease.commit() == 0
        assert store.lookup(chain(6)).blocks == 0
        assert put(store, chain(6)) == 6
        assert_nothing_leaked(store)


def test_pins_do_not_keep_what_is_dropped(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions()), slots=32) as store:
        put(store, chain(4))
        assert store.pin(chain(4), 60) == 4
        assert store.drop(chain(4), 5) == 4
        assert store.stats().pins == 0


def test_a_tier_that_would_not_delete_is_asked_until_it_does(tmp_path: Path) -> None:
    tier = FaultyTier(disk(tmp_path / "c"))
    with make_store((tier, LaneOptions()), slots=32) as store:
        put(store, chain(3))
        assert store.flush(10)
        refused = threading.Event()

        def refuse(keys: Sequence[BlockKey]) -> list[Outcome]:
            refused.set()
            return [Outcome(Fate.FAILED, "no")] * len(keys)

        tier.faults["delete"] = refuse
        started_s = time.monotonic()
        assert store.drop(chain(3), 0.1) == 3
        assert time.monotonic() - started_s < 5
        assert refused.is_set()
        assert store.lookup(chain(3)).blocks == 0
        del tier.faults["delete"]
        assert eventually(lambda: file_bytes(tmp_path / "c") == 0)
        assert eventually(lambda: store.lookup(chain(3)).blocks == 0)


def test_records_that_only_the_place_knows_of_are_deleted_too(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions())) as store:
        put(store, chain(3))
        assert store.flush(10)
        drop_ram(store)
        with store.lock:
            store.below.traffic[0].lane.index.forget(chain(3).keys)
        assert store.drop(chain(3), 5) == 0
        assert file_bytes(tmp_path / "c") == 0


def test_a_prompt_stored_again_while_it_is_still_being_dropped_reaches_its_tier(tmp_path: Path) -> None:
    """The old record is being written, then deleted, under the very name that the new one needs."""
    tier = Slow(disk(tmp_path / "c"))
    with make_store((tier, LaneOptions(write_workers=2)), slots=32) as store:
        tier.delay_s = 0.3
        put(store, chain(4))
        assert eventually(lambda: "write" in tier.calls)
        assert store.drop(chain(4), 0.05) == 4
        assert put(store, chain(4)) == 4
        assert store.flush(20)
        assert file_bytes(tmp_path / "c") == 4 * RECORD
        drop_ram(store)
        assert get(store, chain(4)) == ["disk"] * 4
        assert_nothing_leaked(store)


def test_a_store_knows_its_sessions_and_which_tenant_has_them() -> None:
    with make_store() as store:
        put(store, chain(3))
        assert store.sessions.chains(tenant_of("t"), "agent") == ()
        store.sessions.note(tenant_of("t"), "agent", [chain(3), chain(2, seed=1)])
        assert store.sessions.chains(tenant_of("t"), "agent") == (chain(3), chain(2, seed=1))
        assert store.sessions.chains(tenant_of("u"), "agent") == ()
        assert store.pin(store.sessions.chains(tenant_of("t"), "agent")[0], 60.0) == 3
        store.sessions.note(tenant_of("t"), "agent", [])
        assert store.sessions.chains(tenant_of("t"), "agent") == (), "no blocks: forgotten"
