"""Every fault of a tier is a miss and a counter: nothing raises, hangs, leaks or serves a wrong byte."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.store.support import (
    RECORD,
    FaultyTier,
    assert_nothing_leaked,
    chain,
    disk,
    drop_ram,
    eventually,
    file_bytes,
    get,
    make_store,
    mounted,
    put,
    raising,
    scope,
)

from tiercel.blocks import BlockKey
from tiercel.store import LaneOptions, TieredStore
from tiercel.store.breaker import Breaker, BreakerState
from tiercel.tiers import MISSING, OK, Fate, FilesTier, Outcome


@pytest.fixture
def tier(tmp_path: Path) -> FaultyTier:
    return FaultyTier(disk(tmp_path / "c"))


def stored_below(tier: FaultyTier, blocks: int = 5) -> TieredStore:
    """A store whose `chain(blocks)` lies in the tier only."""
    store = make_store((tier, LaneOptions()))
    assert put(store, chain(blocks)) == blocks
    assert store.flush(30)
    drop_ram(store)
    return store


def path_of(tier: FaultyTier, key: BlockKey) -> Path:
    assert isinstance(tier.inner, FilesTier)
    return Path(tier.inner.path(key))


def test_a_read_that_fails_at_block_3_of_5_ends_the_lease_there(tier: FaultyTier) -> None:
    """D17."""
    bad = chain(5).keys[3]

    def fail(keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        done = tier.inner.read(keys, records)
        return [
            Outcome(Fate.FAILED, "EIO") if key == bad else one for key, one in zip(keys, done, strict=True)
        ]

    with stored_below(tier) as store:
        tier.faults["read"] = fail
        assert get(store, chain(5)) == ["disk"] * 3
        assert tier.fired
        assert store.stats().counters.loads_failed == 1
        assert store.stats().tiers[0].counters.failed == 1
        assert store.lookup(chain(5)).blocks == 3, "a failed load is not believed again"
        tier.faults.clear()
        put(store, chain(5), start=3)
        assert store.flush(30)
        drop_ram(store)
        assert get(store, chain(5)) == ["disk"] * 5
        assert store.stats().tiers[0].used_bytes == 5 * RECORD


@pytest.mark.parametrize("gone", [(), (1, 3), (0, 1, 2, 3, 4)])
def test_files_deleted_after_the_lookup_are_misses_and_forgotten(
    tier: FaultyTier, gone: tuple[int, ...]
) -> None:
    """D18."""
    with stored_below(tier) as store:
        assert store.lookup(chain(5)).blocks == 5
        for index in gone:
            path_of(tier, chain(5).keys[index]).unlink()
        expected = min(gone, default=5)
        assert get(store, chain(5)) == ["disk"] * expected
        assert eventually(lambda: store.stats().tiers[0].counters.missing == len(gone))
        assert store.lookup(chain(5)).blocks == expected
        assert_nothing_leaked(store)
        assert store.stats().tiers[0].used_bytes == (5 - len(gone)) * RECORD


def cut_short(path: Path) -> None:
    os.truncate(path, 5000)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def flipped(at: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1
        path.write_bytes(raw)

    return flip


@pytest.mark.parametrize(
    "spoil",
    [cut_short, emptied, *map(flipped, (0, 9, 20, 60, 81, 97, 101, 115, 130, 150, 4096, RECORD - 1))],
    ids=["cut", "empty", *"magic version key root length depth info sum headersum text body last".split()],
)
def test_a_spoilt_file_is_a_miss_dropped_and_replaced_later(
    tier: FaultyTier, spoil: Callable[[Path], None]
) -> None:
    """D19, D32."""
    with stored_below(tier) as store:
        assert store.lookup(chain(5)).blocks == 5
        bad = path_of(tier, chain(5).keys[2])
        spoil(bad)
        assert get(store, chain(5)) == ["disk"] * 2
        assert store.stats().tiers[0].counters.corrupt == 1
        assert eventually(lambda: not bad.exists())
        assert store.lookup(chain(5)).blocks == 2
        put(store, chain(5), start=2)
        assert store.flush(30)
        drop_ram(store)
        assert get(store, chain(5)) == ["disk"] * 5
        assert store.stats().tiers[0].used_bytes == file_bytes(bad.parents[2]) == 5 * RECORD


def answer_nothing(keys: Sequence[BlockKey], *_: object) -> list[Outcome]:
    return [OK] * len(keys)


def answer_too_few(keys: Sequence[BlockKey], *_: object) -> list[Outcome]:
    return [OK] * (len(keys) - 1)


def answer_none(*_: object) -> object:
    return None


def answer_strings(keys: Sequence[BlockKey], *_: object) -> object:
    return ["ok"] * len(keys)


def answer_full(keys: Sequence[BlockKey], *_: object) -> object:
    return [Outcome(Fate.FULL, "full")] * len(keys)


def answer_missing(keys: Sequence[BlockKey], *_: object) -> object:
    return [MISSING] * len(keys)


BAD_ANSWERS = [
    raising,
    answer_nothing,
    answer_too_few,
    answer_none,
    answer_strings,
    answer_full,
    answer_missing,
]


@pytest.mark.parametrize("fault", BAD_ANSWERS)
def test_a_read_that_misbehaves_is_a_miss(tier: FaultyTier, fault: Callable[..., object]) -> None:
    with stored_below(tier) as store:
        tier.faults["read"] = fault
        assert get(store, chain(5)) == []
        assert tier.fired
        tier.faults.clear()
        put(store, chain(5, seed=1))
        assert get(store, chain(5, seed=1)) == ["ram"] * 5
        assert_nothing_leaked(store)


@pytest.mark.parametrize("what", ["write", "contains", "delete", "scan"])
@pytest.mark.parametrize("fault", BAD_ANSWERS)
def test_other_calls_that_misbehave_cost_nothing_but_the_tier(
    tier: FaultyTier, what: str, fault: Callable[..., object]
) -> None:
    tier.faults[what] = fault
    with make_store((tier, LaneOptions(cap_bytes=8 * RECORD)), scanned=what != "scan") as store:
        for seed in range(4):
            assert put(store, chain(5, seed=seed)) == 5
            assert get(store, chain(5, seed=seed)) == ["ram"] * 5
            store.lookup(chain(9, seed=seed), 5)
            store.flush(5)
        assert tier.fired
        store.clear(deadline_s=0.2)
        lies = what == "delete" and fault in (answer_nothing, answer_missing)
        assert lies or store.lookup(chain(5)).blocks == 0
        assert_nothing_leaked(store)


def test_another_blocks_bytes_are_never_served(tier: FaultyTier) -> None:
    keys = chain(5).keys

    def swap(asked: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        return tier.inner.read([keys[(keys.index(key) + 1) % 5] for key in asked], records)

    with stored_below(tier) as store:
        tier.faults["read"] = swap
        assert get(store, chain(5)) == []
        assert tier.fired
        assert store.stats().tiers[0].counters.corrupt > 0


def test_old_bytes_in_a_slot_never_pass_for_an_answer(tier: FaultyTier) -> None:
    with stored_below(tier, 1) as store:
        assert get(store, chain(1)) == ["disk"], "the slot that is used next holds a true record now"
        drop_ram(store)
        tier.faults["read"] = answer_nothing
        assert get(store, chain(1)) == []


def test_a_block_a_fast_tier_lost_comes_from_the_next_one(tmp_path: Path) -> None:
    fast, slow = FaultyTier(disk(tmp_path / "a", "fast")), disk(tmp_path / "b", "slow")
    with make_store((fast, LaneOptions()), (slow, LaneOptions())) as store:
        put(store, chain(5))
        assert store.flush(30)
        drop_ram(store)
        fast.faults["read"] = answer_missing
        assert get(store, chain(5), 15) == ["slow"] * 5
        assert fast.fired
        assert store.stats().counters.loads_timed_out == 0
        assert_nothing_leaked(store)


def test_a_tier_that_says_yes_and_has_nothing_is_asked_but_costs_only_a_miss(tier: FaultyTier) -> None:
    tier.faults["contains"] = lambda keys: [True] * len(keys)
    with make_store((tier, LaneOptions())) as store:
        assert store.lookup(chain(4), 5).blocks == 4
        assert get(store, chain(4)) == []
        assert store.lookup(chain(4), 0).blocks == 0
        assert eventually(lambda: store.stats().tiers[0].used_bytes == 0)
        assert_nothing_leaked(store)


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_stuck_tier_holds_nobody_up_and_close_comes_back(tier: FaultyTier, what: str) -> None:
    gate = threading.Event()
    call = getattr(tier.inner, what)
    store = make_store((tier, LaneOptions(deadline_s=0.2)), slots=12)
    put(store, chain(8))
    assert store.flush(30)
    drop_ram(store)
    tier.faults[what] = lambda *args: (gate.wait(60), call(*args))[1]
    if what == "read":
        assert get(store, chain(8), 30) == [], "ends once the tier counts as stuck, long before its deadline"
    else:
        put(store, chain(8, seed=1))
        assert not store.flush(0.5)
    assert tier.fired
    assert eventually(lambda: store.lookup(chain(8), 0).blocks == 0)
    assert put(store, chain(6, seed=2), deadline_s=30) > 0, (
        "slots that only waited for the tier are free again"
    )
    started_s = time.monotonic()
    store.close(1.0)
    assert time.monotonic() - started_s < 30, "sixty seconds would be a wait for the tier"
    gate.set()
    assert_nothing_leaked(store)


@pytest.mark.parametrize("deadline_s", [0.0, 0.5])
def test_a_tier_that_does_not_close_is_left_behind(tier: FaultyTier, deadline_s: float) -> None:
    gate = threading.Event()
    store = make_store((tier, LaneOptions()))
    put(store, chain(3))
    assert store.flush(30)
    tier.faults["close"] = lambda: gate.wait(60)
    started_s = time.monotonic()
    assert store.close(deadline_s)
    assert tier.fired == 1
    assert time.monotonic() - started_s < 30, "sixty seconds would be a wait for the tier"
    gate.set()


def test_clear_holds_at_once_also_when_the_tier_is_stuck(tier: FaultyTier) -> None:
    gate = threading.Event()
    with stored_below(tier) as store:
        tier.faults["scan"] = lambda: (gate.wait(60), list(tier.inner.scan()))[1]
        store.clear(deadline_s=0.05)
        assert tier.fired
        assert store.lookup(chain(5), 1).blocks == 0, "its files are there, but never found"
        gate.set()
        assert eventually(lambda: not any(tier.inner.contains(chain(5).keys)))


def test_clear_during_a_write_is_not_undone_by_its_end(tier: FaultyTier) -> None:
    """The window between the file's appearance and the end of the call that wrote it."""
    gate, written = threading.Event(), threading.Event()

    def write(keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        done = tier.inner.write(keys, records)
        written.set()
        gate.wait(20)
        return done

    tier.faults["write"] = write
    with make_store((tier, LaneOptions())) as store:
        put(store, chain(3))
        assert written.wait(20)
        store.clear(scope().tag)
        assert store.lookup(chain(3), 1).blocks == 0
        gate.set()
        assert store.flush(30)
        assert store.lookup(chain(3), 1).blocks == 0
        assert eventually(lambda: not any(tier.inner.contains(chain(3).keys)))
        assert store.stats().tiers[0].used_bytes == 0
        tier.faults.clear()
        assert put(store, chain(3)) == 3


def test_clear_during_loads_probes_and_stores_leaves_nothing_behind(tier: FaultyTier) -> None:
    gate = threading.Event()
    with stored_below(tier) as store:
        tier.faults["read"] = lambda *args: (gate.wait(20), tier.inner.read(*args))[1]
        tier.faults["contains"] = lambda keys: (gate.wait(20), [True] * len(keys))[1]
        answers: list[object] = []
        threads = [
            threading.Thread(target=lambda: answers.append(get(store, chain(5), 20))),
            threading.Thread(target=lambda: answers.append(store.lookup(chain(9), 20))),
        ]
        with store.begin_store(chain(2, seed=1), 0, 2, 4096) as write:
            room = iter(write)
            next(room)
            for thread in threads:
                thread.start()
            assert eventually(lambda: {"read", "contains"} <= set(tier.calls))
            store.clear()
            gate.set()
            assert list(room) == []
            assert write.commit() == 0
        for thread in threads:
            thread.join(30)
        tier.faults.clear()
        assert [] in answers
        assert store.lookup(chain(5), 1).blocks == store.lookup(chain(2, seed=1), 1).blocks == 0
        assert_nothing_leaked(store)


def test_the_breaker_opens_probes_and_recovers(tier: FaultyTier) -> None:
    with stored_below(tier, 8) as store:
        tier.faults["read"] = raising
        for _ in range(3):
            get(store, chain(8))
        stats = store.stats().tiers[0]
        assert stats.breaker == "open"
        assert stats.counters.breaker_opened >= 1
        calls = len(tier.calls)
        assert store.lookup(chain(8)).blocks == 0
        assert len(tier.calls) == calls, "not asked while open"
        tier.faults.clear()
        assert eventually(lambda: store.stats().tiers[0].breaker == "probing")
        put(store, chain(3, seed=1))
        assert store.flush(10)
        assert store.stats().tiers[0].breaker == "closed"


def test_what_is_stored_while_a_tier_is_probed_waits_for_it(tier: FaultyTier) -> None:
    gate, probing = threading.Event(), threading.Event()

    def write(keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        probing.set()
        gate.wait(20)
        return tier.inner.write(keys, records)

    with make_store((tier, LaneOptions())) as store:
        breaker = store.below.traffic[0].lane.gate.breaker
        with store.lock:
            while breaker.allows(time.monotonic()):
                breaker.failed(time.monotonic())
        assert eventually(lambda: breaker.allows(time.monotonic()))
        tier.faults["write"] = write
        put(store, chain(1))
        assert probing.wait(20)
        assert breaker.probe_out
        put(store, chain(3, seed=1))
        drop_ram(store)
        gate.set()
        assert store.flush(20)
        assert store.stats().tiers[0].counters.writes_dropped == 0
        drop_ram(store)
        assert get(store, chain(3, seed=1)) == ["disk"] * 3


def test_the_breaker_alone_counts_doubles_and_forgets() -> None:
    breaker = Breaker(failures_max=2, pause_s=1, pause_max_s=3)
    assert not breaker.failed(0)
    assert breaker.allows(0)
    assert breaker.failed(0)
    assert breaker.state(0.9) is BreakerState.OPEN
    assert breaker.state(1.1) is BreakerState.PROBING
    assert breaker.failed(1.1)
    assert not breaker.allows(3.0)
    assert breaker.failed(3.2)
    assert breaker.allows(6.3), "the pause is bounded"
    breaker.succeeded()
    assert not breaker.failed(7)
    assert breaker.state(7) is BreakerState.CLOSED


def test_a_full_tier_warns_once_and_writes_again_when_there_is_room(
    tier: FaultyTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """D30."""
    monkeypatch.setattr("tiercel.store.lane._FULL_PAUSE_S", 0.05)
    tier.faults["write"] = answer_full
    with make_store((tier, LaneOptions())) as store, caplog.at_level(logging.WARNING, "tiercel"):
        for seed in range(6):
            assert put(store, chain(4, seed=seed)) == 4
            assert get(store, chain(4, seed=seed)) == ["ram"] * 4
            time.sleep(0.06)
        assert tier.fired
        assert store.stats().tiers[0].counters.full > 1
        assert len([one for one in caplog.records if "writing pauses" in one.message]) == 1
        tier.faults.clear()
        time.sleep(0.06)
        put(store, chain(4, seed=9))
        assert store.flush(30)
        drop_ram(store)
        assert get(store, chain(4, seed=9)) == ["disk"] * 4


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", "1m") as where:
        yield where


def test_a_really_full_disk_stops_stores_there_and_nothing_else(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """D30."""
    monkeypatch.setattr("tiercel.store.lane._FULL_PAUSE_S", 0.05)
    with (
        make_store((disk(small_disk / "c"), LaneOptions()), slots=24) as store,
        caplog.at_level(logging.WARNING, "tiercel"),
    ):
        for seed in range(40):
            put(store, chain(8, seed=seed))
            store.flush(5)
            assert get(store, chain(8, seed=seed)) == ["ram"] * 8
        assert store.stats().tiers[0].counters.full > 0
        assert len([one for one in caplog.records if "writing pauses" in one.message]) == 1
        assert file_bytes(small_disk) == store.stats().tiers[0].used_bytes
        assert not list(small_disk.rglob("*.tmp"))
        store.clear()
        time.sleep(0.06)
        put(store, chain(8, seed=99))
        assert store.flush(10)
        drop_ram(store)
        assert get(store, chain(8, seed=99)) == ["disk"] * 8


def run_of_everything(tier: FaultyTier) -> None:
    with make_store((tier, LaneOptions(cap_bytes=12 * RECORD)), slots=10, scanned=False) as store:
        for seed in range(3):
            put(store, chain(6, seed=seed))
            store.flush(2)
            drop_ram(store)
            get(store, chain(6, seed=seed))
            store.lookup(chain(8, seed=seed), 2)
        store.clear(scope().tag, 2)
        assert store.lookup(chain(6)).blocks == 0
        assert_nothing_leaked(store)


def test_whichever_call_of_a_tier_is_denied_nothing_else_breaks(tmp_path: Path) -> None:
    control = FaultyTier(disk(tmp_path / "control"))
    run_of_everything(control)
    fired = 0
    for nth in range(1, len(control.calls) + 1):
        tier = FaultyTier(disk(tmp_path / str(nth)))
        tier.deny_nth = nth
        run_of_everything(tier)
        fired += len(tier.calls) >= nth
    assert fired > len(control.calls) * 0.8
