"""Loads that fail, stores that are gone, ranks that disagree: every request still gets the right answer."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm.toy import Toy, ToyEngine, prompt, toy_store
from tests.store.support import FaultyTier, disk, drop_ram, eventually

from tiercel.engines.vllm import asker, scheduler
from tiercel.engines.vllm.mover import CpuMover
from tiercel.store import Hit, LaneOptions, TieredStore


class Meddled:
    """A store that someone meddles with between an engine's lookup and its load."""

    def __init__(self, inner: TieredStore) -> None:
        self.inner = inner
        self.before_load: Callable[[Any], None] | None = None
        self.loads = 0

    def acquire(self, chain: Any, deadline_s: float = 10.0, start: int = 0) -> Any:
        self.loads += 1
        if self.before_load is not None:
            self.before_load(chain)
        return self.inner.acquire(chain, deadline_s, start)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def drop_blocks(store: TieredStore, chain: Any, blocks: Sequence[int]) -> None:
    with store.lock:
        for block in blocks:
            entry = store.ram.get(chain.keys[block])
            if entry is not None:
                store.ram.remove(entry)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("gone", [range(10), range(3, 10), range(9, 10), [5], []], ids=str)
def test_blocks_that_went_between_lookup_and_load(
    tmp_path: Path, gone: Sequence[int], window: int | None
) -> None:
    """D18: none, some, all. What is missing is computed; what was there is used; the next lookup knows."""
    store = Meddled(toy_store())
    with Toy(tmp_path, store, window=window).start() as engine:
        tokens = prompt(161)
        engine.run("cold", tokens, 4)
        engine.forget()
        store.before_load = lambda chain: drop_blocks(store.inner, chain, gone)
        engine.run("warm", tokens, 4)
        store.before_load = None
        engine.drain()
        assert store.loads == 1
        assert engine.stats.get("loads_failed", 0) == bool(gone)
        first = min(gone, default=10)
        assert engine.stats["loaded_tokens"] == first * 16
        engine.forget()
        # What was computed anew was stored anew.
        assert engine.cached(engine.run("again", tokens, 4)) == 160
        engine.settled()


@pytest.mark.parametrize("window", [None, 40])
def test_a_tier_that_fails_to_read(tmp_path: Path, window: int | None) -> None:
    """D17, D19: reads fail or rot after the lookup; nothing unverified is used, nothing retries for ever."""
    (tmp_path / "disk").mkdir()
    tier = FaultyTier(disk(tmp_path / "disk"))
    store = toy_store((tier, LaneOptions(cap_bytes=1 << 30)))
    with Toy(tmp_path, store, window=window).start() as engine:
        tokens = prompt(161)
        engine.run("cold", tokens, 4)
        engine.forget()
        assert store.flush(10)
        drop_ram(store)

        def rotten(keys: Any, records: Any) -> Any:
            outcomes = tier.inner.read(keys, records)
            for record in records:
                record[5000] ^= 1
            return outcomes

        tier.faults["read"] = rotten
        engine.run("warm", tokens, 4)
        assert tier.fired > 0
        assert engine.stats["loads_failed"] == 1
        assert engine.steps < 300
        del tier.faults["read"]
        engine.forget()
        # A block that was still being read while it was computed anew is stored with a later request.
        for number in range(10):
            if engine.cached(engine.run(f"again{number}", tokens, 4)) == 160:
                break
            engine.forget()
            time.sleep(0.05)
        else:
            pytest.fail("what was computed anew is not stored")
        engine.settled()


