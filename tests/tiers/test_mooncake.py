"""The `mooncake` tier against a real master and a real storage process, in a network of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from tests.servers.mooncake import Master, Peer, own_network, why_not
from tests.store.support import (
    RECORD,
    assert_nothing_leaked,
    drop_ram,
    eventually,
    get,
    make_store,
    put,
)
from tests.store.support import chain as small_chain

from tiercel.blocks import BlockKey, Header, record_bytes, verify
from tiercel.config import TierConfig
from tiercel.errors import TierUnreachable
from tiercel.store import LaneOptions
from tiercel.testing.conformance import CHAIN, TierContract, fates, read_one
from tiercel.testing.records import buffer, chain, record, records
from tiercel.tiers import Fate, Tier
from tiercel.tiers.mooncake import MooncakeTier, open_mooncake
from tiercel.tiers.mooncake_admin import key_of, named
from tiercel.tiers.registry import open_tier
from tiercel.tiers.reopening import Reopening
from tiercel.tiers.url import TierUrl

SKIP = why_not()
pytestmark = pytest.mark.skipif(SKIP is not None, reason=SKIP or "")

DEADLINE_S = 1.0
# A call waits for the master and then for the data, and a refused connection is tried again for some seconds.
CALL_S_MAX = 8.0
SEGMENT_BYTES = 64 << 20


class Pool:
    """A master, a storage process, and the tiers opened on them."""

    def __init__(self, folder: Path) -> None:
        self.master = Master(folder)
        self.peer = Peer(self.master, SEGMENT_BYTES)
        self.opened: list[Tier] = []

    def start(self) -> None:
        self.master.start()
        self.peer.start()

    def open(self, **params: object) -> Tier:
        url = TierUrl.parse(self.master.url(**params))
        tier = open_mooncake(url, name="pool", deadline_s=DEADLINE_S, slot_bytes=RECORD)
        self.opened.append(tier)
        return tier

    def close(self) -> None:
        for tier in self.opened:
            tier.close()
        self.peer.kill()
        self.master.kill()


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    with own_network():
        yield


@pytest.fixture(scope="module")
def shared(network: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("mooncake"))
    pool.start()
    yield pool
    pool.close()


@pytest.fixture
def pool(network: None, tmp_path: Path) -> Iterator[Pool]:
    """A pool of the test's own, to break."""
    pool = Pool(tmp_path)
    pool.start()
    yield pool
    pool.close()


class TestMooncakeTier(TierContract):
    @pytest.fixture
    def tier(self, shared: Pool) -> Iterator[Tier]:
        tier = shared.open()
        tier.delete([stored.key for stored in tier.scan()])
        yield tier
        tier.close()

    def test_writers_of_one_key_leave_one_valid_record_and_readers_never_see_half(self, tier: Tier) -> None:
        """Readers of a record that is replaced by other content may see half, and can tell that they did."""
        key = CHAIN.keys[0]
        payload_bytes = 256 << 10
        size = record_bytes(payload_bytes)
        wrote = [record(CHAIN, fill=fill, payload_bytes=payload_bytes) for fill in range(4)]
        whole = {bytes(one) for one in wrote}
        tier.write([key], [wrote[0]])
        stop = threading.Event()
        good: list[bool] = []

        def look() -> None:
            into = buffer(size)
            while not stop.is_set():
                (outcome,) = tier.read([key], [into])
                if outcome.fate is Fate.OK and isinstance(verify(into, key), Header):
                    good.append(bytes(into) in whole)
                else:
                    assert outcome.fate in (Fate.OK, Fate.MISSING)

        def write(one: memoryview) -> list[Fate]:
            return [tier.write([key], [one])[0].fate for _ in range(25)]

        with ThreadPoolExecutor(6) as threads:
            readers = [threads.submit(look) for _ in range(2)]
            writers = [threads.submit(write, one) for one in wrote]
            try:
                done = [fate for writer in writers for fate in writer.result()]
            finally:
                stop.set()
            for reader in readers:
                reader.result()
        assert good
        assert all(good)
        assert Fate.OK in done
        assert fates(tier.write([key], [wrote[2]])) == [Fate.OK]
        assert read_one(tier, key, size) == (Fate.OK, bytes(wrote[2]))


