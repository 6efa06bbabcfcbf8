"""Several tiers below RAM: each its own write mode, the first that has a block gives it, blocks move up."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.store.support import FaultyTier, chain, disk, drop_ram, get, make_store, put, raising

from tiercel.store import LaneOptions, TieredStore, WriteMode
from tiercel.tiers.memory import MemoryTier


def evict(store: TieredStore, seeds: range) -> None:
    """Push what lies in RAM out of it, by storing other blocks."""
    for seed in seeds:
        assert put(store, chain(6, seed=seed)) == 6
    assert store.flush(30)


def test_each_tier_gets_blocks_as_its_write_mode_says() -> None:
    through, on_evict, off = (
        MemoryTier(64 << 20, name="through"),
        MemoryTier(64 << 20, name="on-evict"),
        MemoryTier(64 << 20, name="off"),
    )
    modes = [(through, WriteMode.THROUGH), (on_evict, WriteMode.ON_EVICT), (off, WriteMode.OFF)]
    with make_store(*((tier, LaneOptions(write=mode)) for tier, mode in modes)) as store:
        assert put(store, chain(4)) == 4
        with store.lock:
            while store.below.traffic[0].lane.pending_writes:
                store.lock.wait(1)
        assert [tier.contains(chain(4).keys) for tier in (through, on_evict, off)] == [
            [True] * 4,
            [False] * 4,
            [False] * 4,
        ]
        evict(store, range(1, 5))
        assert [all(tier.contains(chain(4).keys)) for tier in (through, on_evict, off)] == [True, True, False]


def test_a_block_of_a_slow_tier_moves_up_when_ram_lets_go_of_it(tmp_path: Path) -> None:
    fast, slow = disk(tmp_path / "fast", "fast"), disk(tmp_path / "slow", "slow")
    with make_store((slow, LaneOptions())) as store:
        assert put(store, chain(4)) == 4
        assert store.flush(30)
    slow = disk(tmp_path / "slow", "slow")
    with make_store((fast, LaneOptions()), (slow, LaneOptions())) as store:
        assert get(store, chain(4)) == ["slow"] * 4
        assert fast.contains(chain(4).keys) == [False] * 4
        evict(store, range(1, 5))
        assert fast.contains(chain(4).keys) == [True] * 4
        assert get(store, chain(4)) == ["fast"] * 4


@pytest.mark.parametrize("broken", [0, 1])
def test_when_one_tier_fails_the_other_gives_the_block(tmp_path: Path, broken: int) -> None:
    tiers = [FaultyTier(disk(tmp_path / name, name)) for name in ("first", "second")]
    with make_store(*((tier, LaneOptions()) for tier in tiers)) as store:
        assert put(store, chain(4)) == 4
        assert store.flush(30)
        drop_ram(store)
        tiers[broken].faults["read"] = raising
        assert get(store, chain(4)) == [tiers[1 - broken].name] * 4
        assert (tiers[broken].fired > 0) is (broken == 0)


def test_a_tier_that_takes_no_writes_does_not_keep_the_others_from_theirs(tmp_path: Path) -> None:
    bad, good = FaultyTier(disk(tmp_path / "bad", "bad")), disk(tmp_path / "good", "good")
    bad.faults["write"] = raising
    with make_store((bad, LaneOptions()), (good, LaneOptions())) as store:
        for seed in range(8):
            assert put(store, chain(6, seed=seed)) == 6
        store.flush(30)
        assert bad.fired > 0
        assert all(all(good.contains(chain(6, seed=seed).keys)) for seed in range(8))