def test_a_tier_that_hangs_costs_the_deadline(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    tier = FaultyTier(disk(tmp_path / "disk"))
    store = toy_store((tier, LaneOptions(cap_bytes=1 << 30, deadline_s=60)))
    options = {"store.load_deadline": "300ms"}
    with Toy(tmp_path, store, extra=options).start() as engine:
        tokens = prompt(161)
        engine.run("cold", tokens, 4)
        engine.forget()
        assert store.flush(10)
        drop_ram(store)
        release = threading.Event()
        tier.faults["read"] = lambda *_: release.wait(20)
        started_s = time.monotonic()
        engine.run("warm", tokens, 4)
        assert tier.fired > 0
        assert time.monotonic() - started_s < 5
        release.set()
        engine.settled()


def test_many_that_wait_for_an_answer_cost_a_step_no_more_than_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call is short; what counts is all of them together, for the requests that run."""
    monkeypatch.setattr(scheduler, "_PATIENCE_S", 0.05)
    release = threading.Event()

    class Slow(Meddled):
        def lookup(self, chain: Any, deadline_s: float = 0.05, start: int = 0, **options: Any) -> Hit:
            release.wait(20)
            return Hit()

    with Toy(tmp_path, Slow(toy_store())).start() as engine:
        for number in range(100):
            engine.add(f"r{number}", prompt(40, number))
        started_s = time.monotonic()
        engine.step()
        assert time.monotonic() - started_s < 100 * 0.05 / 4
        assert not engine.finished
        release.set()
        engine.settled()
        assert len(engine.finished) == 100


def test_lookups_that_never_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler waits for its deadline and no longer, and never within a call."""
    monkeypatch.setattr(asker, "ASK_DEADLINE_S", 0.2)
    release = threading.Event()

    class Slow(Meddled):
        def lookup(self, chain: Any, deadline_s: float = 0.05, start: int = 0, **options: Any) -> Hit:
            release.wait(20)
            return Hit()

    with Toy(tmp_path, Slow(toy_store())).start() as engine:
        started_s = time.monotonic()
        engine.run("first", prompt(100), 2)
        assert time.monotonic() - started_s < 5
        assert engine.stats["lookups_timed_out"] == 1
        # With one lookup stuck, others do not wait behind it.
        started_s = time.monotonic()
        for number in range(20):
            engine.run(f"next{number}", prompt(100, number), 2)
        assert time.monotonic() - started_s < 20 * 0.2
        assert engine.stats["lookups_timed_out"] == 1
        release.set()
        engine.settled()


@pytest.mark.parametrize(("token_s", "loads"), [(0.001, True), (0.00001, False)])
def test_what_costs_more_to_load_than_to_compute_is_computed(
    tmp_path: Path, token_s: float, loads: bool
) -> None:
    """A slow tier prices itself out, against what prefill is seen to take."""
    (tmp_path / "disk").mkdir()
    tier = FaultyTier(disk(tmp_path / "disk"))
    store = toy_store((tier, LaneOptions(cap_bytes=1 << 30, read_workers=1)))

    def slow(keys: Any, records: Any) -> Any:
        time.sleep(0.004 * len(keys))
        return tier.inner.read(keys, records)

    with Toy(tmp_path, store, prices=True, token_s=token_s).start() as engine:
        for number in range(6):
            engine.run(f"cold{number}", prompt(161, number))
            engine.forget()
        assert store.flush(10)
        tier.faults["read"] = slow
        for number in range(6):
            drop_ram(store)
            warm = engine.run(f"warm{number}", prompt(161, number))
            engine.forget()
        assert tier.fired > 0
        assert (engine.cached(warm) > 0) is loads
        engine.settled()


class Away:
    """A daemon that is gone, as its client shows it."""

    def __init__(self, inner: TieredStore) -> None:
        self.inner = inner
        self.away = False
        self.calls = 0

    def lookup(self, chain: Any, deadline_s: float = 0.05, start: int = 0, **options: Any) -> Hit:
        self.calls += 1
        return Hit() if self.away else self.inner.lookup(chain, deadline_s, start, **options)

    def acquire(self, chain: Any, deadline_s: float = 10.0, start: int = 0) -> Any:
        self.calls += 1
        return Nothing() if self.away else self.inner.acquire(chain, deadline_s, start)

    def begin_store(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return Nothing() if self.away else self.inner.begin_store(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Nothing:
    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *_: object) -> None: ...

    def ready(self, limit: int) -> list[Any]:
        return []

    def take(self, limit: int) -> list[Any]:
        return []

    def commit(self) -> int:
        return 0


def test_a_daemon_that_comes_and_goes(tmp_path: Path) -> None:
    store = Away(toy_store(slots=600))
    rng = random.Random(3)
    with Toy(tmp_path, store, blocks=129).start() as engine:
        for round_ in range(6):
            for number in range(8):
                engine.add(f"{round_}-{number}", prompt(60 + 30 * number, number), 8)
                engine.step()
                store.away = rng.random() < 0.5
            engine.drain()
            engine.forget()
        for name in engine.prompts:
            engine.check(name)
        store.away = False
        engine.run("cold", prompt(161, 99))
        engine.forget()
        assert engine.cached(engine.run("warm", prompt(161, 99))) == 160
        engine.settled()


def test_a_full_store_skips_and_counts(tmp_path: Path) -> None:
    """D25: all of RAM is pinned; stores are skipped, requests never notice."""
    store = toy_store(slots=8)
    with Toy(tmp_path, store).start() as engine:
        for number in range(20):
            engine.run(f"r{number}", prompt(161, number), 2)
        engine.settled()


def test_a_fault_of_ours_in_a_lookup_is_a_miss_and_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)

    class Broken(Meddled):
        faults = 2

        def lookup(self, chain: Any, deadline_s: float = 0.05, start: int = 0, **options: Any) -> Hit:
            if self.faults:
                self.faults -= 1
                raise LookupError("a fault of ours")
            return self.inner.lookup(chain, deadline_s, start, **options)

    with Toy(tmp_path, Broken(toy_store())).start() as engine:
        for number in range(3):
            engine.run(f"r{number}", prompt(100))
            engine.forget()
        assert len(shown) == 2
        assert engine.external == {"r0": 0, "r1": 0, "r2": 96}
        engine.settled()


def test_a_fault_of_ours_in_a_transfer_ends_the_job_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)

    class Broken(Meddled):
        faults = 0

        def begin_store(self, *args: Any, **options: Any) -> Any:
            if self.faults:
                self.faults -= 1
                raise LookupError("a fault of ours")
            return self.inner.begin_store(*args, **options)

    store = Broken(toy_store())
    store.faults = 2
    with Toy(tmp_path, store).start() as engine:
        for number in range(4):
            engine.run(f"r{number}", prompt(100, number))
        engine.settled()
        assert len(shown) == 2
        engine.forget()
        assert engine.cached(engine.run("warm", prompt(100, 3))) == 96


