"""Several blocks at a time, prefixes that begin in the middle, and the journal of what came and went."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.store.support import (
    PAYLOAD,
    RECORD,
    assert_nothing_leaked,
    chain,
    disk,
    drop_ram,
    get,
    make_store,
    payload_of_key,
    put,
    scope,
)

from tiercel.store import LaneOptions, TieredStore
from tiercel.store import journal as journal_module


def read_in_batches(store: TieredStore, blocks: int, limit: int, start: int = 0) -> list[int]:
    one = chain(blocks)
    seen = []
    with store.acquire(one, 5.0, start) as lease:
        while batch := lease.ready(limit):
            assert len(batch) <= limit
            for block in batch:
                assert bytes(block.payload) == payload_of_key(one.keys[block.index])
                seen.append(block.index)
            lease.advance(len(batch))
    return seen


@pytest.mark.parametrize("start", [0, 1, 5, 8, 9])
@pytest.mark.parametrize("limit", [1, 3, 100])
def test_a_prefix_is_read_in_batches_from_any_block_on(limit: int, start: int) -> None:
    store = make_store()
    put(store, chain(8))
    assert read_in_batches(store, 8, limit, start) == list(range(start, 8))
    assert store.lookup(chain(9), start=start).blocks == max(0, 8 - start)
    assert_nothing_leaked(store)


def test_a_prefix_on_disk_is_read_in_batches_though_it_is_larger_than_ram(tmp_path: Path) -> None:
    store = make_store((disk(tmp_path / "d"), LaneOptions()), slots=10, reserved=3)
    put(store, chain(40))
    assert store.flush(10)
    drop_ram(store)
    assert read_in_batches(store, 40, 4, 7) == list(range(7, 40))
    assert store.stats().counters.loaded["disk"] >= 33
    assert_nothing_leaked(store)


def test_from_the_middle_on_nothing_before_is_loaded(tmp_path: Path) -> None:
    store = make_store((disk(tmp_path / "d"), LaneOptions()))
    put(store, chain(8))
    assert store.flush(10)
    drop_ram(store)
    assert read_in_batches(store, 8, 8, 6) == [6, 7]
    assert store.stats().counters.loaded["disk"] == 2


def test_a_lookup_from_the_middle_does_not_need_what_lies_before() -> None:
    store = make_store()
    put(store, chain(8), start=4)
    assert store.lookup(chain(8), start=4).blocks == 4
    assert store.lookup(chain(8)).blocks == 0


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_blocks_are_written_in_batches(limit: int) -> None:
    store = make_store()
    one = chain(8)
    put(store, chain(2))
    with store.begin_store(one, 0, 8, PAYLOAD) as lease:
        taken = []
        while batch := lease.take(limit):
            for block in batch:
                block.payload[:] = payload_of_key(one.keys[block.index])
                taken.append(block.index)
        assert lease.commit() == 6
    assert taken == [2, 3, 4, 5, 6, 7]
    assert len(get(store, one)) == 8
    assert_nothing_leaked(store)


def test_an_aborted_batch_leaves_nothing_and_the_batch_before_it_stays() -> None:
    store = make_store()
    one = chain(8)
    with store.begin_store(one, 0, 8, PAYLOAD) as lease:
        for block in lease.take(3):
            block.payload[:] = payload_of_key(one.keys[block.index])
        assert len(lease.take(3)) == 3
    assert len(get(store, one)) == 3
    assert store.stats().counters.stores_aborted == 3
    assert_nothing_leaked(store)


def test_a_batch_takes_what_is_free_and_waits_for_the_first_slot_only() -> None:
    store = make_store(slots=6, reserved=2)
    one = chain(8)
    with store.begin_store(one, 0, 8, PAYLOAD, 0.2) as lease:
        assert [block.index for block in lease.take(8)] == [0, 1, 2, 3]
        for block in lease.take(8):
            block.payload[:] = payload_of_key(one.keys[block.index])
        lease.commit()
    assert_nothing_leaked(store)


# The journal.


def test_nothing_is_written_down_until_somebody_listens() -> None:
    store = make_store()
    put(store, chain(3))
    first = store.events(0, scope().tag)
    assert first.events == ()
    put(store, chain(5))
    later = store.events(first.next, scope().tag)
    assert [(event.stored, event.place) for event in later.events] == [(True, "ram")] * 2
    assert store.events(later.next, scope().tag).events == ()


def test_what_comes_to_and_leaves_each_place_is_told_to_its_scope_only(tmp_path: Path) -> None:
    store = make_store((disk(tmp_path / "d"), LaneOptions(cap_bytes=6 * RECORD)), slots=10, reserved=3)
    mine, other = scope("a"), scope("b")
    at = store.events(0, mine.tag).next
    put(store, chain(4, of=other))
    put(store, chain(12, 1, of=mine))
    store.flush(10)
    here: set[tuple[bytes, str]] = set()
    while True:
        told = store.events(at, mine.tag)
        if told.next == at:
            break
        at = told.next
        for event in told.events:
            assert event.key.startswith(mine.tag)
            (here.add if event.stored else here.discard)((event.key, event.place))
    with store.lock:
        ram = {entry.key for entry in store.ram.entries() if entry.key.startswith(mine.tag)}
        on_disk = {key for key in chain(12, 1, of=mine).keys if store.below.traffic[0].lane.has(key)}
    assert {key for key, place in here if place == "ram"} == ram
    assert {key for key, place in here if place == "disk"} == on_disk
    assert ram
    assert on_disk


def test_a_listener_that_is_too_slow_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_EVENTS_MAX", 4)
    store = make_store()
    at = store.events(0, scope().tag).next
    put(store, chain(4))
    assert not store.events(at, scope().tag).lost
    put(store, chain(8))
    told = store.events(at, scope().tag)
    assert told.lost
    assert len(told.events) == 4


def test_a_number_of_another_store_is_told_to_be_lost() -> None:
    """A daemon was started anew, and has more to tell by now than the last one had."""
    before, after = make_store(), make_store()
    old = before.events(0, scope().tag)
    put(before, chain(2))
    at = before.events(old.next, scope().tag)
    assert not at.lost
    assert not after.events(0, scope().tag).lost
    put(after, chain(6))
    assert after.events(at.next, scope().tag).lost
