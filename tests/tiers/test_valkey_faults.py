"""Every fault of a Valkey server and of the network before it: an outcome in time, no wrong bytes."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.servers.proxy import (
    BlackHole,
    Corrupt,
    Cut,
    Delay,
    FaultProxy,
    Throttle,
    Truncate,
    swallowing_port,
)
from tests.servers.valkey import ValkeyCluster, ValkeyServer, free_port
from tests.store.support import eventually

from tiercel.blocks import Header, verify
from tiercel.testing.records import buffer, chain, record, records
from tiercel.tiers import Fate
from tiercel.tiers.url import TierUrl
from tiercel.tiers.valkey import ValkeyTier, open_valkey

CHAIN = chain(8)
KEY = CHAIN.keys[0]
LARGE = 4 << 20
DEADLINE_S = 0.5
# A wait is over within its deadline; the rest is what two loaded cores add.
SOON_S = DEADLINE_S + 3.0


def open_at(port: int, parameters: str = "", deadline_s: float = DEADLINE_S) -> ValkeyTier:
    url = TierUrl.parse(f"valkey://127.0.0.1:{port}{parameters}")
    tier = open_valkey(url, name="valkey", deadline_s=deadline_s, slot_bytes=1 << 20)
    assert isinstance(tier, ValkeyTier)
    return tier


def fate(outcomes: list) -> Fate:
    (outcome,) = outcomes
    return outcome.fate


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path) as one:
        yield one


@pytest.fixture
def tier(proxy: FaultProxy) -> Iterator[ValkeyTier]:
    """A tier behind the proxy, with one large record in it."""
    one = open_at(proxy.port)
    large = open_at(proxy.port, deadline_s=30)
    assert fate(large.write([KEY], [record(CHAIN, payload_bytes=LARGE)])) is Fate.OK
    large.close()
    yield one
    one.close()


def read(tier: ValkeyTier) -> tuple[Fate, bool]:
    """What became of the large record, and whether the bytes are the record."""
    into = buffer(LARGE + (1 << 20))
    outcome = fate(tier.read([KEY], [into]))
    return outcome, isinstance(verify(into, KEY), Header)


def write(tier: ValkeyTier) -> Fate:
    return fate(tier.write([KEY], [record(CHAIN, payload_bytes=LARGE)]))


def everything_fails_soon(tier: ValkeyTier) -> None:
    """Each call of the protocol is over in time and says FAILED, or raises what it may."""
    for call in (lambda: tier.read([KEY], [buffer()])[0], lambda: tier.write([KEY], [record(CHAIN)])[0],
                 lambda: tier.delete([KEY])[0], lambda: tier.peek([KEY])[0]):  # fmt: skip
        started_s = time.monotonic()
        outcome = call()
        assert not isinstance(outcome, bytes)
        assert outcome.fate is Fate.FAILED
        assert outcome.reason
        assert time.monotonic() - started_s < SOON_S
    started_s = time.monotonic()
    with pytest.raises(OSError):
        tier.contains([KEY])
    with pytest.raises(OSError):
        list(tier.scan())
    assert tier.usage().free_bytes is None
    assert time.monotonic() - started_s < 3 * SOON_S


class TestNetwork:
    @pytest.mark.parametrize("after_bytes", [0, 1, 5, 9, 100, 5000, LARGE, LARGE + 4096])
    @pytest.mark.parametrize("fault", [Truncate, Cut])
    def test_a_read_that_ends_early_fails_and_the_next_is_right(
        self, tier: ValkeyTier, proxy: FaultProxy, fault: type[Truncate | Cut], after_bytes: int
    ) -> None:
        assert read(tier) == (Fate.OK, True)
        proxy.set(down=fault(after_bytes))
        assert read(tier)[0] is Fate.FAILED
        assert proxy.fired == 1
        proxy.heal()
        assert read(tier) == (Fate.OK, True)

    @pytest.mark.parametrize("after_bytes", [0, 50, 100_000, LARGE])
    def test_a_write_that_ends_early_fails_and_leaves_what_was_there(
        self, tier: ValkeyTier, proxy: FaultProxy, after_bytes: int
    ) -> None:
        assert read(tier) == (Fate.OK, True)
        proxy.set(up=Cut(after_bytes))
        assert write(tier) is Fate.FAILED
        assert proxy.fired == 1
        proxy.heal()
        assert read(tier) == (Fate.OK, True)
        assert write(tier) is Fate.OK

    @pytest.mark.parametrize("way", ["up", "down"])
    def test_d46_swallowed_packets_cost_one_deadline(
        self, tier: ValkeyTier, proxy: FaultProxy, way: str
    ) -> None:
        assert read(tier) == (Fate.OK, True)
        for act in (lambda: read(tier)[0], lambda: write(tier)):
            proxy.set(**{way: BlackHole(after_bytes=2)})
            started_s = time.monotonic()
            assert act() is Fate.FAILED
            assert time.monotonic() - started_s < SOON_S
            proxy.heal()
            assert eventually(lambda: read(tier) == (Fate.OK, True))
        assert proxy.fired >= 2

    def test_nothing_waits_longer_than_the_deadline(self, tier: ValkeyTier, proxy: FaultProxy) -> None:
        proxy.set(up=BlackHole())
        everything_fails_soon(tier)
        assert proxy.fired
        proxy.heal()
        assert eventually(lambda: read(tier) == (Fate.OK, True))

    def test_an_answer_that_comes_late_is_nobodys(self, tier: ValkeyTier, proxy: FaultProxy) -> None:
        small = records(CHAIN)
        assert read(tier) == (Fate.OK, True)
        proxy.set(down=Delay(2 * DEADLINE_S))
        assert read(tier)[0] is Fate.FAILED
        proxy.heal()
        # Now the late record is under way: it must not be taken for the answer to any of these.
        assert eventually(lambda: fate(tier.write(small[0][1:2], small[1][1:2])) is Fate.OK)
        for _ in range(20):
            into = buffer()
            assert fate(tier.read(small[0][1:2], [into])) is Fate.OK
            assert bytes(into) == bytes(small[1][1])
        assert proxy.fired

    def test_a_trickle_is_bounded_by_the_deadline_too(self, tier: ValkeyTier, proxy: FaultProxy) -> None:
        assert read(tier) == (Fate.OK, True)
        proxy.set(up=Throttle(500_000), down=Throttle(500_000))
        for act in (lambda: read(tier)[0], lambda: write(tier)):
            started_s = time.monotonic()
            assert act() is Fate.FAILED
            assert time.monotonic() - started_s < SOON_S

    def test_d32_a_bit_that_flips_anywhere_is_never_the_record(
        self, tier: ValkeyTier, proxy: FaultProxy
    ) -> None:
        assert read(tier) == (Fate.OK, True)
        seen = set()
        end = len(b"$4198400\r\n") + LARGE + 4096
        places = [0, 1, 2, 3, 8, 9, 10, 11, 100, 5000, LARGE // 2, end - 1, end, end + 1]
        for at_byte in places:
            proxy.set(down=Corrupt(at_byte))
            outcome, right = read(tier)
            assert proxy.fired
            assert not (outcome is Fate.OK and right), at_byte
            seen.add(outcome)
            proxy.heal()
            assert eventually(lambda: read(tier) == (Fate.OK, True))
        assert seen >= {Fate.OK, Fate.FAILED}
        assert proxy.fired == len(places)

    def test_a_bit_that_flips_on_the_way_there_is_seen_on_the_way_back(
        self, tier: ValkeyTier, proxy: FaultProxy
    ) -> None:
        assert read(tier) == (Fate.OK, True)
        for at_byte in (60, 100, 130, 5000):
            proxy.set(up=Corrupt(at_byte))
            write(tier)
            proxy.heal()
            outcome, right = read(tier)
            assert not right or outcome is Fate.OK
            assert eventually(lambda: write(tier) is Fate.OK)
        assert proxy.fired == 4

    def test_a_connection_that_died_while_idle_is_not_even_noticed(
        self, tier: ValkeyTier, proxy: FaultProxy
    ) -> None:
        for _ in range(3):
            assert read(tier) == (Fate.OK, True)
            proxy.reset_connections()
            time.sleep(0.2)
        assert read(tier) == (Fate.OK, True)
        assert proxy.connections >= 4

    def test_a_port_that_swallows_connections_costs_one_deadline_at_start_and_later(self) -> None:
        with swallowing_port() as port:
            started_s = time.monotonic()
            tier = open_at(port)
            assert time.monotonic() - started_s < SOON_S
            everything_fails_soon(tier)
            tier.close()

    def test_a_node_that_is_down_is_left_alone_for_a_while(self) -> None:
        with swallowing_port() as port:
            tier = open_at(port)
            tier.read([KEY], [buffer()])
            started_s = time.monotonic()
            assert [fate(tier.read([KEY], [buffer()])) for _ in range(3)] == [Fate.FAILED] * 3
            assert time.monotonic() - started_s < 3 * DEADLINE_S
            tier.close()

    def test_closing_ends_what_waits(self, tier: ValkeyTier, proxy: FaultProxy) -> None:
        patient = open_at(proxy.port, deadline_s=60)
        assert read(patient) == (Fate.OK, True)
        proxy.set(down=BlackHole())
        seen: list[Fate] = []
        waiting = threading.Thread(target=lambda: seen.append(read(patient)[0]))
        waiting.start()
        assert eventually(lambda: proxy.fired > 0)
        patient.close()
        waiting.join(10)
        assert seen == [Fate.FAILED]


class TestServer:
    def test_down_at_start_and_there_later(self, tmp_path: Path) -> None:
        server = ValkeyServer(tmp_path)
        tier = open_at(server.port)
        everything_fails_soon(tier)
        with server:
            assert eventually(lambda: fate(tier.write([KEY], [record(CHAIN)])) is Fate.OK)
            assert fate(tier.read([KEY], [buffer()])) is Fate.OK
        tier.close()

    def test_restarted_empty_it_misses_and_goes_on(self, server: ValkeyServer, tier: ValkeyTier) -> None:
        assert read(tier) == (Fate.OK, True)
        server.kill()
        server.start()
        assert eventually(lambda: read(tier)[0] is Fate.MISSING)
        assert list(tier.scan()) == []
        assert write(tier) is Fate.OK
        assert read(tier) == (Fate.OK, True)

    @pytest.mark.parametrize("way", ["up", "down"])
    def test_d46_killed_in_the_middle(
        self, server: ValkeyServer, tier: ValkeyTier, proxy: FaultProxy, way: str
    ) -> None:
        """The proxy holds the rest back, so that the middle is where the server dies."""
        # More than all socket buffers on the way hold.
        larger = record(CHAIN, payload_bytes=64 << 20)
        patient = open_at(proxy.port, deadline_s=60)
        assert fate(patient.write([KEY], [larger])) is Fate.OK
        proxy.set(**{way: BlackHole(after_bytes=1 << 20)})
        seen: list[Fate] = []
        call = patient.write if way == "up" else patient.read
        act = lambda: fate(call([KEY], [larger]))  # noqa: E731
        running = threading.Thread(target=lambda: seen.append(act()))
        running.start()
        assert eventually(lambda: proxy.fired > 0)
        server.kill()
        proxy.heal()
        running.join(30)
        assert seen == [Fate.FAILED]
        server.start()
        assert eventually(lambda: read(patient)[0] is Fate.MISSING)
        assert write(patient) is Fate.OK
        patient.close()

    def test_stopped_where_it_stands_it_costs_one_deadline(self, server: ValkeyServer) -> None:
        tier = open_at(server.port)
        tier.write([KEY], [record(CHAIN)])
        server.pause()
        try:
            everything_fails_soon(tier)
        finally:
            server.resume()
        assert eventually(lambda: fate(tier.read([KEY], [buffer()])) is Fate.OK)
        tier.close()

    def test_a_server_that_takes_no_writes_for_want_of_replicas_is_full(self, tmp_path: Path) -> None:
        with ValkeyServer(tmp_path, min_replicas_to_write="1") as lonely:
            tier = open_at(lonely.port)
            (outcome,) = tier.write([KEY], [record(CHAIN)])
            assert outcome.fate is Fate.FULL
            assert "replicas" in outcome.reason
            assert fate(tier.read([KEY], [buffer()])) is Fate.MISSING
            tier.close()

    def test_permission_that_is_lost_fails_and_comes_back(self, server: ValkeyServer) -> None:
        with server.client() as client:
            client.execute_command("ACL SETUSER kv on >pw ~tiercel:* +@all")
            url = TierUrl.parse(f"valkey://kv:pw@127.0.0.1:{server.port}")
            tier = open_valkey(url, name="valkey", deadline_s=5, slot_bytes=1 << 20)
            assert fate(tier.write([KEY], [record(CHAIN)])) is Fate.OK
            client.execute_command("ACL SETUSER kv -get -set")
            (outcome,) = tier.read([KEY], [buffer()])
            assert outcome.fate is Fate.FAILED
            assert outcome.reason.startswith("the server says: NOPERM")
            assert fate(tier.write([KEY], [record(CHAIN)])) is Fate.FAILED
            client.execute_command("ACL SETUSER kv +get +set")
            assert fate(tier.read([KEY], [buffer()])) is Fate.OK
            tier.close()

    def test_something_else_on_the_port_fails(self) -> None:
        import http.server

        web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
        web.RequestHandlerClass.log_message = lambda *_: None  # type: ignore[method-assign]
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        try:
            everything_fails_soon(open_at(web.server_port))
        finally:
            web.shutdown()
            web.server_close()
            thread.join()


class TestPlanted:
    """What others may have put under our names."""

    @pytest.fixture
    def plain(self, server: ValkeyServer) -> Iterator[ValkeyTier]:
        tier = open_at(server.port, deadline_s=5)
        assert fate(tier.write([KEY], [record(CHAIN)])) is Fate.OK
        assert fate(tier.read([KEY], [buffer()])) is Fate.OK
        yield tier
        tier.close()

    def test_d10_a_planted_pickle_is_corrupt_and_never_runs(
        self, plain: ValkeyTier, server: ValkeyServer, tmp_path: Path
    ) -> None:
        ran = tmp_path / "ran"
        # Protocol 0: os.system("touch ..."); also in a page's length, so that it gets as far as it may.
        evil = f"cos\nsystem\n(S'touch {ran}'\ntR.".encode()
        with server.client() as client:
            for planted in (evil, evil.ljust(4096, b"\0"), evil.ljust(8192, b"\0")):
                client.set(f"tiercel:{KEY.hex()}", planted)
                into = buffer()
                outcome = fate(plain.read([KEY], [into]))
                assert outcome in (Fate.CORRUPT, Fate.OK)
                assert not isinstance(verify(into, KEY), Header)
                assert (outcome is Fate.OK) == (len(planted) % 4096 == 0)
        assert not ran.exists()
        assert fate(plain.write([KEY], [record(CHAIN)])) is Fate.OK

    def test_an_oversized_value_is_corrupt_without_being_taken(
        self, plain: ValkeyTier, server: ValkeyServer
    ) -> None:
        with server.client() as client:
            client.setrange(f"tiercel:{KEY.hex()}", (256 << 20) - 1, b"x")
            for into in (buffer(), buffer(1 << 20)):
                (outcome,) = plain.read([KEY], [into])
                assert outcome.fate is Fate.CORRUPT
                assert outcome.reason == f"value has {256 << 20} bytes"
                assert bytes(into).count(0) == len(into)
        assert fate(plain.delete([KEY])) is Fate.OK
        assert fate(plain.read([KEY], [buffer()])) is Fate.MISSING

    def test_another_keys_record_is_never_this_one(self, plain: ValkeyTier, server: ValkeyServer) -> None:
        with server.client() as client:
            client.set(f"tiercel:{KEY.hex()}", bytes(record(CHAIN, 1)))
        into = buffer()
        plain.read([KEY], [into])
        assert verify(into, KEY) == "another block's record"

    def test_a_value_of_another_kind_is_corrupt_and_can_be_deleted(
        self, plain: ValkeyTier, server: ValkeyServer
    ) -> None:
        name = f"tiercel:{KEY.hex()}"
        with server.client() as client:
            client.delete(name)
            client.rpush(name, "a", "b")
        assert fate(plain.read([KEY], [buffer()])) is Fate.CORRUPT
        assert list(plain.scan()) == []
        assert fate(plain.delete([KEY])) is Fate.OK
        assert fate(plain.read([KEY], [buffer()])) is Fate.MISSING

    def test_hostile_names_are_no_records(self, plain: ValkeyTier, server: ValkeyServer) -> None:
        ends = [b"", b"g" * 64, b"A" * 64, b"0" * 63, b"0" * 64 + b"\n", b"../../etc/passwd",
                b"\r\n$3\r\nfoo\r\n", b"\0" * 64, b"1" * 1_000_000]  # fmt: skip
        hostile = [b"xtiercel:" + b"0" * 64, *(b"tiercel:" + end for end in ends)]
        with server.client() as client:
            for name in hostile:
                client.set(name, "x")
        assert [stored.key for stored in plain.scan()] == [KEY]
        assert fate(plain.read([KEY], [buffer()])) is Fate.OK


SAID = [
    b"$99999999999999999999\r\n", b"$4096\r\nshort", b"*1000000000\r\n", b"*1\r\n" * 50, b":\r\n", b"$-5\r\n",
    b"$4096\r\n" + bytes(4096) + b"xx", b"-MOVED\r\n", b"-MOVED 1 :0\r\n", b"-ASK 1 \r\n", b"\r\n\r\n",
    b"$" + b"1" * 5000, b"+OK\r\n" * 100, b"$12288\r\n", b"_\r\n", b"$-1\r\n", b"*0\r\n",
]  # fmt: skip


class TestGarbage:
    """A server that says anything: RESP is parsed with every length distrusted."""

    @given(said=st.binary(max_size=200) | st.sampled_from(SAID))
    def test_whatever_it_says_nothing_breaks(self, said: bytes) -> None:
        import socket

        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(5)

            def serve() -> None:
                try:
                    for _ in range(3):
                        connection, _ = listener.accept()
                        with connection:
                            # A login that goes well, then the garbage for whatever comes next.
                            connection.recv(1 << 16)
                            connection.sendall(b"+OK\r\n*0\r\n")
                            connection.recv(1 << 16)
                            connection.sendall(said)
                except OSError:
                    return

            thread = threading.Thread(target=serve)
            thread.start()
            tier = open_at(listener.getsockname()[1], deadline_s=0.3)
            into = buffer()
            outcome = fate(tier.read([KEY], [into]))
            assert not isinstance(verify(into, KEY), Header)
            assert isinstance(outcome, Fate)
            tier.close()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)


class TestClusterNode:
    @pytest.fixture
    def cluster(self, tmp_path: Path) -> Iterator[ValkeyCluster]:
        with ValkeyCluster(tmp_path) as three:
            yield three

    def test_d49_a_node_that_is_down_is_avoided_and_its_keys_are_misses_until_it_is_back(
        self, cluster: ValkeyCluster
    ) -> None:
        tier = open_at(cluster.port, deadline_s=2.0)
        many = chain(30)
        keys, wrote = list(many.keys), [record(many, at) for at in range(30)]
        assert [outcome.fate for outcome in tier.write(keys, wrote)] == [Fate.OK] * 30
        lost = [at for at, key in enumerate(keys) if cluster.place(f"tiercel:{key.hex()}")[1] == 2]
        assert 0 < len(lost) < 30
        cluster.servers[2].pause()
        try:
            tier.read([keys[lost[0]]], [buffer()])
            started_s = time.monotonic()
            outcomes = tier.read(keys, [buffer() for _ in keys])
            assert time.monotonic() - started_s < 10
            for at, outcome in enumerate(outcomes):
                assert outcome.fate is not Fate.OK if at in lost else outcome.fate is Fate.OK
            assert eventually(lambda: tier.contains(keys) == [at not in lost for at in range(30)])
            assert fate(tier.read([keys[lost[0]]], [buffer()])) in (Fate.MISSING, Fate.FAILED)
        finally:
            cluster.servers[2].resume()
        assert eventually(lambda: tier.contains(keys) == [True] * 30)
        assert [one.fate for one in tier.read(keys, [buffer() for _ in keys])] == [Fate.OK] * 30
        tier.close()

    def test_the_node_of_the_url_may_die(self, cluster: ValkeyCluster) -> None:
        tier = open_at(cluster.port, deadline_s=2.0)
        many = chain(30)
        keys = list(many.keys)
        tier.write(keys, [record(many, at) for at in range(30)])
        kept = [at for at, key in enumerate(keys) if cluster.place(f"tiercel:{key.hex()}")[1] != 0]
        cluster.servers[0].kill()

        def reads() -> list[Fate]:
            return [one.fate for one in tier.read([keys[at] for at in kept], [buffer() for _ in kept])]

        assert eventually(lambda: reads() == [Fate.OK] * len(kept))
        tier.close()


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 12))])
def test_under_random_faults_and_threads_ok_means_the_very_record(
    server: ValkeyServer, proxy: FaultProxy, seed: int
) -> None:
    """No fault here changes bytes, so every OK must be right; whatever connections go through."""
    tier = open_at(proxy.port, deadline_s=0.2)
    keys, wrote = records(CHAIN)
    right = [bytes(one) for one in wrote]
    wrong: list[str] = []
    counts: Counter[tuple[str, Fate]] = Counter()
    stop = threading.Event()

    def work(number: int) -> None:
        chance = random.Random(seed * 100 + number)
        into = buffer()
        while not stop.is_set():
            at = chance.randrange(len(keys))
            if chance.random() < 0.3:
                counts["write", fate(tier.write([keys[at]], [wrote[at]]))] += 1
                continue
            seen = fate(tier.read([keys[at]], [into]))
            counts["read", seen] += 1
            if seen not in (Fate.OK, Fate.MISSING, Fate.FAILED) or (
                seen is Fate.OK and bytes(into) != right[at]
            ):
                wrong.append(f"{seen} at {at}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    chance = random.Random(seed)
    for _ in range(15):
        fault = chance.choice([Truncate, Cut, BlackHole, Delay, None])
        made = None if fault is None else fault(0.3 if fault is Delay else chance.randrange(40_000))
        proxy.set(**{chance.choice(["up", "down"]): made})
        time.sleep(chance.uniform(0.05, 0.4))
    proxy.heal()
    assert eventually(lambda: fate(tier.read([keys[0]], [buffer()])) is Fate.OK)
    stop.set()
    for thread in threads:
        thread.join(10)
    tier.close()
    assert wrong == []
    assert proxy.fired
    assert counts["read", Fate.OK]
    assert counts["read", Fate.FAILED]


def test_nobody_listens() -> None:
    tier = open_at(free_port())
    (outcome,) = tier.read([KEY], [buffer()])
    assert outcome.fate is Fate.FAILED
    assert "refused" in outcome.reason
    tier.close()


def test_nothing_is_left_open(server: ValkeyServer) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(20):
        tier = open_at(server.port)
        tier.write(*records(CHAIN))
        tier.read([KEY], [buffer(4096)])
        tier.close()
    assert count() <= before + 1