def test_the_same_content_is_not_sent_again(shared: Pool) -> None:
    tier = shared.open()
    key = CHAIN.keys[0]
    first, second = record(CHAIN, fill=7), record(CHAIN, fill=7)
    assert bytes(first) != bytes(second), "sealed at different times"
    tier.delete([key])
    assert fates(tier.write([key], [first])) == [Fate.OK]
    assert fates(tier.write([key], [second])) == [Fate.OK]
    assert read_one(tier, key) == (Fate.OK, bytes(first))
    assert fates(tier.write([key], [record(CHAIN, fill=8)])) == [Fate.OK]
    assert read_one(tier, key)[1][5000] == 8


def test_two_processes_see_each_others_records_under_one_prefix_only(shared: Pool) -> None:
    mine, theirs, others = shared.open(), shared.open(), shared.open(prefix="other:")
    keys, wrote = records(chain(4, first=900))
    mine.write(keys, wrote)
    assert theirs.contains(keys) == [True] * 4
    assert others.contains(keys) == [False] * 4
    assert {one.key for one in theirs.scan()} >= set(keys)
    assert list(others.scan()) == []


def test_foreign_names_in_the_pool_are_not_listed(shared: Pool) -> None:
    tier = shared.open()
    assert isinstance(tier, MooncakeTier)
    foreign = ["tiercel:../../etc/passwd", "tiercel:" + "F" * 64, "tiercel:", "x" * 64]
    tier._client.put_from(foreign, [record(CHAIN) for _ in foreign])
    assert set(foreign) <= set(shared.master.keys())
    tier.write([CHAIN.keys[3]], [record(CHAIN, 3)])
    listed = [one.key for one in tier.scan()]
    assert CHAIN.keys[3] in listed
    assert all(named("tiercel:", key) not in foreign for key in listed)
    assert all(key_of("tiercel:", name) is None for name in foreign)


def test_a_record_of_a_wrong_length_is_corrupt(shared: Pool) -> None:
    tier = shared.open()
    assert isinstance(tier, MooncakeTier)
    for at, length in enumerate((100, 4096 + 17)):
        key = CHAIN.keys[at]
        tier.delete([key])
        tier._client.put_from([named("tiercel:", key)], [buffer(length)])
        assert read_one(tier, key)[0] is Fate.CORRUPT


def test_listing_without_the_http_port_is_empty_and_all_else_works(shared: Pool) -> None:
    url = TierUrl.parse(f"mooncake://{shared.master.address}?admin=no")
    tier = open_mooncake(url, name="pool", deadline_s=DEADLINE_S, slot_bytes=RECORD)
    tier.write([CHAIN.keys[5]], [record(CHAIN, 5)])
    assert read_one(tier, CHAIN.keys[5])[0] is Fate.OK
    assert list(tier.scan()) == []
    tier.close()


def test_registered_memory_works_too(shared: Pool) -> None:
    """The way RDMA goes, over sockets: there is no RDMA device in the tests."""
    tier = shared.open(replicas=1, soft_pin="yes")
    assert isinstance(tier, MooncakeTier)
    object.__setattr__(tier._client.options, "protocol", "as-rdma")
    keys, wrote = records(chain(3, first=5000))
    assert fates(tier.write(keys, wrote)) == [Fate.OK] * 3
    assert read_one(tier, keys[2]) == (Fate.OK, bytes(wrote[2]))
    assert fates(tier.write(keys[:1], wrote[:1])) == [Fate.OK]


def test_a_segment_of_our_own_is_given_and_taken_back(pool: Pool) -> None:
    before = pool.master.segments()
    tier = pool.open(segment="20MB")
    assert pool.master.segments() == before + 1
    tier.close()
    assert eventually(lambda: pool.master.segments() == before)


