"""What was dropped or cleared is deleted before its store is closed, or the store says that it is not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.store.support import (
    FaultyTier,
    assert_nothing_leaked,
    chain,
    disk,
    eventually,
    file_bytes,
    make_store,
    put,
    scope,
)

from tiercel.blocks import BlockKey
from tiercel.store import LaneOptions, TieredStore
from tiercel.tiers import Fate, Outcome


def refuse(keys: Sequence[BlockKey]) -> list[Outcome]:
    return [Outcome(Fate.FAILED, "no")] * len(keys)


def clear(store: TieredStore) -> None:
    store.clear(scope().tag, deadline_s=0.05)


def drop(store: TieredStore) -> None:
    store.drop(chain(3), deadline_s=0.05)


@pytest.mark.parametrize("forget", [clear, drop])
def test_a_deletion_that_failed_is_tried_again_before_the_end(
    tmp_path: Path, forget: Callable[[TieredStore], None]
) -> None:
    tier = FaultyTier(disk(tmp_path / "c"))
    store = make_store((tier, LaneOptions()))
    put(store, chain(3))
    assert store.flush(10)
    tier.faults["delete"] = refuse
    forget(store)
    assert eventually(lambda: tier.fired > 0)
    del tier.faults["delete"]
    assert file_bytes(tmp_path / "c"), "it was not deleted, and will be tried again later"
    assert store.close(10)
    assert file_bytes(tmp_path / "c") == 0
    assert not any(fault.kind == "undeleted" for fault in store.stats().faults)
    with make_store((disk(tmp_path / "c"), LaneOptions())) as following:
        assert following.lookup(chain(3)).blocks == 0


@pytest.mark.parametrize("forget", [clear, drop])
def test_a_close_waits_for_a_deletion_under_way(
    tmp_path: Path, forget: Callable[[TieredStore], None]
) -> None:
    tier, gate = FaultyTier(disk(tmp_path / "c")), threading.Event()
    store = make_store((tier, LaneOptions()))
    put(store, chain(3))
    assert store.flush(10)
    tier.faults["delete"] = lambda keys: (gate.wait(20), tier.inner.delete(keys))[1]
    forget(store)
    assert eventually(lambda: tier.fired > 0)
    threading.Timer(0.3, gate.set).start()
    store.close(10)
    assert gate.is_set()
    assert file_bytes(tmp_path / "c") == 0


def test_what_a_tier_will_not_delete_is_told_in_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = FaultyTier(disk(tmp_path / "c"))
    store = make_store((tier, LaneOptions()))
    put(store, chain(3))
    assert store.flush(10)
    tier.faults["delete"] = refuse
    clear(store)
    started_s = time.monotonic()
    with caplog.at_level(logging.WARNING, "tiercel"):
        store.close(10)
    assert time.monotonic() - started_s < 8, "one that refuses is not asked until the deadline"
    assert tier.fired >= 2
    (fault,) = [fault for fault in store.stats().faults if fault.kind == "undeleted"]
    assert fault.tier == "disk"
    assert fault.text in caplog.text
    with make_store((disk(tmp_path / "c"), LaneOptions())) as following:
        assert following.lookup(chain(3)).blocks == 3, "as it said"


def test_a_block_cleared_while_it_was_written_is_deleted_also_if_that_fails_at_first(tmp_path: Path) -> None:
    """Its write ends when the scope was purged already: nobody else would delete it any more."""
    tier, gate, wrote = FaultyTier(disk(tmp_path / "c")), threading.Event(), threading.Event()

    def write(keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        wrote.set()
        gate.wait(20)
        return tier.inner.write(keys, records)

    tier.faults["write"] = write
    with make_store((tier, LaneOptions())) as store:
        put(store, chain(3))
        assert wrote.wait(20)
        assert store.clear(scope().tag, 10) == 3
        refused = threading.Event()

        def once(keys: Sequence[BlockKey]) -> list[Outcome]:
            del tier.faults["delete"]
            refused.set()
            return refuse(keys)

        tier.faults["delete"] = once
        gate.set()
        assert refused.wait(20)
        assert eventually(lambda: file_bytes(tmp_path / "c") == 0)
        with store.lock:
            store.below.traffic[0].lane.index._doubted.clear()
        assert store.lookup(chain(3), 1).blocks == 0
        assert_nothing_leaked(store)
        tier.faults.clear()
        assert put(store, chain(3)) == 3


def test_many_drops_from_a_tier_that_refuses_share_a_thread(tmp_path: Path) -> None:
    tier = FaultyTier(disk(tmp_path / "c"))
    with make_store((tier, LaneOptions()), slots=64) as store:
        for seed in range(20):
            put(store, chain(2, seed))
        assert store.flush(20)
        tier.faults["delete"] = refuse
        for seed in range(20):
            assert store.drop(chain(2, seed), deadline_s=0.0) == 2
        assert eventually(lambda: tier.fired > 0)
        assert sum(one.name == "tiercel-disk-forget" for one in threading.enumerate()) == 1
        del tier.faults["delete"]
        assert eventually(lambda: file_bytes(tmp_path / "c") == 0)
        assert store.stats().tiers[0].blocks == 0
