"""Tiers under examination: directories, disks, servers; verdicts where they fire; that nothing is left."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.doctor.support import config, disk, looked, of, verdicts
from tests.servers.proxy import BlackHole, Corrupt, Delay, FaultProxy, swallowing_port
from tests.servers.valkey import ValkeyServer

from tiercel.config import Config, TierConfig
from tiercel.doctor import Finding, Verdict, access
from tiercel.doctor import speed as speed_module
from tiercel.doctor.patient import Patient
from tiercel.doctor.self_test import self_test
from tiercel.testing.records import chain, record
from tiercel.tiers import Fate, FilesTier, Outcome, transfer

ROOT = Path(__file__).parents[2]
STRANGER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user, or mounting, needs root")


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# Directories.


def test_a_good_directory_passes_and_is_left_as_it_was(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    held = chain(2)
    FilesTier(cache).write([held.keys[0]], [record(held)])
    before = everything(tmp_path)
    checks = looked(disk(cache))
    found = verdicts(checks, "tier disk")
    assert {name: found[name] for name in ("directory", "room", "opens", "clock", "self-test")} == {
        "directory": "ok", "room": "ok", "opens": "ok", "clock": "ok", "self-test": "ok",
    }  # fmt: skip
    # A busy machine's disk may well be called slow.
    assert found["speed"] in ("ok", "warn")
    assert found["break-even"] == "skip"
    speed = of(checks, "tier disk")["speed"]
    assert speed.unit == "bytes/s"
    assert speed.value is not None
    assert 1e6 < speed.value < 1e12
    assert speed.figures["write_bytes_per_s"] > 1e6
    assert everything(tmp_path) == before


def test_a_directory_that_is_not_there_is_measured_beside_and_not_made(tmp_path: Path) -> None:
    checks = looked(disk(tmp_path / "a" / "cache"))
    found = of(checks, "tier disk")
    assert found["self-test"].verdict is Verdict.OK
    assert f"will be made in {tmp_path}" in found["directory"].said
    assert everything(tmp_path) == []


def test_quick_writes_nothing_and_measures_nothing(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    found = verdicts(looked(disk(cache), quick=True), "tier disk")
    assert found == {"directory": "ok", "room": "ok"}
    assert everything(tmp_path) == ["cache"]


def test_a_directory_of_other_things_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    found = of(looked(disk(tmp_path)), "tier disk")
    assert found["opens"].verdict is Verdict.FAIL
    assert "not a Tiercel cache" in found["opens"].said
    assert "speed" not in found
    assert everything(tmp_path) == ["thesis.txt"]


def test_a_directory_that_anybody_may_write_is_warned_of(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    FilesTier(cache)
    assert access.tier_directory(TierConfig(path=cache)).verdict is Verdict.OK
    cache.chmod(0o777)
    finding = access.tier_directory(TierConfig(path=cache))
    assert finding.verdict is Verdict.WARN
    assert f"chmod o-w {cache}" in finding.advice


def test_a_file_in_place_of_the_directory_fails(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("mine")
    assert verdicts(looked(disk(tmp_path / "cache"), quick=True), "tier disk")["directory"] == "fail"
    assert verdicts(looked(disk(tmp_path / "other"), quick=True), "tier disk")["directory"] == "ok"


@as_root
def test_a_directory_of_another_user_fails_for_who_cannot_write_there(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if "pytest" in folder.name or folder == tmp_path:
            folder.chmod(0o755)
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o755)
    for folder in cache.parents:
        if not folder.stat().st_mode & 0o001:
            pytest.skip(f"needs a temporary directory that other users can enter, which {folder} is not")
    script = f"""
    import os, sys
    sys.path[:0] = [{str(ROOT / "src")!r}, {str(ROOT)!r}]
    from pathlib import Path
    from tests.doctor.support import disk, looked, verdicts
    from tiercel.doctor import software
    # What is installed may lie where only this user reads.
    software.requires, software.version = lambda name: [], lambda name: "0"
    os.setgroups([])
    os.setgid({STRANGER})
    os.setuid({STRANGER})
    print(verdicts(looked(disk(Path({str(cache)!r}))), "tier disk"))
    """

    def told() -> str:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert told() == "{'directory': 'fail', 'room': 'ok', 'opens': 'fail'}"
    os.chown(cache, STRANGER, STRANGER)
    assert "'directory': 'ok'" in told()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A memory file system of 8 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tiercel-test", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs a small file system of its own; mounting one: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@as_root
def test_a_disk_smaller_than_the_cap_is_warned_of_and_a_full_one_fails(mounted: Path) -> None:
    small = config(tiers__0__path=str(mounted / "cache"), tiers__0__size="4MiB")
    large = config(tiers__0__path=str(mounted / "cache"), tiers__0__size="64MiB")
    assert verdicts(looked(small, quick=True), "tier disk")["room"] == "ok"
    finding = of(looked(large, quick=True), "tier disk")["room"]
    assert finding.verdict is Verdict.WARN
    assert "set size to 7.9 MiB or less" in finding.advice
    with (mounted / "other").open("wb") as file:
        file.write(bytes((8 << 20) - 4096))
    checks = looked(small)
    assert of(checks, "tier disk")["room"].verdict is Verdict.FAIL
    assert of(checks, "tier disk")["speed"].verdict is Verdict.FAIL or "opens" in verdicts(
        checks, "tier disk"
    )
    assert everything(mounted) == ["other"]


@as_root
def test_a_read_only_disk_fails(mounted: Path) -> None:
    cache = mounted / "cache"
    FilesTier(cache)
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    found = of(looked(disk(cache)), "tier disk")
    assert found["directory"].verdict is Verdict.FAIL
    assert "read-only" in found["directory"].said
    assert found["opens"].verdict is Verdict.FAIL


def test_what_lies_there_counts_as_room(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    held = chain(3)
    tier = FilesTier(cache)
    tier.write(list(held.keys), [record(held, index) for index in range(3)])
    assert access.held_bytes(cache) == sum(one.record_bytes for one in tier.scan()) > 0
    assert access.held_bytes(tmp_path) == 0
    seen = os.statvfs(tmp_path)
    free = seen.f_bavail * seen.f_frsize
    wide = TierConfig(path=cache, size_bytes=free + (1 << 30))
    assert access.room(wide, 0).verdict is Verdict.WARN
    assert access.room(wide, 1 << 34).verdict is Verdict.OK
    assert access.room(wide, None).verdict is Verdict.SKIP


def test_direct_io_that_is_refused_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(looked(disk(tmp_path / "a")), "tier disk")["direct I/O"] in ("ok", "warn")
    monkeypatch.setattr(transfer, "_O_DIRECT", 0)
    found = verdicts(looked(disk(tmp_path / "b")), "tier disk")
    assert (found["direct I/O"], found["speed"], found["self-test"]) == ("warn", "ok", "ok")


def test_files_dated_by_another_clock_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ahead:
        def __getattr__(self, name: str) -> object:
            return getattr(time, name)

        def time(self) -> float:
            return time.time() + 7200

    monkeypatch.setattr(speed_module, "time", Ahead())
    finding = of(looked(disk(tmp_path / "a")), "tier disk")["clock"]
    assert finding.verdict is Verdict.WARN
    assert "behind" in finding.said


def test_a_slow_place_is_warned_of(tmp_path: Path) -> None:
    speed = speed_module.Speed(2 << 20, 5e8, 5e8, 0.004, 0.004, cached=False)
    assert speed_module.told(speed).verdict is Verdict.OK
    slow = speed_module.Speed(2 << 20, 5e8, 5e7, 0.04, 0.04, cached=False)
    assert speed_module.told(slow).verdict is Verdict.WARN


def test_a_place_that_hangs_fails_in_time_and_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    hung = []

    def hang(self: FilesTier, keys: object, records: object) -> list[object]:
        hung.append(1)
        released.wait(60)
        return []

    monkeypatch.setattr(FilesTier, "write", hang)
    began_s = time.monotonic()
    found = of(looked(disk(tmp_path / "cache"), deadline_s=0.5), "tier disk")
    assert hung
    assert found["speed"].verdict is Verdict.FAIL
    assert found["speed"].said == "no answer within 0.5 s"
    assert found["self-test"].verdict is Verdict.SKIP
    assert time.monotonic() - began_s < 20
    released.set()


def test_bytes_that_come_back_wrong_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, spoilt = FilesTier.read, []

    def rot(self: FilesTier, keys: list[bytes], records: list[memoryview]) -> object:
        outcomes = read(self, keys, records)  # type: ignore[arg-type]
        records[0][-1] ^= 1
        spoilt.append(1)
        return outcomes

    monkeypatch.setattr(FilesTier, "read", rot)
    finding = of(looked(disk(tmp_path / "cache")), "tier disk")["speed"]
    assert spoilt
    assert finding.verdict is Verdict.FAIL
    assert "other bytes came back" in finding.said


def test_the_self_test_finds_what_is_lost_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def examined() -> Verdict:
        made = disk(tmp_path / "cache")
        patient = Patient(made.tiers[0], "disk", made)
        patient.open()
        try:
            return self_test(patient, 2.0).verdict
        finally:
            patient.close()

    assert examined() is Verdict.OK
    with monkeypatch.context() as patched:
        # Says that it has what it has not: what is deleted must be gone.
        patched.setattr(FilesTier, "contains", lambda self, keys: [True] * len(keys))
        assert examined() is Verdict.FAIL
    with monkeypatch.context() as patched:
        patched.setattr(FilesTier, "read", lambda self, keys, records: [failed()] * len(keys))
        assert examined() is Verdict.FAIL


def failed() -> Outcome:
    return Outcome(Fate.FAILED, "Input/output error")


def test_a_tier_that_is_never_written_is_not_written_to(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    FilesTier(cache)
    found = verdicts(looked(disk(cache, tiers__0__write="off")), "tier disk")
    assert (found["opens"], found["self-test"]) == ("ok", "skip")
    assert everything(cache) == ["FORMAT"]


# Keys.


def test_keys_in_a_file_that_others_can_read_are_warned_of(tmp_path: Path) -> None:
    key = tmp_path / "key"
    secret = base64.b64encode(bytes(range(32))).decode()
    key.write_text(secret)
    key.chmod(0o600)
    good = looked(disk(tmp_path / "a", tiers__0__encrypt=f"file:{key}"))
    assert verdicts(good, "tier disk") | {"direct I/O": "?"} == {
        "directory": "ok", "room": "ok", "key": "ok", "opens": "ok", "direct I/O": "?", "clock": "ok",
        "speed": "ok", "self-test": "ok", "break-even": "skip",
    }  # fmt: skip
    key.chmod(0o644)
    bad = looked(disk(tmp_path / "a", tiers__0__encrypt=f"file:{key}"), quick=True)
    assert verdicts(bad, "tier disk")["key"] == "warn"
    missing = looked(disk(tmp_path / "a", tiers__0__encrypt=f"file:{key}.no"), quick=True)
    assert verdicts(missing, "tier disk")["key"] == "fail"
    assert secret not in str(good + bad + missing)


# Servers.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as running:
        yield running


def valkey(port: int, **settings: str) -> Config:
    return config(tiers__0__kind="valkey", tiers__0__url=f"valkey://127.0.0.1:{port}", **settings)


def test_a_server_passes_and_keeps_nothing(server: ValkeyServer) -> None:
    before = server.names()
    checks = looked(valkey(server.port))
    assert verdicts(checks, "tier valkey") == {
        "opens": "ok", "round trip": "ok", "speed": "ok", "self-test": "ok", "break-even": "skip",
    }  # fmt: skip
    trip = of(checks, "tier valkey")["round trip"]
    assert trip.unit == "s"
    assert trip.value is not None
    assert 0 < trip.value < 0.05
    assert server.names() == before


def test_a_server_further_than_a_lookup_waits_is_warned_of(server: ValkeyServer) -> None:
    def trip(port: int) -> Finding:
        made = valkey(port)
        patient = Patient(made.tiers[0], "valkey", made)
        patient.open()
        try:
            return speed_module.round_trip(patient)
        finally:
            patient.close()

    with FaultProxy("127.0.0.1", server.port) as proxy:
        assert trip(proxy.port).verdict is Verdict.OK
        proxy.set(down=Delay(0.06))
        far = trip(proxy.port)
        assert proxy.fired
    assert far.verdict is Verdict.WARN
    assert "lookups wait 50 ms" in far.advice


def test_a_server_that_is_not_there_fails_in_one_line() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        found = of(looked(valkey(nobody.getsockname()[1])), "tier valkey")
    assert list(found) == ["opens"]
    assert found["opens"].verdict is Verdict.FAIL


def test_a_server_that_swallows_connections_fails_in_time() -> None:
    with swallowing_port() as port:
        began_s = time.monotonic()
        made = valkey(port, tiers__0__deadline="60s")
        found = of(looked(made, deadline_s=0.5, quick=True), "tier valkey")
        assert time.monotonic() - began_s < 15
    assert found["opens"].said == "no answer within 0.5 s"


def test_a_server_that_stops_answering_fails_and_the_rest_is_skipped(server: ValkeyServer) -> None:
    with FaultProxy("127.0.0.1", server.port) as proxy:
        proxy.set(up=BlackHole(after_bytes=400_000))
        found = of(looked(valkey(proxy.port), deadline_s=0.7), "tier valkey")
        assert proxy.fired
        proxy.heal()
    assert found["round trip"].verdict is Verdict.OK
    assert found["speed"].verdict is Verdict.FAIL
    assert found["self-test"].verdict is Verdict.SKIP


def test_a_wire_that_flips_bits_is_found(server: ValkeyServer) -> None:
    with FaultProxy("127.0.0.1", server.port) as proxy:
        proxy.set(down=Corrupt(at_byte=100_000))
        found = of(looked(valkey(proxy.port)), "tier valkey")
        assert proxy.fired
    assert found["speed"].verdict is Verdict.FAIL


def test_a_password_in_a_url_is_nowhere_shown(server: ValkeyServer) -> None:
    url = f"valkey://user:hunter2@127.0.0.1:{server.port}?prefix=x:"
    checks = looked(config(tiers__0__kind="valkey", tiers__0__url=url), quick=True)
    assert verdicts(checks, "tier valkey") == {"opens": "fail"}
    assert "hunter2" not in str(checks)
    assert "***" in checks[-1].group


# Memory.


def test_a_tier_in_memory_is_tried_and_its_size_counts_for_the_host() -> None:
    made = config(tiers__0__kind="memory", tiers__0__size="1GiB", tiers__0__codec="lossless")
    checks = looked(made)
    assert verdicts(checks, "tier memory: 1.0 GiB") == {"opens": "ok", "self-test": "ok"}
    assert "; blocks want 1.0 GiB" in of(checks, "host")["memory"].said
    assert verdicts(looked(made, quick=True), "tier memory") == {"opens": "ok"}
    much = config(tiers__0__kind="memory", tiers__0__size="100TiB")
    failed = of(looked(much), "host")["memory"]
    assert failed.verdict is Verdict.FAIL
    assert "a tier in memory" in failed.advice
