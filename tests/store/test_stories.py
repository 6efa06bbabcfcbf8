"""What engines are promised by the store, told with small blocks over a real directory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.store.support import (
    RECORD,
    FaultyTier,
    assert_nothing_leaked,
    chain,
    disk,
    drop_ram,
    eventually,
    file_bytes,
    get,
    make_store,
    put,
    scope,
)

from tiercel.blocks import BlockKey
from tiercel.store import LaneOptions, TieredStore, WriteMode
from tiercel.tiers import Outcome


def held(root: Path, of: TieredStore) -> tuple[int, int]:
    return of.stats().tiers[0].used_bytes, file_bytes(root)


def test_the_longest_cached_prefix_is_found_and_its_bytes_come_back(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions())) as store:
        assert put(store, chain(5)) == 5
        longer = chain(8)
        assert store.lookup(longer).blocks == 5
        assert get(store, longer) == ["ram"] * 5
        assert store.lookup(chain(3, seed=1)).blocks == 0
        assert_nothing_leaked(store)


def test_a_store_larger_than_the_arena_keeps_its_head_in_ram_and_writes_all_to_disk(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions())) as store:
        prompt = chain(60)
        assert put(store, prompt, deadline_s=30) == 60
        assert store.flush(30)
        assert len(list((tmp_path / "c").rglob("*.kv"))) == 60
        assert get(store, prompt)[:8] == ["ram"] * 8
        assert held(tmp_path / "c", store) == (60 * RECORD, 60 * RECORD)


def test_a_prefix_larger_than_the_arena_streams_through_it(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions())) as store:
        prompt = chain(80)
        put(store, prompt, deadline_s=30)
        assert store.flush(30)
        drop_ram(store)
        assert get(store, prompt, 30) == ["disk"] * 80
        assert_nothing_leaked(store)


def test_leased_blocks_are_not_evicted_and_their_bytes_do_not_change() -> None:
    with make_store(slots=8, reserved=2) as store:
        put(store, chain(4))
        with store.acquire(chain(4)) as lease:
            blocks = iter(lease)
            first = next(blocks)
            before = bytes(first.payload)
            for seed in range(1, 10):
                put(store, chain(4, seed=seed), deadline_s=0)
            assert bytes(first.payload) == before
            assert [block.index for block in blocks] == [1, 2, 3]
        put(store, chain(6, seed=20))
        assert store.lookup(chain(4)).blocks < 4, "the control: without a lease they go"
        assert_nothing_leaked(store)


def test_fifty_readers_of_one_prefix_make_one_physical_read_per_block(tmp_path: Path) -> None:
    tier = FaultyTier(disk(tmp_path / "c"))
    with make_store((tier, LaneOptions()), slots=32) as store:
        put(store, chain(8))
        assert store.flush(30)
        drop_ram(store)
        gate = threading.Event()

        def slow(keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
            gate.wait(20)
            return tier.inner.read(keys, records)

        tier.faults["read"] = slow
        answers: list[list[str]] = []
        readers = [
            threading.Thread(target=lambda: answers.append(get(store, chain(8), 30))) for _ in range(50)
        ]
        for reader in readers:
            reader.start()
        assert eventually(lambda: store.stats().leases == 50)
        gate.set()
        for reader in readers:
            reader.join(30)
        assert answers == [["disk"] * 8] * 50
        assert sorted(tier.reads) == sorted(chain(8).keys)
        assert_nothing_leaked(store)


def test_a_block_read_from_disk_is_promoted_to_ram(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions())) as store:
        put(store, chain(4))
        assert store.flush(30)
        drop_ram(store)
        assert get(store, chain(4)) == ["disk"] * 4
        assert get(store, chain(4)) == ["ram"] * 4
        counters = store.stats().tiers[0].counters
        assert counters.read_bytes == counters.written_bytes == 4 * RECORD


@pytest.mark.parametrize(
    ("mode", "after_store", "after_flush"),
    [(WriteMode.THROUGH, 4, 4), (WriteMode.ON_EVICT, 0, 4), (WriteMode.OFF, 0, 0)],
)
def test_when_a_block_goes_down(tmp_path: Path, mode: WriteMode, after_store: int, after_flush: int) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions(write=mode))) as store:
        put(store, chain(4))
        if after_store:
            assert eventually(lambda: store.stats().tiers[0].blocks == after_store)
        assert store.stats().tiers[0].blocks == after_store
        store.flush(10)
        assert store.stats().tiers[0].blocks == after_flush


def test_on_evict_writes_what_it_evicts_before_the_slot_is_reused(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions(write=WriteMode.ON_EVICT))) as store:
        for seed in range(10):
            put(store, chain(6, seed=seed), deadline_s=20)
        for seed in range(10):
            assert len(get(store, chain(6, seed=seed), 20)) == 6
        assert_nothing_leaked(store)


def test_pins_keep_blocks_end_by_themselves_and_are_bounded() -> None:
    with make_store(slots=12, reserved=2) as store:
        put(store, chain(4))
        assert store.pin(chain(4), 3600) == 4
        for seed in range(1, 8):
            put(store, chain(4, seed=seed))
        assert store.lookup(chain(4)).blocks == 4
        assert store.lookup(chain(4, seed=1)).blocks == 0, "the control: unpinned ones went"
        assert store.pin(chain(4, seed=7), 3600) == 1, "at most half of RAM"
        store.unpin(chain(4))
        store.unpin(chain(4, seed=7))
        assert store.stats().pins == 0
        assert store.pin(chain(4), -1) == 4
        assert store.stats().pins == 0, "ended"
        put(store, chain(10, seed=9))
        assert store.lookup(chain(10, seed=9)).blocks == 10, "full capacity is evictable again"


def test_lookups_pin_nothing_and_an_unused_or_half_used_lease_gives_all_back(tmp_path: Path) -> None:
    """D24."""
    with make_store((disk(tmp_path / "c"), LaneOptions())) as store:
        put(store, chain(8))
        assert store.flush(30)
        drop_ram(store)
        for _ in range(20):
            assert store.lookup(chain(8)).blocks == 8
            with store.acquire(chain(8)):
                pass
            with store.acquire(chain(8)) as lease:
                for block in lease:
                    if block.index == 2:
                        break
        assert_nothing_leaked(store)
        stats = store.stats()
        assert (stats.pins, stats.leases) == (0, 0)
        assert put(store, chain(12, seed=3)) == 12


def test_prefetch_brings_a_prefix_up_and_tells_how_much(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions())) as store:
        put(store, chain(6))
        assert store.flush(30)
        drop_ram(store)
        asked_again: list[int] = []
        future = store.prefetch(chain(6))
        future.add_done_callback(lambda _: asked_again.append(store.lookup(chain(6)).blocks))
        assert future.result(20) == 6
        assert eventually(lambda: asked_again == [6]), "a callback may use the store"
        assert get(store, chain(6)) == ["ram"] * 6


def test_a_prefetch_that_waits_at_close_is_cancelled_and_never_hangs(tmp_path: Path) -> None:
    tier = FaultyTier(disk(tmp_path / "c"))
    store = make_store((tier, LaneOptions()))
    put(store, chain(6))
    assert store.flush(30)
    drop_ram(store)
    gate = threading.Event()
    tier.faults["read"] = lambda *args: (gate.wait(20), tier.inner.read(*args))[1]
    futures = [store.prefetch(chain(6)) for _ in range(5)]
    assert eventually(lambda: tier.fired > 0)
    store.close(0.2)
    assert all(eventually(future.done) for future in futures)
    assert any(future.cancelled() for future in futures)
    gate.set()


def test_a_cleared_scope_is_gone_everywhere_and_others_stay(tmp_path: Path) -> None:
    mine, other = chain(4, of=scope("a")), chain(4, of=scope("b"))
    with make_store((disk(tmp_path / "c"), LaneOptions())) as store:
        put(store, mine)
        put(store, other)
        assert store.flush(30)
        assert store.clear(scope("a").tag) == 4
        assert store.lookup(mine).blocks == 0
        assert store.lookup(other).blocks == 4
        assert file_bytes(tmp_path / "c") == 4 * RECORD
        assert held(tmp_path / "c", store) == (4 * RECORD, 4 * RECORD)


def test_clear_ends_the_open_stores_of_its_scope_and_of_no_other(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions())) as store:
        cleared, other = chain(4, of=scope("a")), chain(4, of=scope("b"))
        with store.begin_store(cleared, 0, 4, 4096) as mine, store.begin_store(other, 0, 4, 4096) as theirs:
            next(iter(mine))
            next(iter(theirs))
            store.clear(scope("a").tag)
            assert [block.index for block in mine] == []
            assert [block.index for block in theirs] == [1, 2, 3]
            assert mine.commit() == 0
            theirs.commit()
        assert store.lookup(cleared).blocks == 0
        assert store.ram.get(other.keys[3]) is not None, "the control"


def test_clear_takes_blocks_the_index_never_saw(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions())) as store:
        with make_store((disk(tmp_path / "c"), LaneOptions())) as another:
            put(another, chain(3))
        assert store.stats().tiers[0].blocks == 0
        assert store.clear(scope().tag) == 3
        assert store.lookup(chain(3), 5).blocks == 0
        assert file_bytes(tmp_path / "c") == 0


def test_new_weights_miss_at_once_at_every_tier_and_old_entries_can_go(tmp_path: Path) -> None:
    """D06."""
    with make_store((disk(tmp_path / "c"), LaneOptions())) as store:
        put(store, chain(4))
        assert store.flush(30)
        updated = chain(4, of=scope(revision="2"))
        assert store.lookup(updated).blocks == 0
        drop_ram(store)
        assert store.lookup(updated).blocks == 0
        assert store.lookup(chain(4)).blocks == 4, "the control"
        assert put(store, updated) == 4


def test_tenants_do_not_see_each_others_blocks(tmp_path: Path) -> None:
    """D04, D09."""
    ours = chain(4, of=scope(salt="A"))
    with make_store((disk(tmp_path / "c"), LaneOptions())) as store:
        put(store, ours)
        assert store.flush(30)
        for _ in range(2):
            assert store.lookup(chain(4, of=scope(salt="B"))).blocks == 0
            assert store.lookup(chain(4, of=scope())).blocks == 0
            assert store.lookup(ours).blocks == 4, "the control"
            drop_ram(store)


def test_blocks_of_another_process_are_found_by_asking_the_tier(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions())) as store:
        with make_store((disk(tmp_path / "c"), LaneOptions())) as another:
            put(another, chain(7))
        assert store.lookup(chain(7), 0).blocks == 0, "memory does not know them"
        assert store.lookup(chain(7), 10).blocks == 7
        assert get(store, chain(7)) == ["disk"] * 7
        assert held(tmp_path / "c", store) == (7 * RECORD, 7 * RECORD)


def test_a_restart_is_warm_rewrites_nothing_and_counts_true_bytes(tmp_path: Path) -> None:
    """D33, D34."""
    foreign = chain(3, of=scope("other"))
    with make_store((disk(tmp_path / "c"), LaneOptions())) as first:
        put(first, foreign)
        put(first, chain(6))
        assert first.flush(30)
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*.kv")}
    with make_store((disk(tmp_path / "c"), LaneOptions())) as second:
        assert held(tmp_path / "c", second) == (9 * RECORD, 9 * RECORD)
        assert second.lookup(chain(6), 0).blocks == 6
        assert get(second, chain(6)) == ["disk"] * 6
        assert put(second, chain(6)) == 0
        assert second.flush(30)
        counters = second.stats().tiers[0].counters
        assert counters.written_bytes == 0
        assert counters.read_bytes == 6 * RECORD
        assert second.lookup(foreign, 0).blocks == 3
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*.kv")}


def test_the_cap_holds_with_four_writers_and_evicts_leaves_first(tmp_path: Path) -> None:
    """D30."""
    cap = 40 * RECORD
    root = tmp_path / "c"
    with make_store((disk(root), LaneOptions(cap_bytes=cap, write_workers=4)), slots=24) as store:
        most: list[int] = []
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.002):
                try:
                    most.append(file_bytes(root))
                except FileNotFoundError:
                    continue

        watcher = threading.Thread(target=watch)
        watcher.start()
        writers = [
            threading.Thread(
                target=lambda base=base: [put(store, chain(8, seed=base + n)) for n in range(12)]
            )
            for base in (100, 200, 300, 400)
        ]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(60)
        assert store.flush(30)
        ended.set()
        watcher.join(10)
        stats = store.stats().tiers[0]
        assert stats.counters.evicted_blocks > 0
        assert max(most) <= cap
        assert held(root, store)[0] == held(root, store)[1] <= cap
        assert_nothing_leaked(store)


def test_the_tiers_cap_takes_leaves_before_their_parents_also_after_reading(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions(cap_bytes=12 * RECORD)), slots=40) as store:
        put(store, chain(8))
        assert store.flush(30)
        drop_ram(store)
        assert len(get(store, chain(8))) == 8
        put(store, chain(8, seed=1))
        assert store.flush(30)
        drop_ram(store)
        there = [key in store.below.traffic[0].lane.index.keys_of(None) for key in chain(8).keys]
        assert there == sorted(there, reverse=True), "a parent left before its child"
        assert 0 < sum(there) < 8
        assert store.lookup(chain(8, seed=1)).blocks == 8


def test_a_chain_larger_than_the_tiers_cap_keeps_its_head(tmp_path: Path) -> None:
    with make_store((disk(tmp_path / "c"), LaneOptions(cap_bytes=20 * RECORD))) as store:
        put(store, chain(40), deadline_s=30)
        assert store.flush(30)
        drop_ram(store)
        assert store.lookup(chain(40), 0).blocks >= 10


def test_a_full_ram_tier_skips_counts_and_never_errors() -> None:
    """D25."""
    with make_store(slots=4, reserved=2) as store:
        for seed in range(1000):
            put(store, chain(3, seed=seed), deadline_s=0)
            if seed % 10 == 0:
                store.pin(chain(1, seed=seed), 3600 if seed == 500 else -1)
        assert store.lookup(chain(1, seed=500)).blocks == 1, "pinned"
        assert store.stats().pins == 1
        assert put(store, chain(1, seed=5000), deadline_s=0) == 1, "pins leave a slot for keeping"
        with store.begin_store(chain(2, seed=6000), 0, 2, 4096, 0) as one:
            next(iter(one))
            assert put(store, chain(2, seed=7000), deadline_s=0) == 0
        assert store.stats().counters.stores_skipped > 0
        assert_nothing_leaked(store)


def test_an_aborted_or_abandoned_store_leaves_nothing() -> None:
    with make_store() as store:
        with store.begin_store(chain(3), 0, 3, 4096) as lease:
            next(iter(lease))
        assert store.lookup(chain(3)).blocks == 0
        assert store.stats().counters.stores_aborted == 1
        assert put(store, chain(3)) == 3, "the control"
        assert_nothing_leaked(store)


def test_waiting_prompts_are_hashed_once_and_lookups_leave_the_chain_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D38."""
    with make_store() as store:
        prompt = chain(10)
        put(store, prompt)
        monkeypatch.setattr("tiercel.blocks.chain.blake2b", None)
        assert {store.lookup(prompt).blocks for _ in range(100)} == {10}


def test_open_leases_survive_a_close_without_an_exception(tmp_path: Path) -> None:
    store = make_store((disk(tmp_path / "c"), LaneOptions()))
    put(store, chain(4))
    read = store.acquire(chain(4))
    blocks = iter(read)
    next(blocks)
    write = store.begin_store(chain(4, seed=1), 0, 4, 4096)
    room = iter(write)
    next(room).payload[:] = bytes(4096)
    store.close(5)
    assert list(blocks) == []
    assert list(room) == []
    write.commit()
    read.release()
    assert get(store, chain(4)) == []
    assert put(store, chain(4)) == 0
    assert store.lookup(chain(4)).blocks == 0
    assert store.close()
