"""The list of faults, through SGLang's door: all is a miss or not kept, in time, and reuse comes back."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engines.sglang.inside.support import Rig, hashes
from tests.service.running import Running
from tests.store.support import eventually

from tiercel.service import client

# A call may take its deadline, the way there and back, and what two busy cores add.
LIMIT_S = 20.0
# A daemon that was away is asked again after a pause of up to 7.5 s.
BACK_S = 60.0


def timed(call: Callable[[], object]) -> tuple[object, float]:
    started_s = time.monotonic()
    return call(), time.monotonic() - started_s


def kept(rig: Rig, keys: list[str]) -> bool:
    """Store pages 0, 1, … under these keys; read them back elsewhere, byte by byte."""
    pages = range(len(keys))
    if not all(rig.backend.batch_set_v1(keys, rig.indices(*pages))):
        return False
    there = [4 + page for page in pages]
    if not all(rig.backend.batch_get_v1(keys, rig.indices(*there))):
        return False
    content = rig.content()
    return [content[page] for page in there] == [content[page] for page in pages]


def test_a_daemon_killed_again_and_again_under_traffic(tmp_path: Path) -> None:
    """Kill -9 during sets and gets: no exception, no wrong byte, no wait without end, and it comes back."""
    chance = random.Random(7)
    socket, disk = tmp_path / "s", tmp_path / "kv"
    daemon = Running(socket, "ram.size=16MiB", disk=disk)
    with Rig(socket) as rig:
        rig.fill()
        source = rig.content()
        prompts = [hashes(2, f"killed {number}") for number in range(8)]
        faults: list[str] = []
        figures = {"sets": 0, "misses": 0, "hits": 0}
        slowest_s = [0.0]
        stop = threading.Event()

        def backup() -> None:
            while not stop.is_set():
                one, took_s = timed(
                    lambda: rig.backend.batch_set_v1(chance.choice(prompts), rig.indices(0, 1))
                )
                slowest_s[0] = max(slowest_s[0], took_s)
                figures["sets"] += one == [True, True]
                time.sleep(0.002)

        def prefetch() -> None:
            while not stop.is_set():
                keys = chance.choice(prompts)
                one, took_s = timed(lambda keys=keys: rig.backend.batch_get_v1(keys, rig.indices(4, 5)))
                slowest_s[0] = max(slowest_s[0], took_s)
                whole = sum(one)  # type: ignore[call-overload]
                figures["hits" if whole == 2 else "misses"] += 1
                content = rig.content()
                if [content[4 + page] for page in range(whole)] != source[:whole]:
                    faults.append("wrong bytes")
                time.sleep(0.002)

        threads = [threading.Thread(target=backup), threading.Thread(target=prefetch)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            time.sleep(chance.uniform(0.2, 0.6))
            with daemon:
                daemon.kill()
            time.sleep(chance.uniform(0.0, 0.3))
            daemon = Running(socket, "ram.size=16MiB", disk=disk)
        with daemon:
            before = figures["hits"]
            assert eventually(lambda: figures["hits"] > before + 3, BACK_S), "reuse is back"
            stop.set()
            for thread in threads:
                thread.join(LIMIT_S)
            assert faults == []
            assert figures["misses"] > 0, "the fault was felt"
            assert slowest_s[0] < LIMIT_S
            assert kept(rig, hashes(2, "after"))


def test_a_daemon_that_hangs_costs_its_deadline_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        Running(tmp_path / "s", "ram.size=16MiB") as daemon,
        Rig(daemon.path, extra={"store.load_deadline": "1s"}) as rig,
    ):
        keys = hashes(2, "hang")
        assert kept(rig, keys)
        monkeypatch.setattr(client, "_GRACE_S", 1.0)
        daemon.signal(signal.SIGSTOP)
        got, took_s = timed(lambda: rig.backend.batch_get_v1(keys, rig.indices(0, 1)))
        assert got == [False] * 2
        assert took_s < LIMIT_S
        for call in (
            lambda: rig.backend.batch_exists(keys) == 0,
            lambda: rig.backend.batch_set_v1(keys, rig.indices(0, 1)) == [False] * 2,
            lambda: rig.backend.get(keys[0]) is None,
        ):
            right, took_s = timed(call)
            assert right
            assert took_s < LIMIT_S
        daemon.signal(signal.SIGCONT)
        assert eventually(lambda: rig.backend.batch_exists(keys) == 2, BACK_S)
        assert eventually(lambda: kept(rig, hashes(2, "hang over")), BACK_S)


def test_a_restarted_daemon_has_what_was_written_down(tmp_path: Path) -> None:
    """D33, D34: RAM is lost, the disk is not; nothing is written anew."""
    keys, disk = hashes(3, "restart"), tmp_path / "kv"
    with Running(tmp_path / "s", "ram.size=16MiB", disk=disk) as daemon, Rig(daemon.path) as rig:
        rig.fill()
        source = rig.content()
        assert kept(rig, keys)
        assert rig.flush()
        daemon.kill()
        assert rig.backend.batch_get_v1(keys, rig.indices(4, 5, 6)) == [False] * 3
        with Running(tmp_path / "s", "ram.size=16MiB", disk=disk):
            assert eventually(lambda: rig.backend.batch_exists(keys) == 3, BACK_S), "the same backend"
            rig.fill(0)
            assert rig.backend.batch_get_v1(keys, rig.indices(4, 5, 6)) == [True] * 3
            assert rig.content()[4:7] == source[:3]
            with Rig(tmp_path / "s") as other:
                assert other.backend.batch_get_v1(keys, other.indices(0, 1, 2)) == [True] * 3
                assert other.content()[:3] == source[:3], "and another engine"
                assert other.stored() == 0


@pytest.mark.parametrize("damage", ["flipped", "cut", "emptied", "swapped", "gone"])
def test_damaged_records_are_misses(tmp_path: Path, damage: str) -> None:
    """D31, D32, D17: the third page is damaged. Two come back, nothing wrong does, and it is stored anew."""
    keys, disk = hashes(4, damage), tmp_path / "kv"
    with Running(tmp_path / "s", "ram.size=16MiB", disk=disk) as daemon, Rig(daemon.path) as rig:
        rig.fill()
        source = rig.content()
        assert rig.backend.batch_set_v1(keys, rig.indices(0, 1, 2, 3)) == [True] * 4
        assert rig.flush()
        files = {key: rig.file_of(disk, key) for key in keys}
        daemon.kill()
        hurt(files[keys[2]], files[keys[3]], damage)
        with Running(tmp_path / "s", "ram.size=16MiB", disk=disk) as again:
            assert eventually(lambda: rig.backend.batch_exists(keys) >= 2, BACK_S)
            rig.fill(0)
            assert rig.backend.batch_get_v1(keys, rig.indices(4, 5, 6, 7)) == [True, True, False, False]
            assert rig.content()[4:6] == source[:2]
            assert not any(rig.content()[6]), "nothing unverified was copied"
            if damage != "gone":
                assert again.status()["stats"]["tiers"][0]["counters"]["corrupt"] >= 1
            rig.fill()
            assert rig.backend.batch_set_v1(keys, rig.indices(0, 1, 2, 3)) == [True] * 4
            assert rig.backend.batch_get_v1(keys, rig.indices(4, 5, 6, 7)) == [True] * 4


def hurt(file: Path, other: Path, damage: str) -> None:
    data = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    elif damage == "swapped":
        file.write_bytes(other.read_bytes())
    else:
        data[5000] ^= 1
        file.write_bytes({"flipped": data, "cut": data[:-4096], "emptied": b""}[damage])


def test_full_places_drop_and_serving_goes_on(tmp_path: Path) -> None:
    """D25, D30: RAM of a few pages and a disk with a cap; old pages go, no call fails for long."""
    disk = tmp_path / "kv"
    with (
        Running(tmp_path / "s", "ram.size=1MiB", disk=disk, disk_size="1MiB") as daemon,
        Rig(daemon.path) as rig,
    ):
        rig.fill()
        many = [hashes(2, f"full {number}") for number in range(300)]
        for keys in many:
            answer, took_s = timed(lambda keys=keys: rig.backend.batch_set_v1(keys, rig.indices(0, 1)))
            assert isinstance(answer, list)
            assert took_s < LIMIT_S
        there = [rig.backend.batch_exists(keys) for keys in many]
        assert 0 < sum(there) < 2 * len(many), "some stayed, some went"
        assert eventually(lambda: kept(rig, hashes(2, "newest")), BACK_S), "RAM waits for the disk"
        size = sum(file.stat().st_size for file in disk.rglob("*") if file.is_file())
        assert size <= (1 << 20) + 64 * rig.page_bytes


def test_a_directory_taken_away_while_running(tmp_path: Path) -> None:
    disk = tmp_path / "kv"
    with Running(tmp_path / "s", "ram.size=1MiB", disk=disk) as daemon, Rig(daemon.path) as rig:
        rig.fill()
        keys = hashes(4, "taken")
        assert rig.backend.batch_set_v1(keys, rig.indices(0, 1, 2, 3)) == [True] * 4
        assert rig.flush()
        shutil.rmtree(disk)
        for number in range(60):
            assert isinstance(rig.backend.batch_set_v1(hashes(2, f"t{number}"), rig.indices(0, 1)), list)
        got = rig.backend.batch_get_v1(keys, rig.indices(4, 5, 6, 7))
        assert len(got) == 4
        content = rig.content()
        assert all(content[4 + at] == content[at] for at in range(sum(got)))
        assert kept(rig, hashes(2, "still"))


def test_what_was_to_be_cleared_while_the_daemon_was_away_is_never_served(tmp_path: Path) -> None:
    """D06: weights changed, the order to forget came at a bad time."""
    keys, disk = hashes(2, "owed"), tmp_path / "kv"
    with Running(tmp_path / "s", "ram.size=16MiB", disk=disk) as daemon, Rig(daemon.path) as rig:
        assert kept(rig, keys)
        assert rig.flush()
        daemon.kill()
        assert rig.backend.clear() is False
        assert rig.backend.batch_set_v1(keys, rig.indices(0, 1)) == [False] * 2
        with Running(tmp_path / "s", "ram.size=16MiB", disk=disk) as again:
            seen: set[int] = set()

            def back() -> bool:
                seen.add(rig.backend.batch_exists(keys))
                return kept(rig, hashes(1, "anew"))

            assert eventually(back, BACK_S)
            assert seen == {0}
            assert again.status()["stats"]["counters"]["cleared"] >= 1, "it was there to be cleared"


def test_out_of_descriptors_is_a_miss(tmp_path: Path) -> None:
    import resource

    with Running(tmp_path / "s", "ram.size=16MiB") as daemon, Rig(daemon.path) as rig:
        keys = hashes(2, "descriptors")
        assert kept(rig, keys)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        held: list[int] = []
        daemon.kill()
        with Running(tmp_path / "s", "ram.size=16MiB"):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
            try:
                while True:
                    try:
                        held.append(os.dup(0))
                    except OSError:
                        break
                assert rig.backend.batch_exists(keys) == 0
                assert rig.backend.batch_set_v1(keys, rig.indices(0, 1)) == [False] * 2
            finally:
                for fd in held:
                    os.close(fd)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert eventually(lambda: kept(rig, hashes(2, "descriptors over")), BACK_S)
