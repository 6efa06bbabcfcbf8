"""Real processes killed, hung and left: no call raises or waits without end, no byte is wrong, no leak."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.service.running import Running, Script
from tests.service.traffic import BLOCKS, DEADLINE_S, PROMPTS
from tests.store.support import PAYLOAD, chain, eventually, get, put

from tiercel.service import RemoteStore

# A call may take its deadline, the way there and back, and what two busy cores add.
LIMIT_S = DEADLINE_S + 8.0
TRAFFIC = "import runpy, sys; runpy.run_module('tests.service.traffic', run_name='__main__', alter_sys=True)"


@pytest.fixture
def socket_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("d") / "s"


def traffic(path: Path, number: int) -> Script:
    one = Script(TRAFFIC, str(path), str(number))
    assert one.line() == "ready"
    return one


def seen_by(client: Script) -> dict[str, Any]:
    client.go()
    seen = dict(json.loads(client.line()))
    assert client.process.wait(30) == 0
    return seen


def settled(daemon: Running) -> Callable[[], bool]:
    """No lease, and every slot is free or holds a block."""

    def check() -> bool:
        stats = daemon.status()["stats"]
        return bool(stats["leases"] == 0 and stats["slots_free"] + stats["ram_blocks"] == stats["slots"])

    return check


def test_killed_again_and_again_under_traffic(socket_path: Path, tmp_path: Path) -> None:
    """Before, during and after loads and stores: three processes never stop, the daemon dies four times."""
    chance = random.Random(7)
    small = {"disk": tmp_path / "kv", "disk_size": "2MiB"}
    daemon = Running(socket_path, **small)
    with ExitStack() as stack:
        clients = [stack.enter_context(traffic(socket_path, number)) for number in range(3)]
        for _ in range(4):
            time.sleep(chance.uniform(0.1, 0.8))
            with daemon:
                daemon.kill()
            time.sleep(chance.uniform(0.0, 0.6))
            daemon = Running(socket_path, **small)
        stack.enter_context(daemon)
        assert eventually(lambda: daemon.status()["clients"] > 3), "they come back"
        before = daemon.status()["stats"]["counters"]["hit"]
        assert eventually(lambda: daemon.status()["stats"]["counters"]["hit"] > before)
        results = [seen_by(client) for client in clients]
        assert eventually(settled(daemon))
        for seen in results:
            assert seen["faults"] == []
            assert seen["lookups"] > 20
            assert seen["hits"] > 0
            assert seen["slowest_s"] < LIMIT_S
        assert all(seen["stored"] > 0 for seen in results)
        with daemon.connect() as store:
            found = [len(get_any(store, chain(BLOCKS, seed))) for seed in range(1, PROMPTS + 1)]
            assert sum(found), "reuse is back"


def get_any(store: RemoteStore, of: Any) -> list[str]:
    return get(store, of, 5.0)  # type: ignore[arg-type]


def test_what_a_killed_daemon_had_written_is_there_for_the_next(socket_path: Path, tmp_path: Path) -> None:
    with Running(socket_path, disk=tmp_path / "kv") as daemon, daemon.connect() as store:
        assert put(store, chain(8)) == 8  # type: ignore[arg-type]
        assert store.flush()
        daemon.kill()
        assert get_any(store, chain(8)) == []
        assert put(store, chain(4, seed=2)) == 0  # type: ignore[arg-type]
        assert not store.up
        with Running(socket_path, disk=tmp_path / "kv"):
            assert eventually(lambda: store.lookup(chain(8)).blocks == 8), "the same client, no restart"
            assert get_any(store, chain(8)) == ["disk"] * 8
            assert put(store, chain(4, seed=2)) == 4  # type: ignore[arg-type]
            assert get_any(store, chain(4, seed=2)) == ["ram"] * 4


@pytest.mark.parametrize("moment", ["reading", "writing"])
def test_killed_in_the_middle_of_a_lease(socket_path: Path, tmp_path: Path, moment: str) -> None:
    """The lease ends early; what it had given out stays readable and writable to the end."""
    with Running(socket_path, disk=tmp_path / "kv") as daemon, daemon.connect() as store:
        assert put(store, chain(8)) == 8  # type: ignore[arg-type]
        started_s = time.monotonic()
        if moment == "reading":
            with store.acquire(chain(8), DEADLINE_S) as reading:
                (first, second) = reading.ready(2)
                daemon.kill()
                assert bytes(second.payload[:32]) == chain(8).keys[1]
                reading.advance(2)
                assert reading.ready(2) == []
                assert bytes(first.payload[:32]) == chain(8).keys[0]
        else:
            with store.begin_store(chain(8, 1), 0, 8, PAYLOAD, DEADLINE_S) as writing:
                (block, *_) = writing.take(3)
                daemon.kill()
                block.payload[:] = b"x" * PAYLOAD
                assert writing.take(3) == []
                assert writing.commit() == 0
        assert time.monotonic() - started_s < LIMIT_S
        assert store.failures > 0


CLIENT = """
import sys, time
from pathlib import Path
from tests.store.support import PAYLOAD, chain
from tiercel.config import Config
from tiercel.service import connect
store = connect(Config.load(None, {}, {"daemon.socket": sys.argv[1]}), PAYLOAD)
reading = store.acquire(chain(8), 60.0)
writing = store.begin_store(chain(16, 1), 0, 16, PAYLOAD, 60.0)
got = reading.ready(3), writing.take(5)
got[1][0].payload[:] = b"half" * (PAYLOAD // 4)
print(len(got[0]), len(got[1]), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_client_that_dies_with_leases_gives_all_back(socket_path: Path, end: int) -> None:
    with Running(socket_path) as daemon, daemon.connect() as store:
        assert put(store, chain(8)) == 8  # type: ignore[arg-type]
        with Script(CLIENT, str(socket_path)) as client:
            assert client.line() == "3 5"
            held = daemon.status()["stats"]
            assert held["leases"] == 2
            client.process.send_signal(end)
            client.process.wait(10)
        assert eventually(settled(daemon))
        after = daemon.status()["stats"]
        assert after["counters"]["stores_aborted"] >= 5
        assert after["slots_free"] == held["slots_free"] + 5
        assert store.lookup(chain(16, 1)).blocks == 0, "half a block is no block"
        assert get_any(store, chain(8)) == ["ram"] * 8
        assert put(store, chain(16, 1)) == 16  # type: ignore[arg-type]
        assert get_any(store, chain(16, 1)) == ["ram"] * 16


def test_a_daemon_that_hangs_costs_a_deadline_once_and_is_used_again_later(socket_path: Path) -> None:
    with Running(socket_path) as daemon, daemon.connect() as store:
        assert put(store, chain(8)) == 8  # type: ignore[arg-type]
        daemon.signal(signal.SIGSTOP)
        took: list[float] = []

        def call() -> None:
            started_s = time.monotonic()
            found = store.lookup(chain(8), 0.05).blocks
            found += len(get_any(store, chain(8)))
            took.append(time.monotonic() - started_s if found == 0 else 1e9)

        threads = [threading.Thread(target=call) for _ in range(8)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert len(took) == 8
        assert max(took) < 5.0 + LIMIT_S
        assert store.failures > 0
        started_s = time.monotonic()
        for _ in range(1000):
            store.lookup(chain(8), 0.05)
        assert time.monotonic() - started_s < LIMIT_S, "while it is known to hang it is left alone"
        daemon.signal(signal.SIGCONT)
        assert eventually(lambda: store.lookup(chain(8)).blocks == 8)
        assert get_any(store, chain(8)) == ["ram"] * 8
        assert eventually(settled(daemon))


def test_sigterm_writes_down_what_disks_should_have(socket_path: Path, tmp_path: Path) -> None:
    lazily = ("tiers.0.write=on-evict",)
    with Running(socket_path, *lazily, disk=tmp_path / "kv") as daemon, daemon.connect() as store:
        for seed in range(4):
            assert put(store, chain(10, seed)) == 10  # type: ignore[arg-type]
        before = daemon.status()["stats"]["tiers"][0]["blocks"]
        assert before < 40, "the control: not all is there yet"
        assert daemon.end() == 0
        assert not socket_path.exists()
        assert get_any(store, chain(10)) == []
    with Running(socket_path, *lazily, disk=tmp_path / "kv") as daemon, daemon.connect() as store:
        for seed in range(4):
            assert eventually(lambda seed=seed: store.lookup(chain(10, seed)).blocks == 10)  # type: ignore[misc]
            assert get_any(store, chain(10, seed)) == ["disk"] * 10


def test_a_second_model_with_smaller_blocks_shares_the_slots(socket_path: Path) -> None:
    with Running(socket_path) as daemon, daemon.connect() as store, daemon.connect(512) as small:
        assert small.slot_payload_bytes == PAYLOAD
        assert put(store, chain(4)) == 4  # type: ignore[arg-type]
        with small.begin_store(chain(4, 1), 0, 4, 512) as writing:
            for block in writing:
                block.payload[:] = bytes(block.payload.nbytes)
                assert block.payload.nbytes == 512
            assert writing.commit() == 4
        with small.acquire(chain(4, 1)) as reading:
            assert [one.payload.nbytes for one in reading] == [512] * 4
        assert get_any(store, chain(4)) == ["ram"] * 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking with threads is what is tested
def test_a_fork_makes_its_own_connections(socket_path: Path) -> None:
    with Running(socket_path) as daemon, daemon.connect() as store:
        assert put(store, chain(4)) == 4  # type: ignore[arg-type]
        child = os.fork()
        if child == 0:
            right = get_any(store, chain(4)) == ["ram"] * 4
            os._exit(0 if right else 1)
        assert get_any(store, chain(4)) == ["ram"] * 4
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert store.failures == 0
