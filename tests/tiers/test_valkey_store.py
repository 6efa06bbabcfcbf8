"""A store over Valkey: its faults are misses, right bytes or none, and hits come back without a restart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers.proxy import BlackHole, Corrupt, Cut, FaultProxy
from tests.servers.valkey import ValkeyServer
from tests.store.support import (
    RECORD,
    assert_nothing_leaked,
    chain,
    eventually,
    get,
    make_store,
    put,
)
from tests.tiers.over_remote import (
    BLOCKS,
    DEADLINE_S,
    OPTIONS,
    assert_a_fault_costs_a_deadline,
    assert_another_finds_by_asking,
    hits,
    stats,
    written,
)

from tiercel.store import TieredStore
from tiercel.tiers.url import TierUrl
from tiercel.tiers.valkey import open_valkey


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path, maxmemory="64mb", maxmemory_policy="noeviction") as one:
        yield one


@pytest.fixture
def store(proxy: FaultProxy) -> Iterator[TieredStore]:
    one = opened(proxy.port)
    yield one
    assert_nothing_leaked(one)
    one.close()


def opened(port: int, scanned: bool = True) -> TieredStore:
    url = TierUrl.parse(f"valkey://127.0.0.1:{port}")
    tier = open_valkey(url, name="valkey", deadline_s=DEADLINE_S, slot_bytes=RECORD)
    return make_store((tier, OPTIONS), scanned=scanned)


def test_what_one_store_wrote_another_finds_by_asking(store: TieredStore, server: ValkeyServer) -> None:
    other = opened(server.port)
    assert_another_finds_by_asking(store, other)
    other.close()


@pytest.mark.parametrize("fault", ["killed", "stopped", "swallowed", "refused", "cut"])
def test_d46_a_fault_costs_a_deadline_and_hits_come_back(
    store: TieredStore, server: ValkeyServer, proxy: FaultProxy, fault: str
) -> None:
    start, end = {
        "killed": (server.kill, server.start),
        "stopped": (server.pause, server.resume),
        "swallowed": (lambda: proxy.set(down=BlackHole()), proxy.heal),
        "refused": (proxy.refuse, proxy.open),
        "cut": (lambda: proxy.set(down=Cut(100)), proxy.heal),
    }[fault]
    assert_a_fault_costs_a_deadline(store, start, end)


def test_an_emptied_server_is_a_miss_and_no_failure(store: TieredStore, server: ValkeyServer) -> None:
    assert written(store, chain(BLOCKS))
    with server.client() as client:
        client.flushall()
    assert get(store, chain(BLOCKS)) == []
    assert stats(store).counters.missing > 0
    assert eventually(lambda: hits(store, chain(BLOCKS)))
    assert stats(store).counters.failed == 0


@pytest.mark.parametrize("at_byte", [200, 4096 + 500])
def test_d32_a_flipped_bit_is_a_miss_counted_and_dropped(
    store: TieredStore, server: ValkeyServer, proxy: FaultProxy, at_byte: int
) -> None:
    assert written(store, chain(1))
    proxy.set(down=Corrupt(at_byte))
    assert get(store, chain(1)) == []
    assert proxy.fired == 1
    assert stats(store).counters.corrupt == 1
    assert eventually(lambda: server.names() == [])
    assert written(store, chain(1))
    assert get(store, chain(1)) == ["valkey"]


def test_another_blocks_record_under_the_name_is_a_miss(store: TieredStore, server: ValkeyServer) -> None:
    one = chain(2)
    assert written(store, one)
    with server.client() as client:
        client.copy(f"tiercel:{one.keys[0].hex()}", f"tiercel:{one.keys[1].hex()}", replace=True)
    assert get(store, one) == ["valkey"]
    assert stats(store).counters.corrupt == 1


def test_a_full_server_pauses_writing_and_reading_goes_on(store: TieredStore, server: ValkeyServer) -> None:
    assert written(store, chain(BLOCKS))
    with server.client() as client:
        client.config_set("maxmemory", "1mb")
        assert written(store, chain(BLOCKS, seed=1))
        assert eventually(lambda: stats(store).counters.full > 0)
        assert get(store, chain(BLOCKS)) == ["valkey"] * BLOCKS
        assert stats(store).counters.failed == 0
        client.config_set("maxmemory", "64mb")
    assert eventually(lambda: hits(store, chain(BLOCKS, seed=2)), 30)


def test_a_server_that_is_not_there_yet_is_used_when_it_is(tmp_path: Path) -> None:
    late = ValkeyServer(tmp_path / "late")
    store = opened(late.port, scanned=False)
    assert put(store, chain(BLOCKS)) == BLOCKS
    assert get(store, chain(BLOCKS)) == ["ram"] * BLOCKS
    with late:
        assert eventually(lambda: hits(store, chain(BLOCKS, seed=3)), 40)
    store.close()
