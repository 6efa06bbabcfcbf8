"""A store over a bucket: its faults are misses, right bytes or none, and hits come back without a restart."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import obstore
import pytest
from tests.servers.proxy import BlackHole, Corrupt, Cut, FaultProxy
from tests.servers.s3 import USER, S3Server
from tests.servers.s3_stub import Refuse, StubS3
from tests.store.support import (
    assert_nothing_leaked,
    chain,
    drop_ram,
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
from tiercel.tiers.objects import ObjectsTier
from tiercel.tiers.url import TierUrl

_SERIAL = itertools.count()


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in USER.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as one:
        yield one


@pytest.fixture
def prefix() -> str:
    return f"store/{next(_SERIAL)}"


@pytest.fixture
def tier(server: S3Server, proxy: FaultProxy, prefix: str) -> ObjectsTier:
    return opened(server.url(port=proxy.port, prefix=prefix))


@pytest.fixture
def store(tier: ObjectsTier) -> Iterator[TieredStore]:
    one = make_store((tier, OPTIONS))
    yield one
    assert_nothing_leaked(one)
    started_s = time.monotonic()
    one.close()
    assert time.monotonic() - started_s < 5


def opened(url: str) -> ObjectsTier:
    return ObjectsTier.at(TierUrl.parse(url), name="objects", deadline_s=DEADLINE_S)


def test_what_one_store_wrote_another_finds_by_asking(
    store: TieredStore, server: S3Server, prefix: str
) -> None:
    other = make_store((opened(server.url(prefix=prefix)), OPTIONS))
    assert_another_finds_by_asking(store, other)
    other.close()


def test_a_store_that_starts_later_knows_what_lies_there(
    store: TieredStore, server: S3Server, prefix: str
) -> None:
    assert written(store, chain(BLOCKS))
    other = make_store((opened(server.url(prefix=prefix)), OPTIONS))
    assert get(other, chain(BLOCKS)) == ["objects"] * BLOCKS
    assert other.clear() == BLOCKS
    assert eventually(lambda: list(opened(server.url(prefix=prefix)).scan()) == [])
    other.close()


@pytest.mark.parametrize("fault", ["stopped", "swallowed", "refused", "cut"])
def test_d46_a_fault_costs_a_deadline_and_hits_come_back(
    store: TieredStore, server: S3Server, proxy: FaultProxy, fault: str
) -> None:
    start, end = {
        "stopped": (server.freeze, server.thaw),
        "swallowed": (lambda: proxy.set(down=BlackHole()), proxy.heal),
        "refused": (proxy.refuse, proxy.open),
        "cut": (lambda: proxy.set(down=Cut(100)), proxy.heal),
    }[fault]
    assert_a_fault_costs_a_deadline(store, start, end)


def test_d46_a_server_killed_and_emptied_is_a_miss_and_then_used_again(
    store: TieredStore, server: S3Server
) -> None:
    assert written(store, chain(BLOCKS))
    server.kill()
    server.wipe()
    try:
        assert get(store, chain(BLOCKS), deadline_s=5) == []
    finally:
        server.start()
    assert eventually(lambda: hits(store, chain(BLOCKS)), 40)


def test_a_bucket_that_is_not_there_yet_is_used_when_it_is(server: S3Server, prefix: str) -> None:
    bucket = f"late-{prefix.replace('/', '-')}"
    store = make_store((opened(server.url(bucket)), OPTIONS), scanned=False)
    assert put(store, chain(BLOCKS)) == BLOCKS
    assert get(store, chain(BLOCKS)) == ["ram"] * BLOCKS
    assert eventually(lambda: stats(store).counters.failed > 0)
    assert server.make_bucket(bucket) == 200
    assert eventually(lambda: hits(store, chain(BLOCKS, seed=3)), 40)
    store.close()


@pytest.mark.parametrize("gone", [(0,), (1, 3), (0, 1, 2, 3)], ids=str)
def test_d18_objects_deleted_behind_our_back_are_misses_and_forgotten(
    store: TieredStore, tier: ObjectsTier, server: S3Server, gone: tuple[int, ...]
) -> None:
    one = chain(BLOCKS)
    assert written(store, one)
    assert store.lookup(one, deadline_s=5).sources == ("objects",) * BLOCKS
    for index in gone:
        obstore.delete(server.bare(), tier.path(one.keys[index]))
    assert get(store, one) == ["objects"] * gone[0]
    assert eventually(lambda: stats(store).counters.missing > 0)
    assert stats(store).counters.failed == 0
    assert store.lookup(one, deadline_s=5).sources[gone[0] :] == ()
    assert eventually(lambda: hits(store, one))
    assert stats(store).counters.breaker_opened == 0


@pytest.mark.parametrize("at_byte", [900, 4096 + 500])
def test_d32_a_flipped_bit_is_a_miss_counted_and_dropped(
    store: TieredStore, tier: ObjectsTier, server: S3Server, at_byte: int
) -> None:
    one = chain(1)
    assert written(store, one)
    path = tier.path(one.keys[0])
    held = bytearray(obstore.get(server.bare(), path).bytes())
    held[at_byte] ^= 1
    obstore.put(server.bare(), path, bytes(held), use_multipart=False)
    assert get(store, one) == []
    assert stats(store).counters.corrupt == 1
    assert eventually(lambda: tier.contains(one.keys) == [False])
    assert written(store, one)
    assert get(store, one) == ["objects"]


def test_d32_a_bit_flipped_on_the_way_is_never_a_hit(store: TieredStore, proxy: FaultProxy) -> None:
    assert written(store, chain(1))
    proxy.set(down=Corrupt(2000))
    assert get(store, chain(1)) == []
    assert proxy.fired == 1


def test_another_blocks_record_under_the_name_is_a_miss(
    store: TieredStore, tier: ObjectsTier, server: S3Server
) -> None:
    one = chain(2)
    assert written(store, one)
    obstore.copy(server.bare(), tier.path(one.keys[0]), tier.path(one.keys[1]))
    assert get(store, one) == ["objects"]
    assert stats(store).counters.corrupt == 1


def test_d47_a_place_that_asks_to_slow_down_gets_fewer_requests_and_keeps_its_blocks() -> None:
    with StubS3() as stub:
        store = make_store((opened(stub.url()), OPTIONS))
        assert written(store, chain(BLOCKS))
        stub.say(Refuse(503), times=2)
        assert eventually(lambda: hits(store, chain(BLOCKS)))
        assert stub.said == 2
        stub.say(Refuse(503), times=100_000)
        assert get(store, chain(BLOCKS, seed=1)) == []
        drop_ram(store)
        assert get(store, chain(BLOCKS)) == []
        assert eventually(lambda: stats(store).counters.failed > 0)
        asked = len(stub.requests)
        for seed in range(20):
            get(store, chain(BLOCKS, seed=seed))
        # Without a pause and a breaker it would be several requests for each of eighty blocks.
        assert len(stub.requests) - asked < 40
        stub.hush()
        assert eventually(lambda: hits(store, chain(BLOCKS)), 40)
        started_s = time.monotonic()
        store.close()
        assert time.monotonic() - started_s < 5


def test_d47_refused_credentials_cost_nothing_but_the_hits() -> None:
    with StubS3() as stub:
        store = make_store((opened(stub.url()), OPTIONS))
        stub.say(Refuse(403, "AccessDenied"), times=100_000)
        assert put(store, chain(BLOCKS)) == BLOCKS
        assert get(store, chain(BLOCKS)) == ["ram"] * BLOCKS
        assert eventually(lambda: stats(store).counters.failed > 0)
        stub.hush()
        assert eventually(lambda: hits(store, chain(BLOCKS)), 40)
        store.close()
