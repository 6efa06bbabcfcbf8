"""Loads that fail, stores that are gone: every request still gets the right answer."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm.meddled import Meddled, drop_blocks
from tests.engines.vllm.toy import Toy, prompt, toy_store
from tests.store.support import FaultyTier, disk, drop_ram, eventually

from tiercel.engines.vllm import asker, scheduler
from tiercel.engines.vllm.asker import Ask
from tiercel.engines.vllm.jobs import LoadJob, Step
from tiercel.engines.vllm.mover import CpuMover
from tiercel.engines.vllm.worker import WorkerSide
from tiercel.store import Choice, Hit, LaneOptions, PrefillCost, Prompt, TieredStore


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


@pytest.mark.parametrize(("read_s", "whole"), [(20.0, False), (0.05, True)], ids=["hangs", "slow"])
def test_a_tier_that_turned_slow_is_waited_for_only_while_it_beats_computing(
    tmp_path: Path, read_s: float, whole: bool
) -> None:
    """D36: the load was expected to take 50 ms, computing 0.8 s; the deadline is far away."""
    (tmp_path / "disk").mkdir()
    tier = FaultyTier(disk(tmp_path / "disk"))
    store = toy_store((tier, LaneOptions(cap_bytes=1 << 30, deadline_s=60)))
    with Toy(tmp_path, store, extra={"store.load_deadline": "20s"}).start() as engine:
        engine.connector._scheduler.side._pace.prompt = lambda tokens, size: Prompt(
            tokens, size, PrefillCost(token_s=0.005)
        )
        tokens = prompt(161)
        engine.run("cold", tokens, 4)
        engine.forget()
        assert store.flush(10)
        drop_ram(store)
        release = threading.Event()

        def late(keys: Any, records: Any) -> Any:
            release.wait(read_s)
            return tier.inner.read(keys, records)

        tier.faults["read"] = late
        started_s = time.monotonic()
        request = engine.run("warm", tokens, 4)
        took_s = time.monotonic() - started_s
        release.set()
        assert tier.fired > 0
        assert took_s < 10
        assert (engine.cached(request) == 160, engine.stats.get("loads_failed", 0)) == (whole, not whole)
        engine.settled()


def test_what_vllm_has_of_a_prompt_is_no_reason_to_wait_for_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D36: the load of a prompt's second half has to beat computing that half, not all of it."""
    (tmp_path / "disk").mkdir()
    store = toy_store((disk(tmp_path / "disk"), LaneOptions(cap_bytes=1 << 30)))
    jobs: list[LoadJob] = []
    load = WorkerSide.load

    def noted(side: WorkerSide, step: Step) -> None:
        jobs.extend(step.loads)
        load(side, step)

    monkeypatch.setattr(WorkerSide, "load", noted)
    cost = PrefillCost(token_s=0.005)
    with Toy(tmp_path, store).start() as engine:
        side = engine.connector._scheduler.side
        side._pace.prompt = lambda tokens, size: Prompt(tokens, size, cost)
        chosen: list[Choice] = []
        patience = side._patience

        def seen(ask: Ask, local: int, tokens: int) -> tuple[float, float]:
            assert ask.hit is not None
            assert ask.hit.choice is not None
            chosen.append(ask.hit.choice)
            return patience(ask, local, tokens)

        side._patience = seen
        tokens = prompt(161)
        engine.run("cold", tokens, 4)
        engine.forget()
        for name, length in (("half", 81), ("warm", 161)):
            assert store.flush(10)
            drop_ram(store)
            engine.run(name, tokens[:length], 4)
        assert [(job.start, job.stop) for job in jobs] == [(0, 5), (5, 10)]
        assert [job.compute_s for job in jobs] == pytest.approx([80 * 0.005] * 2)
        whole, half = chosen
        assert jobs[0].patience_s == pytest.approx(whole.patience_s)
        assert half.blocks == 10, "it was asked for all of the prompt"
        rest = replace(half, load_s=half.load_s / 2, recompute_s=cost.seconds(81, 80))
        assert jobs[1].patience_s == pytest.approx(rest.patience_s)
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