# Ranks.


class Waiting(Meddled):
    """Loads wait for `go_on`."""

    def __init__(self, inner: TieredStore) -> None:
        super().__init__(inner)
        self.waits, self.go_on = threading.Event(), threading.Event()

    def acquire(self, chain: Any, deadline_s: float = 10.0, start: int = 0) -> Any:
        lease = super().acquire(chain, deadline_s, start)
        self.waits.set()
        assert self.go_on.wait(10)
        return lease


@pytest.mark.parametrize("ends", [True, False])
def test_nothing_is_copied_into_an_engine_that_has_ended(tmp_path: Path, ends: bool) -> None:
    """Its memory may be another's by then."""
    store, loaded = Waiting(toy_store()), threading.Event()

    class Watched(CpuMover):
        def load(self, mark: Any, blocks: Any) -> None:
            loaded.set()

    tokens = prompt(161)
    engine = Toy(tmp_path, store, mover=Watched).start()
    engine.run("cold", tokens)
    engine.forget()
    engine.add("warm", tokens)
    while not store.waits.is_set():
        engine.step()
    worker = engine.ranks[0].connector._worker
    if ends:
        worker.side.close(0.1)
    store.go_on.set()
    assert loaded.wait(0.5 if ends else 10) is not ends
    assert eventually(lambda: store.inner.stats().leases == 0)
    engine.connector.shutdown()
    worker.side.close()


@pytest.mark.parametrize(("ranks", "shards"), [(2, 2), (4, 2), (2, 1), (4, 4)])
@pytest.mark.parametrize("window", [None, 40])
def test_ranks_store_one_copy_per_shard(tmp_path: Path, ranks: int, shards: int, window: int | None) -> None:
    store = toy_store()
    with Toy(tmp_path, store, ranks=ranks, shards=shards, window=window).start() as engine:
        tokens = prompt(161)
        engine.run("cold", tokens, 4)
        engine.forget()
        assert store.stats().ram_blocks == 10 * shards
        assert engine.cached(engine.run("warm", tokens, 4)) == 160
        assert engine.stats["loaded_tokens"] == 160 * ranks
        engine.settled()


def test_another_number_of_ranks_misses(tmp_path: Path) -> None:
    store, tokens = toy_store(), prompt(161)
    with Toy(tmp_path, store, ranks=4, shards=4).start() as engine:
        engine.run("cold", tokens, 4)
        engine.settled()
    with Toy(tmp_path, store, ranks=2, shards=2).start() as engine:
        assert engine.cached(engine.run("other", tokens, 4)) == 0
    with Toy(tmp_path, store, ranks=4, shards=4).start() as engine:
        assert engine.cached(engine.run("same", tokens, 4)) == 160


@pytest.mark.parametrize("window", [None, 40])
def test_shards_that_were_evicted_differently(tmp_path: Path, window: int | None) -> None:
    """D45: all ranks load the shortest common prefix, and never another shard's bytes."""
    store = toy_store()
    rng = random.Random(7)
    with Toy(tmp_path, store, ranks=4, shards=4, window=window).start() as engine:
        tokens = prompt(161)
        engine.run("cold", tokens, 4)
        engine.forget()
        cut = [rng.randrange(3, 10) for _ in range(4)]
        for names, first in zip(engine.connector._scheduler.names, cut, strict=True):
            chain = names.chain("cold", hashes_of(engine, tokens), None)
            drop_blocks(store, chain, range(first, 10))
        assert engine.cached(engine.run("warm", tokens, 4)) == min(cut) * 16
        engine.settled()


def hashes_of(engine: ToyEngine, tokens: list[int]) -> bytes:
    request = engine.add("probe", tokens)
    hashes = b"".join(request.block_hashes)
    engine.abort("probe")
    return hashes


