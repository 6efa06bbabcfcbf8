"""What the index costs: memory per block, and leaves before parents whatever the order of uses (D38)."""

from __future__ import annotations

import threading
import tracemalloc
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.support import RECORD, chain, disk, drop_ram, get, make_store, put

from tiercel.blocks import BlockKey
from tiercel.store import LaneOptions, TieredStore
from tiercel.store.faults import FaultLog
from tiercel.store.journal import Journal
from tiercel.store.lane import Lane
from tiercel.tiers import Stored

BLOCKS = 100_000


class Listing:
    """A tier that only lists: freshly made keys, so that the index alone keeps them alive."""

    name = "listing"

    def scan(self) -> list[Stored]:
        return [Stored(BlockKey(n.to_bytes(32, "big")), RECORD + n % 3, float(n)) for n in range(BLOCKS)]


def test_an_entry_of_a_tiers_index_takes_at_most_300_bytes() -> None:
    lock = threading.Condition(threading.Lock())
    lane = Lane(Listing(), LaneOptions(), lock, lambda key: False, FaultLog(), Journal())  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        lane.scan()
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert lane.stats().blocks == BLOCKS
    print(f"{used_bytes / BLOCKS:.0f} bytes per block")
    assert 60 < used_bytes / BLOCKS <= 300


def in_ram(store: TieredStore, seed: int) -> list[bool]:
    return [store.ram.get(key) is not None for key in chain(8, seed).keys]


USES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8), st.sampled_from("plx")), max_size=25)


@settings(max_examples=60)
@given(USES)
def test_ram_gives_up_leaves_before_their_parents(uses: list[tuple[int, int, str]]) -> None:
    with make_store(slots=14, reserved=2) as store:
        for seed, length, what in uses:
            if what == "p":
                put(store, chain(length, seed))
            elif what == "l":
                get(store, chain(length, seed))
            else:
                store.lookup(chain(length, seed))
            for each in range(4):
                there = in_ram(store, each)
                assert there == sorted(there, reverse=True), "a parent left before its child"


def test_a_tier_at_its_cap_gives_up_leaves_before_their_parents(tmp_path: Path) -> None:
    @settings(max_examples=15)
    @given(USES, st.integers(0, 10**9))
    def property_of(uses: list[tuple[int, int, str]], number: int) -> None:
        options = LaneOptions(cap_bytes=14 * RECORD)
        with make_store((disk(tmp_path / f"{number}-{len(uses)}"), options), slots=40, reserved=8) as store:
            store.clear()
            for seed, length, what in uses:
                if what == "p":
                    # A parent that its tier has evicted and only RAM still has is not written again: what is
                    # stored after it lies there without it until it is evicted too.
                    drop_ram(store)
                    put(store, chain(length, seed))
                    assert store.flush(20)
                elif what == "l":
                    drop_ram(store)
                    get(store, chain(length, seed))
                else:
                    store.lookup(chain(length, seed), 0)
                listed = set(store.below.traffic[0].lane.index.keys_of(None))
                for each in range(4):
                    there = [key in listed for key in chain(8, each).keys]
                    assert there == sorted(there, reverse=True), "a parent left before its child"

    property_of()