def test_opened_from_a_configuration_and_required_or_not(pool: Pool) -> None:
    config = TierConfig(kind="mooncake", url=pool.master.url(), deadline_s=DEADLINE_S, required=True)
    tier = open_tier(config, "mooncake", RECORD)
    assert fates(tier.write([CHAIN.keys[0]], [record(CHAIN)])) == [Fate.OK]
    tier.close()
    pool.master.kill()
    with pytest.raises(TierUnreachable, match="does not answer") as caught:
        open_tier(config, "mooncake", RECORD)
    assert "\n" not in str(caught.value)
    later = open_tier(replace(config, required=False), "mooncake", RECORD)
    assert read_one(later, CHAIN.keys[0])[0] is Fate.FAILED
    pool.master.start()
    assert eventually(lambda: read_one(later, CHAIN.keys[0])[0] is Fate.MISSING)
    later.close()


def timed(call: object) -> object:
    """Make a call, which must end within its bound however the pool fares."""
    started_s = time.monotonic()
    answer = call()  # type: ignore[operator]
    assert time.monotonic() - started_s < CALL_S_MAX
    return answer


def fate_of_read(tier: Tier, key: BlockKey) -> Fate:
    return timed(lambda: read_one(tier, key)[0])  # type: ignore[return-value]


def fate_of_write(tier: Tier, key: BlockKey, one: memoryview) -> Fate:
    return timed(lambda: tier.write([key], [one])[0].fate)  # type: ignore[return-value]


def test_a_master_that_hangs_costs_the_deadline_and_no_more(pool: Pool) -> None:
    tier = pool.open()
    key, wrote = CHAIN.keys[0], record(CHAIN)
    assert fate_of_write(tier, key, wrote) is Fate.OK
    pool.master.stop()
    assert fate_of_read(tier, key) is Fate.FAILED
    assert fate_of_write(tier, CHAIN.keys[1], record(CHAIN, 1)) is Fate.FAILED
    assert timed(lambda: tier.delete([key])[0].fate) is Fate.FAILED
    with pytest.raises(OSError, match="does not answer"):
        timed(lambda: tier.contains([key]))
    with pytest.raises(OSError, match="HTTP port"):
        timed(lambda: list(tier.scan()))
    pool.master.go_on()
    # A master that slept longer than it waits for its clients takes them, and what they hold, for lost.
    assert eventually(lambda: fate_of_write(tier, key, wrote) is Fate.OK)
    assert eventually(lambda: fate_of_read(tier, key) is Fate.OK)


def test_opening_and_closing_with_a_master_that_hangs_stops_nothing(pool: Pool) -> None:
    tier = pool.open()
    pool.master.stop()
    beats: list[float] = []
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.01):
            beats.append(time.monotonic())

    heart = threading.Thread(target=beat)
    heart.start()
    with pytest.raises(TierUnreachable, match="HTTP port"):
        timed(pool.open)
    timed(tier.close)
    stop.set()
    heart.join()
    assert max(later - earlier for earlier, later in pairwise(beats)) < 1.0
    assert read_one(tier, CHAIN.keys[0])[0] is Fate.FAILED


def test_a_killed_master_that_comes_back_empty_is_used_again(pool: Pool) -> None:
    tier = pool.open()
    key = CHAIN.keys[0]
    assert fate_of_write(tier, key, record(CHAIN)) is Fate.OK
    pool.master.kill()
    assert fate_of_read(tier, key) is Fate.FAILED
    assert fate_of_write(tier, key, record(CHAIN)) is Fate.FAILED
    pool.master.start()
    assert eventually(lambda: fate_of_read(tier, key) is Fate.MISSING)
    assert eventually(lambda: fate_of_write(tier, key, record(CHAIN)) is Fate.OK)
    assert fate_of_read(tier, key) is Fate.OK


def test_a_killed_storage_process_fails_its_records_and_then_they_are_gone(pool: Pool) -> None:
    tier = pool.open()
    key = CHAIN.keys[0]
    assert fate_of_write(tier, key, record(CHAIN)) is Fate.OK
    pool.peer.kill()
    assert tier.contains([key]) == [True], "says exists and has nothing"
    assert fate_of_read(tier, key) is Fate.FAILED
    assert eventually(lambda: fate_of_read(tier, key) is Fate.MISSING)
    assert fate_of_write(tier, key, record(CHAIN)) is Fate.FULL
    pool.peer.start()
    assert eventually(lambda: fate_of_write(tier, key, record(CHAIN)) is Fate.OK)
    assert fate_of_read(tier, key) is Fate.OK


