"""Records written over the files of evicted ones: never wrong, never outside, nothing left behind."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from tests.store.support import RECORD, disk, drop_ram, file_bytes, get, make_store, put
from tests.store.support import chain as small_chain

from tiercel.blocks import HEADER_BYTES, verify
from tiercel.store import LaneOptions
from tiercel.testing.records import RECORD_BYTES, buffer, chain, record, records
from tiercel.tiers import MISSING, OK, Fate, FilesTier
from tiercel.tiers.extras import Recycles

OLD, NEW = chain(8), chain(8, first=1000)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def tier(root: Path) -> FilesTier:
    made = FilesTier(root)
    made.write(*records(OLD))
    return made


def spares(root: Path) -> list[Path]:
    return list(root.rglob("*.tmp"))


def inodes(tier: FilesTier, one: object) -> list[int]:
    return [tier.path(key).stat().st_ino for key in one.keys]  # type: ignore[attr-defined]


def test_it_is_offered(tier: FilesTier) -> None:
    assert isinstance(tier, Recycles)


def test_the_next_records_lie_in_the_files_of_the_last_ones(tier: FilesTier, root: Path) -> None:
    before = inodes(tier, OLD)
    assert tier.recycle([*OLD.keys, NEW.keys[0]]) == [OK] * 8 + [MISSING]
    assert tier.contains(list(OLD.keys)) == [False] * 8
    assert tier.read([OLD.keys[0]], [buffer()]) == [MISSING]
    assert list(tier.scan()) == []
    assert len(spares(root)) == 8
    assert set(tier.write(*records(NEW))) == {OK}
    assert inodes(tier, NEW) == before
    assert spares(root) == []
    for index, key in enumerate(NEW.keys):
        held = buffer()
        assert tier.read([key], [held]) == [OK]
        assert held[HEADER_BYTES:] == record(NEW, index)[HEADER_BYTES:]
        assert not isinstance(verify(held, key), str)


def test_spares_are_few_and_go_when_the_tier_closes(root: Path) -> None:
    tier = FilesTier(root)
    many = chain(50)
    tier.write(*records(many))
    assert set(tier.recycle(list(many.keys))) == {OK}
    assert len(spares(root)) == 32
    fds = len(os.listdir("/proc/self/fd"))
    tier.close()
    assert spares(root) == []
    assert len(os.listdir("/proc/self/fd")) == fds - 64
    assert tier.recycle([many.keys[0]])[0].fate is Fate.FAILED


def test_a_record_of_another_length_is_a_new_file(tier: FilesTier, root: Path) -> None:
    tier.recycle([OLD.keys[0]])
    large = record(NEW, 0, payload_bytes=100_000)
    assert tier.write([NEW.keys[0]], [large]) == [OK]
    assert len(spares(root)) == 1
    held = buffer(len(large))
    assert tier.read([NEW.keys[0]], [held]) == [OK]
    assert not isinstance(verify(held, NEW.keys[0]), str)


def test_leftovers_of_a_process_that_died_are_removed_like_unfinished_records(
    tier: FilesTier, root: Path
) -> None:
    tier.recycle([OLD.keys[0]])
    (spare,) = spares(root)
    host = spare.name.split("-")[0]
    spare.rename(spare.with_name(f"{host}-4194304-00000000-0.tmp"))
    list(FilesTier(root).scan())
    assert spares(root) == []


@pytest.mark.parametrize("how", ["a link", "another name", "not ours"])
def test_what_must_not_be_written_over_is_only_taken_away(
    tier: FilesTier, root: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine" * (RECORD_BYTES // 4))
    path = tier.path(OLD.keys[0])
    if how == "a link":
        path.unlink()
        path.symlink_to(outside)
    elif how == "another name":
        path.unlink()
        os.link(outside, path)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert tier.recycle([OLD.keys[0]]) == [OK]
    assert spares(root) == []
    assert tier.write([NEW.keys[0]], [record(NEW)]) == [OK]
    assert outside.read_bytes() == b"mine" * (RECORD_BYTES // 4)


@pytest.mark.parametrize("gone", ["spare", "folder", "root"])
def test_a_spare_that_went_away_costs_nothing_but_a_new_file(tier: FilesTier, root: Path, gone: str) -> None:
    tier.recycle([OLD.keys[0]])
    (spare,) = spares(root)
    if gone == "spare":
        spare.unlink()
    elif gone == "folder":
        for one in spare.parent.iterdir():
            one.unlink()
        spare.parent.rmdir()
    else:
        root.rename(root.with_name("away"))
        FilesTier(root)
    assert tier.write([NEW.keys[0]], [record(NEW)]) == [OK]
    held = buffer()
    assert tier.read([NEW.keys[0]], [held]) == [OK]
    assert not isinstance(verify(held, NEW.keys[0]), str)
    if gone == "root":
        assert not list(root.with_name("away").rglob(tier.path(NEW.keys[0]).name))


@pytest.mark.parametrize("call", ["pwritev", "utime", "rename"])
def test_a_fault_while_writing_over_leaves_no_half_record(
    tier: FilesTier, root: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    tier.recycle([OLD.keys[0]])
    real, fired = getattr(os, call), []

    def failing(*args: object, **named: object) -> object:
        if not fired:
            fired.append(1)
            raise OSError(5, "Input/output error")
        return real(*args, **named)

    monkeypatch.setattr(os, call, failing)
    assert tier.write([NEW.keys[0]], [record(NEW)]) == [OK], "as a new file"
    assert fired
    assert spares(root) == []
    held = buffer()
    assert tier.read([NEW.keys[0]], [held]) == [OK]
    assert not isinstance(verify(held, NEW.keys[0]), str)


def test_who_reads_while_a_record_is_evicted_and_written_over_gets_a_miss_or_the_record(root: Path) -> None:
    writer, reader = FilesTier(root), FilesTier(root)
    chains = [chain(4, first=1000 * number) for number in range(3)]
    writer.write(*records(chains[0]))
    ended = threading.Event()
    seen: list[str] = []
    bad: list[str] = []

    def read() -> None:
        held = buffer()
        while not ended.is_set():
            for one in chains:
                for key in one.keys:
                    (outcome,) = reader.read([key], [held])
                    seen.append(outcome.fate.value)
                    if outcome.fate is Fate.OK:
                        found = verify(held, key)
                        bad.extend([found] if isinstance(found, str) else [])

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(300):
        now, then = chains[turn % 3], chains[(turn + 1) % 3]
        writer.recycle(list(now.keys))
        writer.write(*records(then))
    ended.set()
    for thread in threads:
        thread.join(20)
    assert set(seen) == {"ok", "missing"}
    assert bad == []


def test_a_store_at_its_cap_writes_over_what_it_evicts(tmp_path: Path) -> None:
    cap = 16 * RECORD
    with make_store((disk(tmp_path), LaneOptions(cap_bytes=cap)), slots=24) as store:
        for seed in range(10):
            put(store, small_chain(4, seed=seed))
            assert store.flush(10)
            assert file_bytes(tmp_path) <= cap
        assert store.stats().tiers[0].counters.evicted_blocks == 24, "one for each, and no more"
        drop_ram(store)
        assert get(store, small_chain(4, seed=9)) == ["disk"] * 4
        assert get(store, small_chain(4, seed=0)) == []
        assert sum(path.stat().st_size for path in tmp_path.rglob("*.*")) <= cap + 40
        store.clear()
        assert file_bytes(tmp_path) == 0
    assert spares(tmp_path) == []
