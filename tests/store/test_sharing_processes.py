"""Real processes on one directory: a cap kept together, one killed, never a wrong byte (D30, D31, D33)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.support import RECORD, chain, disk, eventually, file_bytes, get, make_store, mounted, put

from tiercel.store import LaneOptions, TieredStore
from tiercel.store.inspect import CachePlace

CAP = 60 * RECORD
PROCESSES = 3

WORKER = """
import sys, time
from pathlib import Path
import tiercel.store.sharing as sharing
sharing._PAUSE_S = 0.05
from tests.store.test_sharing_processes import work
work(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
"""


def work(root: Path, seed: int, for_s: float) -> None:
    """Store, and read what this and the other processes stored; `get` checks every byte."""
    chosen = random.Random(seed)
    until_s = time.monotonic() + for_s
    hits = stores = 0
    with make_store((disk(root), LaneOptions(cap_bytes=CAP)), slots=24) as store:
        while time.monotonic() < until_s:
            one = chain(chosen.randint(1, 8), seed=chosen.randrange(12))
            if chosen.random() < 0.5:
                hits += get(store, one).count("disk")
            else:
                stores += put(store, one)
        store.flush(10)
        stats = store.stats().tiers[0].counters
        assert stats.corrupt == stats.failed == 0, stats
    print(hits, stores, stats.evicted_blocks, flush=True)


def start(root: Path, seed: int, for_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(root), str(seed), str(for_s)],
        stdout=-1, stderr=-1, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip


def test_several_processes_share_a_directory_and_its_cap_and_one_may_be_killed(tmp_path: Path) -> None:
    workers = [start(tmp_path, seed, 4.0) for seed in range(PROCESSES)]
    victim = start(tmp_path, 99, 60.0)
    try:
        assert eventually(lambda: file_bytes_now(tmp_path) > CAP // 2, 30)
        victim.send_signal(signal.SIGKILL)
        reports = [worker.communicate(timeout=60) for worker in workers]
    finally:
        for one in (*workers, victim):
            one.kill()
            one.communicate()
    assert [worker.returncode for worker in workers] == [0] * PROCESSES, reports
    figures = [tuple(map(int, out.split())) for out, _ in reports]
    assert all(hits and stored and evicted for hits, stored, evicted in figures), figures
    with make_store((disk(tmp_path), LaneOptions(cap_bytes=CAP))) as store:
        assert store.scanned(10)
        assert eventually(lambda: file_bytes(tmp_path) == store.stats().tiers[0].used_bytes <= CAP)
        assert not list(tmp_path.rglob("*.tmp")), "leftovers of the killed one"
    report = CachePlace.directory(tmp_path).verify(repair=False)
    assert report.checked > 0
    assert (report.bad, report.leftovers) == ([], 0)


def test_a_directory_that_stores_use_is_safe_to_look_into_and_to_clear(tmp_path: Path) -> None:
    workers = [start(tmp_path, seed, 4.0) for seed in range(2)]
    try:
        assert eventually(lambda: file_bytes_now(tmp_path) > CAP // 2, 30)
        checked = cleared = 0
        while any(worker.poll() is None for worker in workers):
            place = CachePlace.directory(tmp_path)
            report = place.verify(repair=True)
            assert report.bad == [], "a sound block was taken for a bad one, and deleted"
            checked += report.checked
            rows = place.scopes()
            assert {row.info["model"] for row in rows if row.info} <= {"model-a"}
            if checked > 500 and not cleared:
                cleared, _ = place.clear([row.tag for row in rows])
        reports = [worker.communicate(timeout=60) for worker in workers]
    finally:
        for one in workers:
            one.kill()
            one.communicate()
    assert [worker.returncode for worker in workers] == [0, 0], reports
    assert checked > 500
    assert cleared > 0


def file_bytes_now(root: Path) -> int:
    """As `file_bytes`, while others delete."""
    try:
        return file_bytes(root)
    except FileNotFoundError:
        return 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", "64m") as where:
        yield where


@pytest.mark.parametrize("left_bytes", [0, 300 << 10], ids=["to the last byte", "below what is spared"])
def test_a_disk_that_others_fill_pauses_writing_until_there_is_room_again(
    small_disk: Path, left_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercel.store.lane._FULL_PAUSE_S", 0.05)
    monkeypatch.setattr("tiercel.store.lane._SPARE_CHECK_S", 0.0)

    def stored(store: TieredStore, seed: int) -> bool:
        put(store, chain(4, seed=seed))
        store.flush(5)
        return all(disk(small_disk / "c").contains(list(chain(4, seed=seed).keys)))

    with make_store((disk(small_disk / "c"), LaneOptions()), slots=64) as store:
        assert stored(store, 1)
        seen = os.statvfs(small_disk)
        filler = small_disk / "filler"
        with filler.open("wb") as file:
            file.truncate(0)
            os.posix_fallocate(file.fileno(), 0, seen.f_bavail * seen.f_frsize - left_bytes)
        assert not stored(store, 2)
        counters = store.stats().tiers[0].counters
        assert counters.full > 0
        assert counters.failed == 0
        assert get(store, chain(4, seed=2)) == ["ram"] * 4, "serving goes on"
        assert not list(small_disk.rglob("*.tmp"))
        filler.unlink()
        assert eventually(lambda: stored(store, random.randrange(10, 10**6)))
        assert store.stats().tiers[0].used_bytes == file_bytes(small_disk)