def test_a_storage_process_that_hangs_fails_and_nothing_arrives_late(pool: Pool) -> None:
    tier = pool.open()
    payload_bytes = 4 << 20
    keys = list(CHAIN.keys)
    wrote = [record(CHAIN, at, payload_bytes=payload_bytes) for at in range(8)]
    assert fates(tier.write(keys, wrote)) == [Fate.OK] * 8
    into = [buffer(len(one)) for one in wrote]
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(tier.read, keys, into)
        # About two blocks arrive before.
        time.sleep(0.004)
        pool.peer.stop()
        outcomes = reading.result(8 * CALL_S_MAX)
    assert Fate.FAILED in fates(outcomes)
    for outcome, key, one in zip(outcomes, keys, into, strict=True):
        assert outcome.fate is Fate.FAILED or isinstance(verify(one, key), Header)
    before = [bytes(one) for one in into]
    pool.peer.go_on()
    time.sleep(1.0)
    assert [bytes(one) for one in into] == before, "bytes came after the call had ended"
    assert eventually(lambda: set(fates(tier.read(keys, into))) <= {Fate.OK, Fate.MISSING})


def test_a_full_pool_says_so(pool: Pool) -> None:
    tier = pool.open()
    payload_bytes = 4 << 20
    one = chain(40, first=70_000)
    seen = [
        fate_of_write(tier, key, record(one, at, payload_bytes=payload_bytes))
        for at, key in enumerate(one.keys)
    ]
    assert seen[0] is Fate.OK
    assert Fate.FULL in seen
    assert set(seen) == {Fate.OK, Fate.FULL}


def test_a_pool_that_is_down_at_the_start_comes_later(network: None, tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    try:
        tier = Reopening("pool", pool.open, "not yet")
        assert fate_of_read(tier, CHAIN.keys[0]) is Fate.FAILED
        pool.start()
        assert eventually(lambda: fate_of_write(tier, CHAIN.keys[0], record(CHAIN)) is Fate.OK)
        assert fate_of_read(tier, CHAIN.keys[0]) is Fate.OK
        tier.close()
    finally:
        pool.close()


def test_a_store_over_a_pool_hits_after_its_ram_is_gone_and_clears_what_others_wrote(shared: Pool) -> None:
    options = LaneOptions(deadline_s=DEADLINE_S)
    with make_store((shared.open(), options)) as store, make_store((shared.open(), options)) as other:
        one = small_chain(6, seed=77)
        assert put(store, one) == 6
        assert store.flush(10)
        drop_ram(store)
        assert get(store, one) == ["pool"] * 6
        assert other.lookup(one, 1.0).blocks == 6
        assert get(other, one) == ["pool"] * 6
        drop_ram(other)
        later = small_chain(9, seed=77)
        put(other, later, start=6)
        assert other.flush(10)
        assert store.clear(one.root[:8], 10) >= 9
        assert store.lookup(later, 1.0).blocks == 0
        assert_nothing_leaked(store)


def test_a_store_whose_pool_hangs_goes_on_without_it_and_finds_it_again(pool: Pool) -> None:
    tier = pool.open()
    with make_store((tier, LaneOptions(deadline_s=DEADLINE_S))) as store:
        one = small_chain(6)
        put(store, one)
        assert store.flush(10)
        drop_ram(store)
        pool.master.stop()
        started_s = time.monotonic()
        assert get(store, one, DEADLINE_S) == []
        assert time.monotonic() - started_s < 2 * DEADLINE_S
        assert eventually(lambda: store.stats().tiers[0].counters.failed > 0)
        pool.master.go_on()
        # What failed is not asked for again for a while; what was never asked for is.
        again = small_chain(6, seed=5)
        assert eventually(lambda: put(store, again) + store.flush(5) > 0 and _in_pool(store, again))
        drop_ram(store)
        assert get(store, again) == ["pool"] * 6
        assert_nothing_leaked(store)


def _in_pool(store: object, of: object) -> bool:
    drop_ram(store)  # type: ignore[arg-type]
    return store.lookup(of, 1.0).blocks == 6  # type: ignore[attr-defined]
