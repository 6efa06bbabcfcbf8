"""Several stores on one directory, each a process or host of its own as far as they can tell (D30, D33)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.store.support import (
    RECORD,
    assert_nothing_leaked,
    chain,
    disk,
    drop_ram,
    eventually,
    file_bytes,
    get,
    make_store,
    put,
)

from tiercel.blocks import BlockKey, Chain
from tiercel.store import LaneOptions, TieredStore
from tiercel.store.lane import Lane
from tiercel.tiers.extras import Part

CAP = 40 * RECORD
AN_HOUR = 3600.0


def open_on(root: Path, cap_bytes: int | None = CAP, slots: int = 64) -> TieredStore:
    return make_store((disk(root), LaneOptions(cap_bytes=cap_bytes)), slots=slots)


def lane(store: TieredStore) -> Lane:
    return store.below.traffic[0].lane


def in_step(store: TieredStore) -> None:
    """A round now, once the one after opening is over."""
    pause_s = lane(store).keep_in_step()
    assert pause_s is not None


def listed(store: TieredStore) -> set[BlockKey]:
    return set(lane(store).index.keys_of(None))


def stored(store: TieredStore, of: Chain) -> None:
    assert put(store, of) == len(of)
    assert store.flush(20)


def age(root: Path, of: Chain, by_s: float) -> None:
    for key in of.keys:
        path = disk(root).path(key)
        used_s = path.stat().st_mtime - by_s
        os.utime(path, (used_s, used_s))


def noting(call: Callable[..., object], calls: list[object]) -> Callable[..., object]:
    def noted(*args: object, **named: object) -> object:
        calls.append(args)
        return call(*args, **named)

    return noted


def test_what_others_write_and_delete_is_learned_without_asking(tmp_path: Path) -> None:
    with open_on(tmp_path) as ours, open_on(tmp_path) as theirs:
        stored(theirs, chain(8))
        assert ours.lookup(chain(8), 0).blocks == 0, "not known yet"
        in_step(ours)
        assert ours.lookup(chain(8), 0).blocks == 8
        assert ours.stats().tiers[0].used_bytes == 8 * RECORD
        assert get(ours, chain(8)) == ["disk"] * 8
        theirs.clear(chain(8).keys[0][:8])
        drop_ram(ours)
        in_step(ours)
        assert ours.lookup(chain(8), 0).blocks == 0
        assert ours.stats().tiers[0].used_bytes == 0
        assert ours.stats().tiers[0].counters.missing == 0, "nobody had to run into it"


def test_unchanged_folders_are_not_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_on(tmp_path) as store:
        stored(store, chain(8))
        for folder in tmp_path.glob("*/*"):
            # Not just now: a folder that changed a moment ago is looked into twice.
            os.utime(folder, (time.time() - 100,) * 2)
        newest = min(tmp_path.glob("*/*"))
        os.utime(newest)
        in_step(store)
        lists: list[object] = []
        monkeypatch.setattr(os, "scandir", noting(os.scandir, lists))
        in_step(store)
        in_step(store)
        idle = len(lists)
        stored(store, chain(1, 5))
        in_step(store)
        # Of each scope and of the root the names of folders, and the one folder that changed.
        assert len(lists) - idle < idle / 2 + 3
        assert idle <= 2 * 3 + 1


def test_a_cap_is_kept_by_all_together(tmp_path: Path) -> None:
    with open_on(tmp_path) as one, open_on(tmp_path) as two:
        for number in range(5):
            stored(one, chain(8, 10 + number))
            stored(two, chain(8, 20 + number))
            in_step(one)
            in_step(two)
            assert file_bytes(tmp_path) <= CAP
        assert file_bytes(tmp_path) >= CAP // 2
        in_step(one)
        assert listed(one) == listed(two) == {key for key in listed(one) if disk(tmp_path).path(key).exists()}
        assert_nothing_leaked(one)
        assert_nothing_leaked(two)


def test_eviction_spares_what_another_process_used_lately(tmp_path: Path) -> None:
    with open_on(tmp_path) as theirs:
        old, idle = chain(8, 1), chain(8, 2)
        stored(theirs, old)
        stored(theirs, idle)
        age(tmp_path, old, 2 * AN_HOUR)
        age(tmp_path, idle, AN_HOUR)
    with open_on(tmp_path) as ours, open_on(tmp_path) as theirs:
        # The coldest of all, as far as we know; but theirs just read it.
        assert get(theirs, old) == ["disk"] * 8
        for number in range(4):
            stored(ours, chain(7, 10 + number))
        assert [disk(tmp_path).path(key).exists() for key in old.keys] == [True] * 8
        assert sum(disk(tmp_path).path(key).exists() for key in idle.keys) < 8
        assert file_bytes(tmp_path) <= CAP
        assert lane(ours).stats().counters.evicted_blocks > 0


def test_without_anybodys_use_the_oldest_goes(tmp_path: Path) -> None:
    with open_on(tmp_path) as store:
        stored(store, chain(8, 1))
        stored(store, chain(8, 2))
        age(tmp_path, chain(8, 1), 2 * AN_HOUR)
        age(tmp_path, chain(8, 2), AN_HOUR)
    with open_on(tmp_path) as ours:
        for number in range(4):
            stored(ours, chain(7, 10 + number))
        assert sum(disk(tmp_path).path(key).exists() for key in chain(8, 1).keys) < 8
        assert [disk(tmp_path).path(key).exists() for key in chain(8, 2).keys] == [True] * 8


def test_when_everything_is_in_use_the_cap_still_comes_first(tmp_path: Path) -> None:
    with open_on(tmp_path) as theirs:
        for number in range(5):
            stored(theirs, chain(8, number))
            age(tmp_path, chain(8, number), AN_HOUR)
    with open_on(tmp_path) as ours, open_on(tmp_path) as theirs:
        for number in range(5):
            assert len(get(theirs, chain(8, number))) == 8
        for number in range(4):
            stored(ours, chain(8, 10 + number))
            assert file_bytes(tmp_path) <= CAP
        assert ours.lookup(chain(8, 13), 0).blocks == 8


@pytest.mark.parametrize("jump_s", [AN_HOUR, -AN_HOUR])
def test_a_clock_that_jumps_costs_no_hit_and_no_cap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    real, real_ns = time.time, time.time_ns
    with open_on(tmp_path) as ours, open_on(tmp_path) as theirs:
        stored(ours, chain(8, 1))
        in_step(theirs)
        monkeypatch.setattr(time, "time", lambda: real() + jump_s)
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(jump_s * 1e9))
        for number in range(2, 9):
            stored(ours, chain(8, number))
            in_step(theirs)
            assert get(theirs, chain(8, number)) == ["disk"] * 8
            assert file_bytes(tmp_path) <= CAP
        monkeypatch.undo()
        for number in range(10, 16):
            stored(ours, chain(8, number))
            in_step(theirs)
            assert file_bytes(tmp_path) <= CAP
        assert theirs.lookup(chain(8, 15), 0).blocks == 8
        assert theirs.lookup(chain(8, 1), 0).blocks == 0, "made room like any other"


def test_hits_in_ram_are_dated_in_the_place_but_not_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_on(tmp_path) as store:
        stored(store, chain(4))
        age(tmp_path, chain(4), AN_HOUR)
        lane(store).index.now_min += 10  # ten minutes later
        dated: list[object] = []
        monkeypatch.setattr(os, "utime", noting(os.utime, dated))
        for _ in range(100):
            assert store.lookup(chain(4), 0).blocks == 4
        in_step(store)
        assert len(dated) == 4
        times = [disk(tmp_path).path(key).stat().st_mtime for key in chain(4).keys]
        assert all(abs(time.time() - depth - used_s) < 60 for depth, used_s in enumerate(times))
        assert times == sorted(times, reverse=True), "a parent is younger than its child"


def test_a_directory_removed_while_running_fails_quietly_and_is_used_again(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    with open_on(root) as store:
        stored(store, chain(8))
        root.rename(tmp_path / "away")
        in_step(store)
        assert lane(store).stats().counters.failed > 0
        (tmp_path / "away").rename(root)
        assert eventually(lambda: lane(store).gate.available(time.monotonic()))
        in_step(store)
        drop_ram(store)
        assert store.lookup(chain(8), 0).blocks == 8
        assert get(store, chain(8)) == ["disk"] * 8


def test_a_clear_during_a_look_around_is_not_undone_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_on(tmp_path) as ours, open_on(tmp_path) as theirs:
        stored(theirs, chain(8))
        sharing = lane(ours)._sharing
        assert sharing is not None
        real, fired = sharing._known_by_prefix, []

        def clearing(parts: list[Part]) -> object:
            fired.append(ours.clear())
            return real(parts)

        monkeypatch.setattr(sharing, "_known_by_prefix", clearing)
        in_step(ours)
        assert fired
        monkeypatch.undo()
        assert ours.lookup(chain(8), 0).blocks == 0
        in_step(ours)
        assert listed(ours) == set()
        assert file_bytes(tmp_path) == 0


def test_five_stores_at_once_agree_in_the_end(tmp_path: Path) -> None:
    stores = [open_on(tmp_path) for _ in range(5)]
    try:
        for number, store in enumerate(stores):
            for part in range(3):
                put(store, chain(6, 100 + 10 * number + part))
        for store in stores:
            assert store.flush(20)
        for _ in range(3):
            for store in stores:
                in_step(store)
        assert file_bytes(tmp_path) <= CAP
        there = {path.name for path in tmp_path.rglob("*.kv")}
        assert there
        for store in stores:
            assert {disk(tmp_path).path(key).name for key in listed(store)} == there
    finally:
        for store in stores:
            store.close()