@pytest.mark.parametrize("window", [None, 40])
def test_ranks_of_different_speed_and_luck(tmp_path: Path, window: int | None) -> None:
    """D20: one rank is slow, one loses blocks: all see the same decisions, all requests end."""
    inner = toy_store(slots=600)

    class Slow(Meddled):
        def acquire(self, chain: Any, deadline_s: float = 10.0, start: int = 0) -> Any:
            time.sleep(rng.random() * 0.01)
            return super().acquire(chain, deadline_s, start)

        def begin_store(self, *args: Any, **options: Any) -> Any:
            time.sleep(rng.random() * 0.01)
            return self.inner.begin_store(*args, **options)

    rng = random.Random(11)
    stores = [Slow(inner) for _ in range(4)]
    stores[2].before_load = lambda chain: drop_blocks(inner, chain, [rng.randrange(len(chain.keys))])
    toy = Toy(tmp_path, inner, ranks=4, shards=4, stores=stores, blocks=65, window=window)
    with toy.start() as engine:
        for round_ in range(4):
            for number in range(12):
                name = f"{round_}-{number}"
                engine.add(name, prompt(30 + 20 * number, number, shared=number * 5), 10)
                engine.step()
                if rng.random() < 0.2 and name not in engine.finished:
                    engine.abort(name)
            engine.drain()
            for name, how in engine.finished.items():
                if how != "aborted":
                    engine.check(name)
            engine.forget()
        assert engine.stats["loads_failed"] > 0
        assert engine.stats["loads"] > engine.stats["loads_failed"]
        engine.settled()


# Streams.


class Stream:
    """A device's compute queue: work runs later, in order, on a thread of its own."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.works: list[Callable[[], None]] = []
        self.faults: list[AssertionError] = []
        self.condition = threading.Condition()
        self.queued = self.ran = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def queue(self, work: Callable[[], None]) -> None:
        with self.condition:
            self.works.append(work)
            self.queued += 1
            self.condition.notify_all()

    def wait(self, number: int) -> None:
        with self.condition:
            assert self.condition.wait_for(lambda: self.ran >= number, 20)

    def _run(self) -> None:
        while True:
            with self.condition:
                self.condition.wait_for(lambda: self.works)
                work = self.works.pop(0)
            time.sleep(self.delay_s)
            try:
                work()
            except AssertionError as fault:  # for the test to show
                self.faults.append(fault)
            with self.condition:
                self.ran += 1
                self.condition.notify_all()


def stream_mover(stream: Stream, *, ordered: bool) -> Any:
    from tiercel.engines.vllm.mover import CpuMover

    class StreamMover(CpuMover):
        def mark(self) -> object:
            return stream.queued

        def load(self, mark: Any, blocks: Any) -> None:
            if ordered:
                stream.wait(mark)
            super().load(mark, blocks)

        def save(self, mark: Any, blocks: Any) -> None:
            if ordered:
                stream.wait(mark)
            super().save(mark, blocks)

    return StreamMover


def run_on_stream(tmp_path: Path, *, ordered: bool) -> Stream:
    stream = Stream(0.001)
    toy = Toy(
        tmp_path, toy_store(slots=600), blocks=33, mover=stream_mover(stream, ordered=ordered),
        queue=stream.queue,
    )  # fmt: skip
    with toy.start() as engine:
        for round_ in range(3):
            for number in range(6):
                engine.add(f"{round_}-{number}", prompt(60 + 9 * number, number), 20)
            engine.drain()
            stream.wait(stream.queued)
            engine.forget()
        assert engine.stats["loads"] > 0
        stream.wait(stream.queued)
    return stream


def test_copies_are_ordered_against_the_compute_stream(tmp_path: Path) -> None:
    """D12, D13: saves after the compute that writes, loads after the compute that still reads."""
    stream = run_on_stream(tmp_path, ordered=True)
    assert stream.faults == []


def test_the_stream_bites(tmp_path: Path) -> None:
    """The control of the test above: without waiting for marks the same run reads wrong KV."""
    assert run_on_stream(tmp_path, ordered=False).faults != []


def test_slots_are_given_back_only_after_their_copy(tmp_path: Path) -> None:
    """D14: while a copy runs, the lease it reads from or writes to is held."""
    from tiercel.engines.vllm.mover import CpuMover

    store = toy_store()
    held: list[int] = []

    class Watching(CpuMover):
        def load(self, mark: Any, blocks: Any) -> None:
            held.append(store.stats().leases)
            super().load(mark, blocks)
            held.append(store.stats().leases)

    with Toy(tmp_path, store, mover=Watching).start() as engine:
        engine.run("cold", prompt(161))
        engine.forget()
        engine.run("warm", prompt(161))
        engine.settled()
    assert held
    assert all(held)
