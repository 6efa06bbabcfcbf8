"""Faults of tiers and of the daemon through vLLM's tiering: right answers in time, counted, over again."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm.secondary.toy import FAILED, ROW, Tiered, on_disk, socket_of
from tests.engines.vllm.toy import prompt
from tests.service.running import Running
from tests.store.support import FaultyTier, drop_ram, eventually, raising

from tiercel.blocks import BlockKey
from tiercel.errors import DaemonError
from tiercel.tiers import MISSING, Fate, Outcome

TOKENS, LOADED = 161, 160
WITHIN_S = 20.0

Records = Sequence[memoryview]


def rot(tier: FaultyTier, keys: Sequence[BlockKey], records: Records) -> list[Outcome]:
    """Other bytes: one bit of each record."""
    outcomes = tier.inner.read(keys, records)
    for record in records:
        record[5000] ^= 1
    return outcomes


def short(tier: FaultyTier, keys: Sequence[BlockKey], records: Records) -> list[Outcome]:
    """Fewer bytes: the second half never came."""
    outcomes = tier.inner.read(keys, records)
    for record in records:
        record[6000:] = bytes(len(record) - 6000)
    return outcomes


def others(tier: FaultyTier, keys: Sequence[BlockKey], records: Records) -> list[Outcome]:
    """Another key's bytes, whole and right in themselves."""
    one = next(tier.inner.scan()).key
    other = [
        one if one != key else next(two.key for two in tier.inner.scan() if two.key != key) for key in keys
    ]
    return tier.inner.read(other, records)


def nothing(tier: FaultyTier, keys: Sequence[BlockKey], records: Records) -> list[Outcome]:
    """Says that it exists and has nothing."""
    return [MISSING for _ in keys]


def late(tier: FaultyTier, keys: Sequence[BlockKey], records: Records) -> list[Outcome]:
    """The right answer, after the load's deadline."""
    time.sleep(0.6)
    return tier.inner.read(keys, records)


def dies(tier: FaultyTier, keys: Sequence[BlockKey], records: Records) -> object:
    """Half of the bytes, then no more."""
    tier.inner.read(keys, records)
    for record in records:
        record[: len(record) // 2] = b"\xff" * (len(record) // 2)
    return raising()


READS: dict[str, tuple[Callable[..., object], str]] = {
    "other bytes": (rot, "corrupt"),
    "fewer bytes": (short, "corrupt"),
    "another key's bytes": (others, "corrupt"),
    "says it exists": (nothing, "missing"),
    "late": (late, ""),
    "dies mid-read": (dies, "failed"),
}


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("fault", READS)
def test_a_read_goes_wrong(tmp_path: Path, fault: str, window: int | None) -> None:
    """D17-D19, D32: nothing unverified reaches vLLM, nothing is tried for ever, the next store is used."""
    reading, counter = READS[fault]
    options = {"store.load_deadline": "300ms"} if fault == "late" else {}
    with on_disk(tmp_path / "disk") as (daemon, tier):
        toy = Tiered(tmp_path, window=window, rows=256, tier={**socket_of(daemon), **options})
        with toy.start() as engine:
            tokens = prompt(TOKENS)
            engine.run("cold", tokens, 4)
            forget_all(engine, daemon)
            tier.faults["read"] = lambda keys, records: reading(tier, keys, records)
            started_s, steps = time.monotonic(), engine.steps
            engine.run("warm", tokens, 4)
            assert time.monotonic() - started_s < WITHIN_S
            assert tier.fired > 0
            assert engine.count("loads_failed") > 0
            assert engine.stats[FAILED] > 0
            if counter:
                assert getattr(daemon.inner.stats().tiers[0].counters, counter) > 0
            assert steps < engine.steps
            tier.faults.clear()
            assert comes_back(engine, daemon)
            engine.settled()


@pytest.mark.parametrize("fault", ["hangs", "dies mid-write", "is full", "denies"])
def test_a_write_goes_wrong(tmp_path: Path, fault: str) -> None:
    release = threading.Event()
    full = Outcome(Fate.FULL, "no space left")
    what: dict[str, Callable[..., object]] = {
        "hangs": lambda *_: release.wait(20) and raising(),
        "dies mid-write": raising,
        "is full": lambda keys, records: [full for _ in keys],
        "denies": lambda keys, records: [Outcome(Fate.FAILED, "permission denied") for _ in keys],
    }
    with (
        on_disk(tmp_path / "disk", deadline_s=0.5) as (daemon, tier),
        Tiered(tmp_path, tier=socket_of(daemon)).start() as engine,
    ):
        tier.faults["write"] = what[fault]
        started_s = time.monotonic()
        for number in range(4):
            engine.run(f"r{number}", prompt(TOKENS, number), 4)
        assert time.monotonic() - started_s < WITHIN_S
        assert eventually(lambda: tier.fired > 0)
        # What RAM holds is served all the same.
        engine.lose_rows()
        assert engine.cached(engine.run("ram", prompt(TOKENS, 3), 4)) == LOADED
        release.set()
        tier.faults.clear()
        engine.settled()


def test_a_tier_that_hangs_costs_a_load_its_deadline(tmp_path: Path) -> None:
    release = threading.Event()
    with on_disk(tmp_path / "disk", deadline_s=60.0) as (daemon, tier):
        toy = Tiered(tmp_path, tier={**socket_of(daemon), "store.load_deadline": "300ms"})
        with toy.start() as engine:
            engine.run("cold", prompt(TOKENS), 4)
            forget_all(engine, daemon)
            tier.faults["read"] = lambda *_: release.wait(20) and raising()
            started_s = time.monotonic()
            engine.run("warm", prompt(TOKENS), 4)
            assert time.monotonic() - started_s < WITHIN_S / 4
            assert tier.fired > 0
            # vLLM resets its tiers meanwhile: that, too, waits for the deadline alone.
            assert engine.scheduler.reset_prefix_cache(reset_connector=True)
            release.set()
            engine.settled()


def test_a_place_that_does_not_answer_at_the_start(tmp_path: Path) -> None:
    socket = tmp_path / "s"
    settings = [f"ram.slot={ROW + 4096}B", "tiers.0.kind=valkey", "tiers.0.url=valkey://127.0.0.1:1"]
    with (
        Running(socket, *settings) as daemon,
        Tiered(tmp_path, tier={"daemon.socket": str(socket)}).start() as engine,
    ):
        engine.run("cold", prompt(TOKENS), 4)
        assert reused_again(engine, "warm"), "RAM serves"
        assert "tier" in daemon.log.read_text()
        engine.settled()


def test_no_daemon_at_the_start_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DaemonError, match="tiercel daemon --socket") as refusal:
        Tiered(tmp_path, tier={"daemon.socket": str(tmp_path / "none")}).start()
    assert "\n" not in str(refusal.value)


