"""Writing in the background leaves the cores to those who compute, and loads pass a queue of stores."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.store.support import FaultyTier, chain, disk, drop_ram, eventually, get, make_store, put

from tiercel.blocks import BlockKey
from tiercel.store import LaneOptions
from tiercel.store.workers import Workers, give_way
from tiercel.tiers import Outcome, Tier

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of single threads")


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


class Watched(FaultyTier):
    """Notes at which priority it is called; its writes wait for `go`."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.nice: dict[str, list[int]] = {"read": [], "write": []}
        self.go = threading.Event()
        self.go.set()

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        self.nice["read"].append(nice())
        return super().read(keys, records)

    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        self.nice["write"].append(nice())
        assert self.go.wait(30)
        return super().write(keys, records)


@on_linux
def test_a_thread_gives_way_once_and_no_other_does() -> None:
    usual, seen = nice(), list[int]()
    workers = Workers("some", 1, 10)
    for task in (lambda: seen.append(nice()), give_way, lambda: seen.append(nice()), give_way):
        assert workers.submit(task)
    assert workers.submit(lambda: seen.append(nice()))
    assert eventually(lambda: len(seen) == 3)
    workers.close()
    assert seen == [usual, min(19, usual + 10), min(19, usual + 10)]
    assert nice() == usual


def test_where_it_is_refused_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[int] = []

    def refuse(*_: int) -> None:
        refused.append(1)
        raise PermissionError("not here")

    monkeypatch.setattr(os, "setpriority", refuse)
    done = threading.Thread(target=give_way)
    done.start()
    done.join()
    assert refused or sys.platform != "linux"


@on_linux
def test_writers_give_way_once_their_tier_works_and_readers_never(tmp_path: Path) -> None:
    """Not before the first write: what a tier starts when it is first used is for its reads too."""
    usual, tier = nice(), Watched(disk(tmp_path / "c"))
    with make_store((tier, LaneOptions(write_workers=1, read_workers=1))) as store:
        for seed in range(3):
            assert put(store, chain(2, seed)) == 2
            assert store.flush(10)
        drop_ram(store)
        assert get(store, chain(2)) == ["disk"] * 2
        assert tier.nice["write"][0] == usual
        assert set(tier.nice["write"][1:]) == {min(19, usual + 10)}
        assert set(tier.nice["read"]) == {usual}
    assert nice() == usual


def test_a_queue_of_stores_does_not_delay_a_load(tmp_path: Path) -> None:
    tier = Watched(disk(tmp_path / "c"))
    with make_store((tier, LaneOptions(deadline_s=60)), slots=64) as store:
        assert put(store, chain(4)) == 4
        assert store.flush(10)
        drop_ram(store)
        tier.go.clear()
        for seed in range(1, 6):
            assert put(store, chain(4, seed)) == 4
        assert eventually(lambda: len(tier.nice["write"]) > 1)
        assert get(store, chain(4)) == ["disk"] * 4
        assert store.stats().tiers[0].pending_writes == 20, "no store came first"
        tier.go.set()
        assert store.flush(10)
        assert store.stats().tiers[0].counters.written_blocks == 24
