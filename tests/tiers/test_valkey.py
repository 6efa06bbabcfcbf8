"""The `valkey` tier against real servers: the contract on every way to reach one, and what only it can do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.servers.tls import Certificate, TlsFront, make_certificate
from tests.servers.valkey import ValkeyCluster, ValkeyServer, free_port
from tests.store.support import eventually

from tiercel.blocks import PAGE_BYTES, BlockKey
from tiercel.config import TierConfig
from tiercel.errors import TierError, TierUnreachable
from tiercel.testing.conformance import TierContract
from tiercel.testing.records import RECORD_BYTES, buffer, chain, record, records
from tiercel.tiers import Fate, Stored, Tier, Usage
from tiercel.tiers.extras import Peeks
from tiercel.tiers.registry import open_tier
from tiercel.tiers.url import TierUrl
from tiercel.tiers.valkey import ValkeyTier, open_valkey

CHAIN = chain(8)
SECRET = "s3cr#t/p@ss"
QUOTED = "s3cr%23t%2Fp%40ss"


def open_at(url: str, *, deadline_s: float = 10.0, slot_bytes: int = 1 << 20) -> ValkeyTier:
    tier = open_valkey(TierUrl.parse(url), name="valkey", deadline_s=deadline_s, slot_bytes=slot_bytes)
    assert isinstance(tier, ValkeyTier)
    return tier


def named(key: BlockKey) -> str:
    return f"tiercel:{key.hex()}"


def fates(outcomes: list) -> list[Fate]:
    return [outcome.fate for outcome in outcomes]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as one:
        yield one


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyCluster]:
    with ValkeyCluster(tmp_path_factory.mktemp("cluster")) as three:
        yield three


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def opened(server: ValkeyServer) -> Iterator[Callable[..., ValkeyTier]]:
    """Opens tiers on an emptied server, and closes them."""
    with server.client() as client:
        client.flushall()
    tiers: list[ValkeyTier] = []

    def at(parameters: str = "", **options: float) -> ValkeyTier:
        tiers.append(open_at(f"valkey://127.0.0.1:{server.port}{parameters}", **options))
        return tiers[-1]

    yield at
    for tier in tiers:
        tier.close()


def emptied(tier: ValkeyTier) -> Iterator[Tier]:
    tier.delete([stored.key for stored in tier.scan()])
    yield tier
    tier.close()


class TestTcp(TierContract):
    @pytest.fixture
    def tier(self, server: ValkeyServer) -> Iterator[Tier]:
        yield from emptied(open_at(f"valkey://127.0.0.1:{server.port}"))


class TestUnixSocket(TierContract):
    @pytest.fixture
    def tier(self, server: ValkeyServer) -> Iterator[Tier]:
        yield from emptied(open_at(f"valkey://{server.socket}?db=3"))


class TestCluster(TierContract):
    @pytest.fixture
    def tier(self, cluster: ValkeyCluster) -> Iterator[Tier]:
        yield from emptied(open_at(f"valkey://127.0.0.1:{cluster.port}"))


class TestTls(TierContract):
    """The packaged server speaks no TLS; a front that does stands before it."""

    @pytest.fixture
    def tier(self, server: ValkeyServer, certificate: Certificate) -> Iterator[Tier]:
        with TlsFront(server.port, certificate) as front:
            yield from emptied(open_at(f"valkeys://localhost:{front.port}?ca={certificate.cert}"))
            assert set(front.versions) == {"TLSv1.3"}


class TestUserOfAnAcl(TierContract):
    """A user who may touch the names of the tier only, and run what it needs only."""

    @pytest.fixture
    def tier(self, server: ValkeyServer) -> Iterator[Tier]:
        may = "+get +getex +getrange +set +exists +unlink +scan +strlen +object|idletime +select".split()
        with server.client() as client:
            client.execute_command(
                "ACL", "SETUSER", "kv", "reset", "on", f">{SECRET}", "~tiercel:*", *may,
                "+client|setname", "+client|no-touch",
            )  # fmt: skip
        yield from emptied(open_at(f"valkey://kv:{QUOTED}@127.0.0.1:{server.port}/1?ttl=1h"))


class TestEntering:
    def test_a_wrong_password_is_one_clear_line_without_it(self, server: ValkeyServer) -> None:
        with server.client() as client:
            client.acl_setuser("someone", enabled=True, passwords=["+right"])
        with pytest.raises(TierError) as refused:
            open_at(f"valkey://someone:{QUOTED}@127.0.0.1:{server.port}")
        text = str(refused.value)
        assert "user 'someone' is refused (WRONGPASS)" in text
        assert SECRET not in text
        assert QUOTED not in text
        assert "\n" not in text

    def test_a_server_that_wants_a_password_says_so(self, tmp_path: Path) -> None:
        with ValkeyServer(tmp_path, requirepass=SECRET) as guarded:
            with pytest.raises(TierError, match="wants a password"):
                open_at(f"valkey://127.0.0.1:{guarded.port}")
            (tmp_path / "secret").write_text(SECRET + "\n")
            for url in (
                f":{QUOTED}@127.0.0.1:{guarded.port}",
                f"127.0.0.1:{guarded.port}?password_file={tmp_path}/secret",
            ):
                tier = open_at(f"valkey://{url}")
                assert tier.contains(CHAIN.keys) == [False] * 8
                assert SECRET not in repr(vars(tier)["_nodes"]._login)
                tier.close()

    def test_a_password_file_is_read_again_after_a_rotation(self, tmp_path: Path) -> None:
        with ValkeyServer(tmp_path, requirepass="old") as guarded:
            secret = tmp_path / "secret"
            secret.write_text("old")
            tier = open_at(f"valkey://127.0.0.1:{guarded.port}?password_file={secret}")
            with guarded.client(password="old") as client:
                client.config_set("requirepass", "new")
                secret.write_text("new")
                client.client_kill_filter(_type="normal", skipme=True)
            assert tier.contains(CHAIN.keys[:1]) == [False]
            tier.close()

    def test_a_database_that_is_not_there_is_refused(self, server: ValkeyServer) -> None:
        with pytest.raises(TierError, match="database 99 is refused"):
            open_at(f"valkey://127.0.0.1:{server.port}/99")

    def test_an_unknown_certificate_is_refused_and_nothing_is_sent(
        self, server: ValkeyServer, certificate: Certificate, tmp_path: Path
    ) -> None:
        other = make_certificate(tmp_path, "other")
        with TlsFront(server.port, certificate) as front:
            with pytest.raises(TierError, match="its certificate is refused"):
                open_at(f"valkeys://127.0.0.1:{front.port}?ca={other.cert}")
            with pytest.raises(TierError, match="its certificate is refused"):
                open_at(f"valkeys://127.0.0.1:{front.port}?ca={certificate.cert}&tls_name=elsewhere")
            open_at(f"valkeys://127.0.0.1:{front.port}?ca={certificate.cert}&tls_name=localhost").close()

    def test_a_client_shows_its_certificate_where_one_is_wanted(
        self, server: ValkeyServer, certificate: Certificate, tmp_path: Path
    ) -> None:
        mine = make_certificate(tmp_path, "mine")
        with TlsFront(server.port, certificate, client_ca=mine.cert) as front:
            url = f"valkeys://127.0.0.1:{front.port}?ca={certificate.cert}"
            tier = open_at(f"{url}&cert={mine.cert}&key={mine.key}")
            assert fates(tier.write(*records(CHAIN))) == [Fate.OK] * 8
            tier.close()
            bare = open_at(url)
            assert fates(bare.read(CHAIN.keys[:1], [buffer()])) == [Fate.FAILED]
            bare.close()

    @pytest.mark.parametrize(
        ("url", "says"),
        [
            ("http://h", "scheme 'http' is not accepted; accepted: valkey, valkeys, redis, rediss"),
            ("valkey://", "names no server"),
            ("valkey://h/x", "'/x' is not accepted; accepted: one database number"),
            ("valkey://h/1?db=2", "accepted: one database number"),
            ("valkey://h?prefix=a{b}", "parameter 'prefix': is not accepted"),
            ("valkey://h?ttl=0.2s", "parameter 'ttl'"),
            ("valkey://h?tll=1d", "parameter 'tll' is unknown; did you mean 'ttl'"),
            ("valkey://h?ca=/nowhere", "parameter 'ca': goes with TLS only"),
            ("valkeys://h?ca=/nowhere", "parameter 'ca': '/nowhere' cannot be used: No such file"),
            ("valkeys://h?cert=/nowhere", "parameter 'cert': '/nowhere' cannot be used: No such file"),
            ("valkey://u:p@h?password_file=/f", "is given beside a password"),
        ],
    )
    def test_a_bad_url_is_one_line(self, url: str, says: str) -> None:
        with pytest.raises(TierError) as refused:
            open_at(url)
        assert says in str(refused.value)
        assert "\n" not in str(refused.value)

    def test_required_it_must_be_there_at_the_start(self, server: ValkeyServer) -> None:
        def opened(port: int) -> Tier:
            url = f"valkey://:{QUOTED}@127.0.0.1:{port}"
            return open_tier(TierConfig(kind="valkey", url=url, required=True), "valkey", RECORD_BYTES)

        with pytest.raises(TierUnreachable) as refused:
            opened(free_port())
        assert " cannot be used: " in str(refused.value)
        assert "Connection refused" in str(refused.value)
        assert QUOTED not in str(refused.value)
        with pytest.raises(TierError, match="is refused"):
            opened(server.port)


class TestKeeping:
    def test_every_name_stands_under_the_prefix_and_nothing_else_is_touched(
        self, opened: Callable[..., ValkeyTier], server: ValkeyServer
    ) -> None:
        with server.client() as client:
            client.set("theirs", "1")
            tier = opened("?prefix=kv/7:")
            keys, wrote = records(CHAIN)
            tier.write(keys, wrote)
            assert server.names() == sorted([b"theirs", *(b"kv/7:" + key.hex().encode() for key in keys)])
            tier.delete([stored.key for stored in tier.scan()])
            assert server.names() == [b"theirs"]

    def test_two_prefixes_and_two_databases_share_a_server_apart(
        self, opened: Callable[..., ValkeyTier]
    ) -> None:
        tiers = [opened("?prefix=a:"), opened("?prefix=b:"), opened("/5")]
        for number, tier in enumerate(tiers):
            tier.write(CHAIN.keys[number : number + 1], [record(CHAIN, number)])
        for number, tier in enumerate(tiers):
            assert [stored.key for stored in tier.scan()] == [CHAIN.keys[number]]

    def test_d51_names_are_short_whatever_the_model_and_salt_are_called(
        self, opened: Callable[..., ValkeyTier], server: ValkeyServer
    ) -> None:
        long = [chain(1, model="m/" * 100, salt="s" * 127 + end) for end in "ab"]
        tier = opened()
        for one in long:
            tier.write(list(one.keys), [record(one)])
        assert len(server.names()) == 2
        assert {len(name) for name in server.names()} == {len("tiercel:") + 64}

    def test_d50_a_time_to_live_ends_a_record_and_its_use_prolongs_it(
        self, opened: Callable[..., ValkeyTier], server: ValkeyServer
    ) -> None:
        sliding, fixed = opened("?prefix=a:&ttl=100s"), opened("?prefix=b:&ttl=100s&ttl_refresh=no")
        (key,), wrote = CHAIN.keys[:1], [record(CHAIN)]
        with server.client() as client:
            for tier, prefix, after in ((sliding, "a:", 100), (fixed, "b:", 50)):
                tier.write([key], wrote)
                assert 98 <= client.ttl(prefix + key.hex()) <= 100
                client.expire(prefix + key.hex(), 50)
                assert fates(tier.read([key], [buffer()])) == [Fate.OK]
                assert after - 2 <= client.ttl(prefix + key.hex()) <= after
                client.pexpire(prefix + key.hex(), 1)
                time.sleep(0.05)
                assert fates(tier.read([key], [buffer()])) == [Fate.MISSING]
                assert tier.contains([key]) == [False]
                assert list(tier.scan()) == []

    def test_without_a_time_to_live_nothing_expires(
        self, opened: Callable[..., ValkeyTier], server: ValkeyServer
    ) -> None:
        opened().write(CHAIN.keys[:1], [record(CHAIN)])
        with server.client() as client:
            assert client.ttl(server.names()[0]) == -1

    def test_a_listing_tells_the_last_use_and_is_none(
        self, opened: Callable[..., ValkeyTier], server: ValkeyServer
    ) -> None:
        tier = opened()
        tier.write(CHAIN.keys[:1], [record(CHAIN)])
        time.sleep(2.1)
        for _ in range(2):
            (stored,) = tier.scan()
            assert isinstance(stored, Stored)
            assert stored.used_s < time.time() - 0.9

    def test_more_records_than_a_page_and_a_batch_hold(self, opened: Callable[..., ValkeyTier]) -> None:
        many = chain(700)
        tier = opened()
        tier.write(list(many.keys), [record(many, index, payload_bytes=16) for index in range(700)])
        assert tier.contains(many.keys) == [True] * 700
        assert sorted(stored.key for stored in tier.scan()) == sorted(many.keys)
        assert fates(tier.delete(many.keys)) == [Fate.OK] * 700

    def test_it_peeks_at_headers(self, opened: Callable[..., ValkeyTier]) -> None:
        tier = opened()
        assert isinstance(tier, Peeks)
        tier.write(CHAIN.keys[:1], [wrote := record(CHAIN)])
        assert tier.peek(CHAIN.keys[:1]) == [bytes(wrote[:4096])]
        (missing,) = tier.peek(CHAIN.keys[1:2])
        assert not isinstance(missing, bytes)
        assert missing.fate is Fate.MISSING

    def test_it_holds_no_more_connections_than_callers(
        self, opened: Callable[..., ValkeyTier], server: ValkeyServer
    ) -> None:
        tier = opened()
        for _ in range(20):
            tier.write(*records(CHAIN))
            list(tier.scan())
        with server.client() as client:

            def ours() -> int:
                return [one["name"] for one in client.client_list()].count("tiercel")

            # A server notices a moment later that a connection was closed.
            assert eventually(lambda: ours() == 1)
            tier.close()
            assert eventually(lambda: ours() == 0)


class TestRoom:
    def test_a_full_server_is_full_and_still_reads(self, tmp_path: Path) -> None:
        with ValkeyServer(tmp_path, maxmemory="8mb", maxmemory_policy="noeviction") as small:
            tier = open_at(f"valkey://127.0.0.1:{small.port}")
            assert (tier.usage().total_bytes, tier.usage().free_bytes) > (8 << 20, 1 << 20)
            many = chain(40)
            wrote = [record(many, index, payload_bytes=512 << 10) for index in range(40)]
            outcomes = tier.write(many.keys, wrote)
            assert fates(outcomes[:5]) == [Fate.OK] * 5
            assert outcomes[-1].fate is Fate.FULL
            assert outcomes[-1].reason == "the server's memory is full"
            assert tier.usage().free_bytes == 0 or (tier.usage().free_bytes or 0) < 1 << 20
            into = buffer(len(wrote[0]))
            assert fates(tier.read(many.keys[:1], [into])) == [Fate.OK]
            tier.delete(many.keys)
            assert fates(tier.write(many.keys[:1], wrote[:1])) == [Fate.OK]
            tier.close()

    def test_a_server_that_evicts_names_no_free_room(self, tmp_path: Path) -> None:
        with ValkeyServer(tmp_path, maxmemory="8mb", maxmemory_policy="allkeys-lru") as small:
            tier = open_at(f"valkey://127.0.0.1:{small.port}")
            many = chain(40)
            outcomes = tier.write(many.keys, [record(many, at, payload_bytes=512 << 10) for at in range(40)])
            assert fates(outcomes) == [Fate.OK] * 40
            assert tier.usage() == Usage(None, 8 << 20)
            assert 0 < sum(tier.contains(many.keys)) < 20
            tier.close()

    def test_d48_a_record_over_the_servers_limit_is_refused_before_it_is_sent(self, tmp_path: Path) -> None:
        with ValkeyServer(tmp_path, proto_max_bulk_len="1mb") as limited:
            url = f"valkey://127.0.0.1:{limited.port}"
            with pytest.raises(
                TierError, match=r"record of 1052672 bytes.*1048576 at most \(proto-max-bulk-len\)"
            ):
                open_at(url, slot_bytes=PAGE_BYTES + (1 << 20))
            tier = open_at(url)
            large, fitting = (record(CHAIN, payload_bytes=size) for size in (1 << 20, (1 << 20) - PAGE_BYTES))
            with limited.client() as client:
                before = client.info()["total_net_input_bytes"]
                (outcome,) = tier.write(CHAIN.keys[:1], [large])
                assert outcome.fate is Fate.FULL
                assert "proto-max-bulk-len" in outcome.reason
                assert client.info()["total_net_input_bytes"] - before < 10_000
            assert fates(tier.write(CHAIN.keys[:1], [fitting])) == [Fate.OK]
            tier.close()


class TestSlots:
    """What a cluster adds: slots that move, nodes that answer with redirections, one that is down."""

    @pytest.fixture
    def tier(self, cluster: ValkeyCluster) -> Iterator[ValkeyTier]:
        yield from emptied(open_at(f"valkey://127.0.0.1:{cluster.port}"))  # type: ignore[misc]

    def test_records_spread_over_the_nodes_and_batches_span_them(
        self, tier: ValkeyTier, cluster: ValkeyCluster
    ) -> None:
        many = chain(60)
        tier.write(list(many.keys), [record(many, at, payload_bytes=16) for at in range(60)])
        assert min(len(server.names()) for server in cluster.servers) > 5
        assert tier.contains(many.keys) == [True] * 60
        assert fates(tier.delete(many.keys)) == [Fate.OK] * 60

    def test_a_slot_that_moved_is_followed_and_remembered(
        self, tier: ValkeyTier, cluster: ValkeyCluster
    ) -> None:
        key = CHAIN.keys[0]
        slot, home = cluster.place(named(key))
        tier.write([key], [record(CHAIN)])
        for source, target in ((home, (home + 1) % 3), ((home + 1) % 3, home)):
            cluster.move_slot(slot, source, target)
            assert tier.contains([key]) == [True]
            assert fates(tier.read([key], [buffer()])) == [Fate.OK]
            assert fates(tier.write([key], [record(CHAIN)])) == [Fate.OK]
            assert cluster.servers[target].names() == [named(key).encode()]

    def test_a_slot_on_the_move_is_asked_at_both_ends(self, tier: ValkeyTier, cluster: ValkeyCluster) -> None:
        key = CHAIN.keys[0]
        slot, source = cluster.place(named(key))
        target = (source + 1) % 3
        tier.write([key], [record(CHAIN)])
        cluster.move_slot(slot, source, target, finish=False)
        assert tier.contains([key]) == [True]
        into = buffer()
        assert fates(tier.read([key], [into])) == [Fate.OK]
        assert bytes(into) != bytes(RECORD_BYTES)
        assert fates(tier.delete([key])) == [Fate.OK]
        assert fates(tier.read([key], [buffer()])) == [Fate.MISSING]
        assert fates(tier.write([key], [record(CHAIN)])) == [Fate.OK]
        cluster.finish_slot(slot, target)
        cluster.move_slot(slot, target, source)
