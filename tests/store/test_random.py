"""The store against a model that is too dumb to be wrong: any order of operations, faults and restarts."""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.store.support import (
    RECORD,
    FaultyTier,
    assert_nothing_leaked,
    chain,
    disk,
    drop_ram,
    file_bytes,
    get,
    make_store,
    put,
    raising,
    scope,
)

from tiercel.store import LaneOptions, TieredStore, WriteMode

SEEDS = st.integers(0, 3)
LENGTHS = st.integers(1, 14)
SCOPES = st.sampled_from([scope("a"), scope("b")])
CAP = 24 * RECORD


class StoreMachine(RuleBasedStateMachine):
    """The model is a set: the blocks stored since they were last cleared. A hit outside it is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tiercel-random-"))
        self.ever: set[bytes] = set()
        self.faults = 0
        self.trusted = True
        self.unsettled = False
        self.opened: list[TieredStore] = []
        self.open(WriteMode.THROUGH)

    def open(self, mode: WriteMode) -> None:
        self.tier = FaultyTier(disk(self.folder / "c"))
        self.store = make_store((self.tier, LaneOptions(cap_bytes=CAP, write=mode)), slots=10, reserved=3)
        self.opened.append(self.store)

    @rule(seed=SEEDS, length=LENGTHS, of=SCOPES, skip=st.integers(0, 3))
    def store_blocks(self, seed: int, length: int, of: object, skip: int) -> None:
        one = chain(length, seed, of)  # type: ignore[arg-type]
        put(self.store, one, start=min(skip, length), deadline_s=0.2)
        self.ever.update(one.keys)

    @rule(seed=SEEDS, length=st.integers(6, 14), of=SCOPES)
    def store_and_load_from_the_tier(self, seed: int, length: int, of: object) -> None:
        self.store_blocks(seed, length, of, 0)
        self.store.flush(1.0)
        drop_ram(self.store)
        self.load(seed, length, of)

    @rule(seed=SEEDS, length=LENGTHS, of=SCOPES)
    def load(self, seed: int, length: int, of: object) -> None:
        one = chain(length, seed, of)  # type: ignore[arg-type]
        hit = self.store.lookup(one, 0.5)
        assert all(key in self.ever for key in one.keys[: hit.blocks])
        loaded = get(self.store, one, 1.0)
        assert all(key in self.ever for key in one.keys[: len(loaded)])

    @rule(seed=SEEDS, length=LENGTHS, of=SCOPES, taken=st.integers(0, 5))
    def store_during_a_load(self, seed: int, length: int, of: object, taken: int) -> None:
        one = chain(length, seed, of)  # type: ignore[arg-type]
        with self.store.acquire(one, 0.5) as lease:
            for block in lease:
                if block.index == taken:
                    before = bytes(block.payload)
                    put(self.store, chain(6, seed + 1, of), deadline_s=0)  # type: ignore[arg-type]
                    self.ever.update(chain(6, seed + 1, of).keys)  # type: ignore[arg-type]
                    assert bytes(block.payload) == before
                    break

    @rule(seed=SEEDS, length=LENGTHS, of=SCOPES)
    def abort(self, seed: int, length: int, of: object) -> None:
        with self.store.begin_store(chain(length, seed + 50, of), 0, length, 4096, 0) as lease:  # type: ignore[arg-type]
            for block in lease:
                block.payload[:] = b"x" * 4096
                break
        assert self.store.lookup(chain(length, seed + 50, of), 0).blocks == 0  # type: ignore[arg-type]

    @rule(of=st.one_of(st.none(), SCOPES))
    def clear(self, of: object) -> None:
        tag = None if of is None else of.tag  # type: ignore[attr-defined]
        self.store.clear(tag, 1.0)
        self.ever = {key for key in self.ever if tag is not None and not key.startswith(tag)}

    @rule(seed=SEEDS, of=SCOPES, ttl_s=st.sampled_from([0.001, 60.0]))
    def pin(self, seed: int, of: object, ttl_s: float) -> None:
        assert self.store.pin(chain(6, seed, of), ttl_s) <= 5  # type: ignore[arg-type]

    @rule(seed=SEEDS, of=SCOPES)
    def unpin(self, seed: int, of: object) -> None:
        self.store.unpin(chain(6, seed, of))  # type: ignore[arg-type]

    @rule(seed=SEEDS, length=LENGTHS, of=SCOPES)
    def demote(self, seed: int, length: int, of: object) -> None:
        self.store.demote(chain(length, seed, of), 0.2)  # type: ignore[arg-type]

    @precondition(lambda self: not self.tier.faults)
    @rule(seed=SEEDS, length=LENGTHS, of=SCOPES)
    def drop(self, seed: int, length: int, of: object) -> None:
        one = chain(length, seed, of)  # type: ignore[arg-type]
        self.store.drop(one, 5.0)
        assert self.store.lookup(one, 0.0).blocks == 0
        assert get(self.store, one, 0.5) == []

    @rule()
    def evict_all_of_ram(self) -> None:
        drop_ram(self.store)

    @rule(what=st.sampled_from(["read", "write", "contains", "delete"]), times=st.integers(1, 3))
    def break_tier(self, what: str, times: int) -> None:
        tier, left = self.tier, [times]

        def fault(*_: object) -> object:
            left[0] -= 1
            if left[0] <= 0:
                tier.faults.pop(what, None)
            return raising()

        tier.faults[what] = fault
        self.trusted = False

    @precondition(lambda self: self.tier.faults)
    @rule()
    def mend_tier(self) -> None:
        self.faults += self.tier.fired
        self.tier.faults.clear()

    @rule(mode=st.sampled_from(list(WriteMode)), close=st.booleans())
    def restart(self, mode: WriteMode, close: bool) -> None:
        if close:
            self.store.close(1.0)
        elif not self.store.flush(1.0):
            # What it still writes, the next one cannot know of.
            self.unsettled = True
        # Nor of what it still deletes.
        self.unsettled |= self.purging()
        self.tier.faults.clear()
        # Unfinished purges end with the process: what they left may be found again. Keys say so, not bytes.
        if not self.trusted:
            every = [chain(14, seed, scope(name)) for name in "ab" for seed in range(9)]
            self.ever.update(key for one in every for key in one.keys)
        self.open(mode)
        self.trusted = True

    @invariant()
    def nothing_is_leaked_and_bytes_are_counted(self) -> None:
        if not self.tier.faults:
            self.store.flush(2)
        assert_nothing_leaked(self.store)
        if not self.tier.faults and not self.purging() and not self.unsettled:
            stats = self.store.stats().tiers[0]
            assert stats.used_bytes == file_bytes(self.folder) <= CAP, stats

    def purging(self) -> bool:
        return any(one.below.traffic[0].lane.index.purging for one in self.opened)

    def teardown(self) -> None:
        for store in self.opened:
            store.close(0.5)
        shutil.rmtree(self.folder)


def test_any_order_of_operations_faults_and_restarts() -> None:
    run_state_machine_as_test(
        StoreMachine, settings=settings(max_examples=25, stateful_step_count=20, deadline=None)
    )


@pytest.mark.soak
def test_any_order_of_operations_faults_and_restarts_for_long() -> None:
    run_state_machine_as_test(
        StoreMachine, settings=settings(max_examples=600, stateful_step_count=50, deadline=None)
    )


def torture(folder: Path, seconds: float, seed: int) -> None:
    tier = FaultyTier(disk(folder / "c"))
    options = LaneOptions(cap_bytes=60 * RECORD, write_workers=2, read_workers=2)
    store = make_store((tier, options), slots=24, reserved=6)
    until_s = time.monotonic() + seconds
    wrong: list[BaseException] = []
    loaded = [0]

    def run(number: int) -> None:
        pick = random.Random(seed + number)
        try:
            while time.monotonic() < until_s:
                one = chain(pick.randint(1, 16), pick.randint(0, 5), scope(pick.choice("ab")))
                action = pick.random()
                if action < 0.45:
                    put(store, one, start=pick.randint(0, 2), deadline_s=pick.choice([0, 0.05]))
                elif action < 0.9:
                    loaded[0] += len(get(store, one, 1.0))
                elif action < 0.93:
                    store.clear(one.keys[0][:8], 5)
                elif action < 0.95:
                    store.pin(one, 0.01)
                elif action < 0.97:
                    store.drop(one, 5)
                elif action < 0.98:
                    store.demote(one, 0.05)
                else:
                    store.lookup(one)
        except BaseException as fault:  # noqa: BLE001 (shown by the main thread)
            wrong.append(fault)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 60)
    assert not wrong, (seed, wrong)
    assert loaded[0] > 100
    assert store.flush(30)
    assert_nothing_leaked(store)
    assert store.stats().tiers[0].used_bytes == file_bytes(folder) <= 60 * RECORD
    assert store.close(10)


def test_threads_store_load_and_clear_at_once(tmp_path: Path) -> None:
    torture(tmp_path, 5, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 112))
def test_threads_store_load_and_clear_at_once_for_long(tmp_path: Path, seed: int) -> None:
    torture(tmp_path, 20, seed)