def test_the_directory_is_removed_while_it_runs(tmp_path: Path) -> None:
    with (
        on_disk(tmp_path / "disk") as (daemon, _),
        Tiered(tmp_path, tier=socket_of(daemon)).start() as engine,
    ):
        engine.run("cold", prompt(TOKENS), 4)
        forget_all(engine, daemon)
        shutil.rmtree(tmp_path / "disk")
        engine.run("warm", prompt(TOKENS), 4)
        assert engine.count("loads_failed") > 0
        (tmp_path / "disk").mkdir(exist_ok=True)
        assert comes_back(engine, daemon)


@pytest.mark.parametrize("hours", [-1, 1])
def test_the_clock_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    with (
        on_disk(tmp_path / "disk") as (daemon, _),
        Tiered(tmp_path, tier=socket_of(daemon)).start() as engine,
    ):
        engine.run("cold", prompt(TOKENS), 4)
        wall_s, wall_ns = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: wall_s() + 3600 * hours)
        monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + 3600 * hours * 10**9)
        forget_all(engine, daemon)
        assert engine.cached(engine.run("warm", prompt(TOKENS), 4)) == LOADED
        engine.run("new", prompt(TOKENS, 1), 4)
        forget_all(engine, daemon)
        assert engine.cached(engine.run("newer", prompt(TOKENS, 1), 4)) == LOADED


def test_one_flipped_byte_at_rest_is_a_miss(tmp_path: Path) -> None:
    """D32, with the control: the same record, whole, hits."""
    with (
        on_disk(tmp_path / "disk") as (daemon, _),
        Tiered(tmp_path, tier=socket_of(daemon)).start() as engine,
    ):
        engine.run("cold", prompt(TOKENS), 4)
        forget_all(engine, daemon)
        assert engine.cached(engine.run("whole", prompt(TOKENS), 4)) == LOADED
        forget_all(engine, daemon)
        flip_a_byte(tmp_path / "disk")
        reused = engine.cached(engine.run("flipped", prompt(TOKENS), 4))
        assert reused < LOADED
        assert daemon.inner.stats().tiers[0].counters.corrupt == 1
        assert comes_back(engine, daemon)


