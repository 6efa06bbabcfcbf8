"""A tier in memory below RAM: what RAM lets go of, within its size, for as long as the store runs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.store.support import (
    PAYLOAD,
    RECORD,
    FaultyTier,
    assert_nothing_leaked,
    chain,
    disk,
    eventually,
    get,
    make_store,
    put,
)

from tiercel.config import Config
from tiercel.errors import MemoryLimitError
from tiercel.memory import MemoryLimit, host_limit
from tiercel.service import Daemon, connect
from tiercel.service.client import RemoteStore
from tiercel.store import LaneOptions, TieredStore, WriteMode, open_store
from tiercel.tiers import FilesTier
from tiercel.tiers.memory import MemoryTier

OWN = LaneOptions(write=WriteMode.ON_EVICT, own_memory=True, cap_bytes=64 * RECORD)
BIG = 1 << 20


def settings(ram: str = "32MiB", size: str = "16MiB", **more: str) -> Config:
    given = {"ram.size": ram, "tiers.0.kind": "memory", "tiers.0.size": size, "store.load": "always"}
    return Config.load(environ={}, overrides=given | {k.replace("__", "."): v for k, v in more.items()})


def written(store: TieredStore) -> int:
    return store.stats().tiers[0].counters.written_blocks


def test_what_ram_lets_go_of_is_found_there_and_nothing_before() -> None:
    with make_store((MemoryTier(64 * RECORD), OWN)) as store:
        assert put(store, chain(6)) == 6
        assert written(store) == 0, "what RAM has need not be in memory twice"
        for seed in range(1, 5):
            assert put(store, chain(6, seed=seed)) == 6
        assert get(store, chain(6)) == ["memory"] * 6
        assert eventually(lambda: get(store, chain(6)) == ["ram"] * 6), "once RAM has let go of others"
        assert_nothing_leaked(store)
        assert store.stats().tiers[0].counters.failed == 0


@pytest.mark.parametrize("codec", ["none", "lossless"])
def test_it_is_filled_to_its_size_and_never_says_that_it_is_full(codec: str) -> None:
    with open_store(settings(ram="12MiB", size="9MiB", tiers__0__codec=codec), BIG) as store:
        payload = np.tile(np.arange(BIG // 64, dtype=np.uint16) % 251, 32).tobytes()
        for seed in range(12):
            for at in range(4):
                with store.begin_store(chain(4, seed), at, at + 1, BIG, 5.0) as lease:
                    for block in lease:
                        block.payload[:] = payload
                    lease.commit()
        assert eventually(lambda: not store.stats().tiers[0].pending_writes)
        tier = store.stats().tiers[0]
        assert tier.counters.full == tier.counters.failed == tier.counters.writes_dropped == 0
        assert tier.used_bytes <= 9 << 20
        assert tier.blocks == 8 if codec == "none" else tier.blocks > 12
        inner = store.below.traffic[0].lane.tier
        assert tier.used_bytes == sum(one.record_bytes for one in inner.scan())
        assert store.counters.stores_skipped == 0


def test_nobody_is_asked_for_what_the_index_does_not_know(tmp_path: Path) -> None:
    inner, other = FaultyTier(MemoryTier(64 * RECORD)), FaultyTier(disk(tmp_path / "disk"))
    with make_store((inner, OWN), (other, LaneOptions())) as store:
        assert store.lookup(chain(3), 0.5).blocks == 0
        assert inner.calls.count("contains") == 0
        assert other.calls.count("contains") > 0, "the control"


def test_the_end_writes_down_what_lasts_and_nothing_else(tmp_path: Path) -> None:
    own = FaultyTier(MemoryTier(64 * RECORD))
    files = disk(tmp_path / "disk")
    store = make_store((own, OWN), (files, LaneOptions(write=WriteMode.ON_EVICT)))
    assert put(store, chain(6)) == 6
    assert store.flush(20)
    assert files.contains(chain(6).keys) == [True] * 6
    assert store.close(20)
    assert "write" not in own.calls


def test_a_writer_that_is_busy_holds_no_end_up() -> None:
    own, go_on = FaultyTier(MemoryTier(64 * RECORD)), threading.Event()
    own.faults["write"] = lambda *_: go_on.wait(20)
    store = make_store((own, OWN), slots=16)
    for seed in range(3):
        put(store, chain(5, seed=seed), deadline_s=0.1)
    assert eventually(lambda: own.calls.count("write") > 0)
    began_s = time.monotonic()
    assert store.flush(10)
    assert time.monotonic() - began_s < 5
    go_on.set()
    assert store.close(10)


def test_a_prompt_put_away_lies_there_and_comes_back() -> None:
    with make_store((MemoryTier(64 * RECORD), OWN)) as store:
        put(store, chain(4))
        assert store.demote(chain(4), 10) == 4
        assert get(store, chain(4)) == ["memory"] * 4
        assert store.drop(chain(4)) == 4
        assert store.lookup(chain(4)).blocks == 0
        put(store, chain(4))
        store.demote(chain(4), 10)
        assert store.clear() == 4
        inner = store.below.traffic[0].lane.tier
        assert list(inner.scan()) == []


# Limits.


def test_two_that_fit_alone_and_not_together_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tiercel.memory.slab.host_limit", lambda: MemoryLimit(40 << 20, "this test"))
    open_store(settings(ram="24MiB", size="16MiB"), BIG).close()
    with pytest.raises(
        MemoryLimitError, match="RAM with tiers of kind memory of 42991616 bytes does not"
    ) as refused:
        open_store(settings(ram="24MiB", size="17MiB"), BIG)
    assert "\n" not in str(refused.value)


def test_what_was_opened_is_closed_when_it_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(FilesTier, "close", lambda self: closed.append(self.name))
    more = {"tiers.1.kind": "memory", "tiers.1.size": f"{host_limit().available_bytes * 2}B"}
    first = {"tiers.0.path": str(tmp_path / "disk"), "tiers.0.size": "64MiB", "ram.size": "16MiB"}
    config = Config.load(environ={}, overrides=first | more)
    monkeypatch.setattr("tiercel.store.build.check_host", lambda *_: None)
    with pytest.raises(MemoryLimitError, match="tier memory of"):
        open_store(config, BIG)
    assert closed == ["disk"]


MEASURED = """
    import gc, sys
    from pathlib import Path
    import numpy as np
    from tests.store.support import chain
    from tiercel.config import Config
    from tiercel.store import open_store

    def now(what):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))

    given = {"ram.size": "32MiB", "tiers.0.kind": "memory", "tiers.0.size": "64MiB",
             "tiers.0.codec": "lossless"}
    config = Config.load(environ={}, overrides=given)
    chance = np.random.default_rng(1)
    def payload():
        return (chance.standard_normal(1 << 19).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    made = [payload() for _ in range(4)]
    made[0].tobytes()
    before = now("VmRSS")
    with open_store(config, 1 << 20) as store:
        for seed in range(60):
            with store.begin_store(chain(4, seed), 0, 4, 1 << 20, 20.0) as lease:
                for block in lease:
                    np.frombuffer(block.payload, np.uint16)[:] = made[block.index]
                lease.commit()
        held = store.stats().tiers[0]
        most = now("VmHWM")
    gc.collect()
    print(before, most, now("VmRSS"), held.blocks, held.used_bytes)
"""


def test_memory_is_bounded_by_both_sizes_and_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURED)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, most, after, blocks, used = map(int, done.stdout.split())
    mib = 1 << 20
    assert blocks > 70, "the control: more blocks than so much memory holds plain"
    assert 60 * mib < used <= 64 * mib
    assert 80 * mib < most - before < (32 + 64 + 40) * mib
    assert after - before < 40 * mib


# In a daemon.


@contextmanager
def served(path: Path) -> Iterator[RemoteStore]:
    """A daemon with a tier in memory, and a first engine."""
    config = settings(ram="1MiB", size="2MiB", daemon__socket=str(path))
    daemon = Daemon(config, path)
    thread = threading.Thread(target=daemon.run, daemon=True)
    thread.start()
    with connect(config, PAYLOAD) as store:
        yield store
    daemon.stop()
    thread.join(20)
    daemon.close()


def test_engines_of_a_daemon_share_it_and_a_new_daemon_begins_with_none(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with served(path) as store:
        put(store, chain(4))  # type: ignore[arg-type]  # (it has the same calls)
        assert store.demote(chain(4), 10) == 4
        with connect(settings(daemon__socket=str(path)), PAYLOAD) as other:
            assert get(other, chain(4)) == ["memory"] * 4  # type: ignore[arg-type]
    with served(path) as store:
        assert store.lookup(chain(4), 0.5).blocks == 0


# The same idea on a file system in memory.


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this host has no /dev/shm")
def test_files_in_shared_memory_take_a_codec_and_survive() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tiercel-test-") as folder:
        given = {
            "ram.size": "8MiB", "tiers.0.path": f"{folder}/kv", "tiers.0.size": "8MiB",
            "tiers.0.codec": "lossless", "store.load": "always",
        }  # fmt: skip
        config = Config.load(environ={}, overrides=given)
        payload = np.tile(np.arange(BIG // 64, dtype=np.uint16) % 251, 32).tobytes()
        with open_store(config, BIG) as store, store.begin_store(chain(2), 0, 2, BIG, 5.0) as lease:
            for block in lease:
                block.payload[:] = payload
            lease.commit()
        with open_store(config, BIG) as store:
            assert store.scanned(10)
            with store.acquire(chain(2), 10) as reading:
                assert [(bytes(one.payload) == payload, one.source) for one in reading] == [
                    (True, "disk")
                ] * 2
            stats = store.stats().tiers[0]
            assert stats.counters.failed == stats.counters.corrupt == 0
            assert stats.used_bytes < 2 * BIG
