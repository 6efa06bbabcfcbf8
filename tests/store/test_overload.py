"""A tier that is slow, broken or full of work: probed by one call at a time, never holds RAM hostage."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.store.support import (
    FaultyTier,
    assert_nothing_leaked,
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
from tiercel.store import LaneOptions, TieredStore
from tiercel.store.breaker import Breaker, BreakerState
from tiercel.store.lane_index import LaneIndex
from tiercel.tiers import MISSING, Outcome, Stored


class Held(FaultyTier):
    """A tier whose reads or writes wait for `go`; counts how many are in there at a time."""

    def __init__(self, root: Path) -> None:
        super().__init__(disk(root))
        self.go = threading.Event()
        self.inside = 0
        self.inside_max = 0
        self._count = threading.Lock()

    def wait(self) -> None:
        with self._count:
            self.inside += 1
            self.inside_max = max(self.inside_max, self.inside)
        assert self.go.wait(30)
        with self._count:
            self.inside -= 1

    def held_read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        self.wait()
        return self.inner.read(keys, records)

    def held_write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        self.wait()
        return self.inner.write(keys, records)


@pytest.fixture
def tier(tmp_path: Path) -> Held:
    return Held(tmp_path / "c")


def opened_breaker(tier: Held, store: TieredStore) -> None:
    tier.faults["read"] = raising
    for _ in range(3):
        get(store, chain(8))
    assert store.stats().tiers[0].counters.breaker_opened >= 1
    assert_nothing_leaked(store)
    tier.faults["read"] = tier.held_read
    assert eventually(lambda: store.stats().tiers[0].breaker == "probing")


def test_a_broken_tier_is_probed_by_one_call_at_a_time_and_what_waits_for_it_is_served(tier: Held) -> None:
    options = LaneOptions(read_workers=4, deadline_s=60)
    with make_store((tier, options)) as store:
        assert put(store, chain(8)) == 8
        assert store.flush(30)
        drop_ram(store)
        opened_breaker(tier, store)
        with store.lock:
            # Doubted blocks would not be asked for at all.
            store.below.traffic[0].lane.index._doubted.clear()
        got: list[list[str]] = []
        reader = threading.Thread(target=lambda: got.append(get(store, chain(8), 30)))
        reader.start()
        assert eventually(lambda: tier.inside == 1)
        assert store.lookup(chain(8)).blocks == 0, "nobody else is sent there meanwhile"
        assert tier.inside_max == 1
        tier.go.set()
        reader.join(30)
        assert got == [["disk"] * 8]
        assert store.stats().tiers[0].breaker == "closed"
        assert_nothing_leaked(store)


def test_a_probe_that_finds_nothing_lets_the_tier_back_in_on_approval(tier: Held) -> None:
    def first_is_gone(keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        if keys[0] == chain(8).keys[0]:
            return [MISSING]
        raising()
        raise AssertionError("unreachable")

    with make_store((tier, LaneOptions(read_workers=1))) as store:
        assert put(store, chain(8)) == 8
        assert store.flush(30)
        drop_ram(store)
        opened_breaker(tier, store)
        with store.lock:
            store.below.traffic[0].lane.index._doubted.clear()
        opened = store.stats().tiers[0].counters.breaker_opened
        failed = store.stats().tiers[0].counters.failed
        tier.faults["read"] = first_is_gone
        assert get(store, chain(8)) == []
        assert eventually(lambda: store.stats().tiers[0].counters.breaker_opened == opened + 1)
        assert store.stats().tiers[0].counters.missing == 1, "it answered, and was asked on"
        assert store.stats().tiers[0].counters.failed == failed + 1, "and one failure was enough"


def test_the_breaker_alone_lets_one_probe_out() -> None:
    breaker = Breaker(failures_max=1, pause_s=1)
    assert breaker.failed(0)
    assert not breaker.allows(0.5)
    assert breaker.allows(1.5)
    assert breaker.begin(1.5)
    assert not breaker.allows(1.5)
    breaker.ended()
    assert breaker.allows(1.5), "a probe that decided nothing leaves the next one to"
    assert breaker.begin(1.5)
    breaker.succeeded()
    breaker.ended()
    assert breaker.state(1.5) is BreakerState.CLOSED
    assert not breaker.begin(1.5), "no probe: nothing is to be decided"
    assert breaker.allows(1.5)


def test_a_tier_too_slow_for_what_is_stored_loses_the_oldest_and_ram_keeps_the_newest(tier: Held) -> None:
    tier.faults["write"] = tier.held_write
    with make_store((tier, LaneOptions(deadline_s=60)), slots=16, reserved=4) as store:
        stored = [put(store, chain(4, seed=seed), deadline_s=0.05) for seed in range(12)]
        assert stored == [4] * 12, "no store is skipped for the sake of a tier"
        assert get(store, chain(4, seed=11)) == ["ram"] * 4
        counters = store.stats().tiers[0].counters
        assert counters.writes_dropped > 0
        assert tier.inside == 1
        tier.go.set()
        store.flush(30)
        drop_ram(store)
        kept = [len(get(store, chain(4, seed=seed))) for seed in range(12)]
        assert kept[11] == 4
        assert sum(kept[:6]) < 12 < 4 * 6, "the oldest went"
        assert_nothing_leaked(store)


def test_a_chain_longer_than_ram_waits_for_its_tier_instead_of_losing_its_own_beginning(tier: Held) -> None:
    with make_store((tier, LaneOptions()), slots=16, reserved=4) as store:
        assert put(store, chain(60), deadline_s=30) == 60
        assert store.flush(30)
        assert len(get(store, chain(60))) == 60


def test_stores_give_way_to_loads_that_wait(tier: Held) -> None:
    """With one reader busy and more loads waiting, a write begins only after its short grace."""
    with make_store((tier, LaneOptions(read_workers=1, deadline_s=60))) as store:
        assert put(store, chain(4)) == 4
        assert store.flush(30)
        drop_ram(store)
        tier.faults["read"] = tier.held_read
        with store.acquire(chain(4), 30) as lease:
            assert eventually(lambda: tier.inside == 1)
            before = len(tier.calls)
            assert put(store, chain(1, seed=1)) == 1
            assert "write" not in tier.calls[before:]
            assert eventually(lambda: "write" in tier.calls[before:]), "but not for ever"
            tier.go.set()
            assert len([block.source for block in lease]) == 4


def test_what_is_known_of_a_place_without_a_cap_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercel.store.lane_index.KEYS_MAX", 5)
    index = LaneIndex(None, lambda key: False)
    keys = chain(8).keys
    for key in keys:
        index.enter(key, 10)
    assert [index.has(key, 0) for key in keys] == [False] * 3 + [True] * 5
    assert index.used_bytes == 50
    index.learn_scanned(Stored(keys[0], 10, 0.0), 0)
    assert len(index) == 5


def test_of_two_chains_with_one_beginning_only_what_follows_the_dropped_block_goes(tier: Held) -> None:
    """A system prompt is shared by all: dropping one conversation's blocks must not drop the others'."""
    tier.faults["write"] = tier.held_write
    short, trunk = chain(1), scope().chain(range(100, 100 + 4 * 8))
    with make_store((tier, LaneOptions(deadline_s=60)), slots=40, reserved=4) as store:
        assert put(store, short) == 1
        assert eventually(lambda: tier.inside == 1), "the first batch is on its way, all else waits"
        one, other = ([*range(100, 108), *range(first, first + 4 * 6)] for first in (500, 900))
        for tokens in (one, other):
            branch = scope().chain(tokens)
            assert branch.keys[0] == trunk.keys[0]
            put(store, branch)
        with store.lock:
            traffic = store.below.traffic[0]
            traffic._waiting_max = traffic.lane.pending_writes
            store.ram.touch(scope().chain(one).keys[:2])
            fence = store.ram.touch(scope().chain(other).keys[:2]) - 3
            before = [entry.key for entry, _ in traffic._down]
            assert traffic.make_way_locked(fence)
            left = [entry.key for entry, _ in traffic._down]
        dropped = [key for key in before if key not in left]
        assert dropped == list(scope().chain(one).keys[2:])
        assert store.stats().tiers[0].counters.writes_dropped == 6
        tier.go.set()
        assert_nothing_leaked(store)


def test_what_is_being_deleted_takes_room_until_it_is_gone(tmp_path: Path) -> None:
    """Two writers: what the first evicted must not make room for the second before it is deleted."""
    index = LaneIndex(100, lambda key: False)
    keys = chain(12).keys
    for key in keys[:10]:
        index.enter(key, 10)
    first = index.reserve({keys[10]: 10}, 0)
    assert first is not None
    leaving = list(first.evicted)
    assert len(leaving) == 2, "one, and one ahead"
    second = index.reserve({keys[11]: 10}, 0)
    assert second is not None
    assert second.evicted, "the one evicted ahead is still there"
    assert not index.may_write(leaving[0]), "or its deletion would take the new record along"
    index.left([*leaving, *second.evicted])
    assert index.may_write(leaving[0])
    assert index.make_room(0) == {}
    cleared = index.bar(None)
    assert index.used_bytes == 20, "what is being written"
    assert index.make_room(31) is None, "nothing is left to evict, and the cleared is still there"
    index.left(cleared)
    assert index.make_room(31) == {}