def test_the_daemon_is_killed_during_loads_and_stores(tmp_path: Path) -> None:
    """kill -9, several times: no request hangs or gets a wrong byte; reuse returns with the daemon."""
    socket, disk = tmp_path / "s", tmp_path / "disk"
    disk.mkdir()
    tier = {"daemon.socket": str(socket)}
    settings = [f"ram.slot={ROW + 4096}B"]
    daemon = Running(socket, *settings, disk=disk)
    with Tiered(tmp_path, tier=tier).start() as engine:
        try:
            for turn in range(3):
                for number in range(6):
                    engine.lose_rows()
                    engine.add(f"{turn}.{number}", prompt(TOKENS, number), 4)
                    for _ in range(number):
                        engine.step()
                    if number == 3:
                        daemon.kill()
                    engine.drain()
                    engine.check(f"{turn}.{number}")
                daemon.__exit__()
                daemon = Running(socket, *settings, disk=disk)
            assert eventually(lambda: reused_again(engine, "back"))
            engine.settled()
        finally:
            daemon.__exit__()


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_in_whatever_order(tmp_path: Path, seed: int, window: int | None) -> None:
    """Many requests at once with prefixes in common, a CPU tier too small, aborts, evictions, bad reads."""
    chance = random.Random(seed)
    with (
        on_disk(tmp_path / "disk", cap_bytes=1 << 20) as (daemon, tier),
        Tiered(tmp_path, rows=48, window=window, blocks=97, tier=socket_of(daemon)).start() as engine,
    ):
        live: list[str] = []
        for number in range(60):
            name, length = f"r{number}", chance.randrange(20, 400)
            engine.add(name, prompt(length, chance.randrange(6), shared=chance.choice((0, 64, 160))), 3)
            live.append(name)
            for _ in range(chance.randrange(6)):
                engine.step()
            what = chance.randrange(12)
            if what == 0:
                gone = chance.choice(live)
                if gone not in engine.finished:
                    engine.abort(gone)
            elif what == 1:
                drop_ram(daemon.inner)
            elif what == 2:
                tier.faults["read"] = lambda keys, records: rot(tier, keys, records)
            elif what in (3, 4):
                tier.faults.clear()
            elif what == 5:
                engine.forget()
        engine.drain()
        for name in live:
            assert name in engine.finished
            engine.check(name)
        assert engine.count("loaded_chunks") > 0
        tier.faults.clear()
        engine.settled()


def test_there_is_no_daemon_at_all_for_a_while(tmp_path: Path) -> None:
    socket, tier = tmp_path / "s", {"daemon.socket": str(tmp_path / "s")}
    with Running(socket, f"ram.slot={ROW + 4096}B") as daemon, Tiered(tmp_path, tier=tier).start() as engine:
        engine.run("stored", prompt(TOKENS), 1)
        daemon.kill()
        for number in range(5):
            engine.lose_rows()
            assert engine.cached(engine.run(f"away{number}", prompt(TOKENS), 1)) == 0
        # vLLM is told of stores that went nowhere.
        assert engine.stats["vllm:kv_offload_tiering_cascade_job_failures"] > 0
        with Running(socket, f"ram.slot={ROW + 4096}B"):
            assert eventually(lambda: reused_again(engine, "back"))
            engine.settled()


def test_d10_a_pickle_in_the_directory_is_no_record(tmp_path: Path) -> None:
    class Planted:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'executed'}",)

    with (
        on_disk(tmp_path / "disk") as (daemon, _),
        Tiered(tmp_path, tier=socket_of(daemon)).start() as engine,
    ):
        engine.run("cold", prompt(TOKENS), 1)
        forget_all(engine, daemon)
        for path in (tmp_path / "disk").rglob("*.kv"):
            path.write_bytes(pickle.dumps(Planted()).ljust(path.stat().st_size, b"\0"))
        assert engine.cached(engine.run("warm", prompt(TOKENS), 1)) == 0
        assert not (tmp_path / "executed").exists()


def forget_all(engine: Any, daemon: Any) -> None:
    """Leave the prompt in the lowest tier alone."""
    engine.lose_rows()
    assert daemon.inner.flush(10)
    drop_ram(daemon.inner)


def comes_back(engine: Any, daemon: Any) -> bool:
    """Whether what was computed anew is stored anew, with one of the next requests."""

    def again() -> bool:
        engine.lose_rows()
        name = f"again{engine.steps}"
        return bool(engine.cached(engine.run(name, prompt(TOKENS), 4)) == LOADED)

    return eventually(again)


def reused_again(engine: Any, name: str) -> bool:
    engine.lose_rows()
    time.sleep(0.05)
    return bool(engine.cached(engine.run(f"{name}{engine.steps}", prompt(TOKENS), 1)) == LOADED)


def flip_a_byte(folder: Path) -> None:
    path = max(folder.rglob("*.kv"))
    at = path.stat().st_size // 2 + 1000
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0xFF]))
