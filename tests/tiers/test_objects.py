"""The `objects` tier against a real S3 server: the contract, and what only a bucket can do or get wrong."""

from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Callable, Iterator

import obstore
import pytest
from tests.servers.s3 import ADMIN, BUCKET, STRANGER, USER, Keys, S3Server, free_ports

from tiercel.blocks import Header, record_bytes, verify
from tiercel.errors import TierError, TierUnreachable
from tiercel.testing.conformance import TierContract
from tiercel.testing.records import RECORD_BYTES, buffer, chain, record, records
from tiercel.tiers import Fate, Tier, Usage
from tiercel.tiers.extras import Peeks
from tiercel.tiers.objects import FORMAT, PART_BYTES, ObjectsTier, open_objects
from tiercel.tiers.url import TierUrl

CHAIN = chain(8)
KEY = CHAIN.keys[0]
_SERIAL = itertools.count()

Open = Callable[..., ObjectsTier]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as one:
        yield one


@pytest.fixture
def open_at(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens tiers on the server, by default on a prefix that nobody else has."""
    prefix = f"team/{next(_SERIAL)}"

    def open_(
        *, bucket: str | None = None, keys: Keys = USER, within: str = prefix, more: str = ""
    ) -> ObjectsTier:
        for name, value in keys.environment.items():
            monkeypatch.setenv(name, value)
        url = TierUrl.parse(server.url(**({"bucket": bucket} if bucket else {}), prefix=within, more=more))
        return ObjectsTier.at(url, name="objects", deadline_s=20)

    return open_


def fates(outcomes: list) -> list[Fate]:
    return [outcome.fate for outcome in outcomes]


class TestObjectsTier(TierContract):
    @pytest.fixture
    def tier(self, open_at: Open) -> Tier:
        return open_at()


class TestObjectsTierOneByOne(TierContract):
    """One request at a time, and one object a deletion."""

    @pytest.fixture
    def tier(self, open_at: Open) -> Tier:
        return open_at(more="&bulk_delete=no&concurrency=1")


def test_the_name_of_an_object_is_version_scope_fan_out_key(open_at: Open, server: S3Server) -> None:
    tier = open_at(within="team/layout")
    tier.write([KEY], [record(CHAIN)])
    named = KEY.hex()
    path = f"team/layout/tiercel-1/{named[:16]}/{named[16:18]}/{named[18:]}.kv"
    assert obstore.head(server.bare(), path)["size"] == RECORD_BYTES
    assert tier.path(KEY) == path
    assert open_at(within="").path(KEY) == path.removeprefix("team/layout/")


def test_two_prefixes_of_one_bucket_know_nothing_of_each_other(open_at: Open) -> None:
    one, other = open_at(within="team/a"), open_at(within="team/ab")
    one.write([KEY], [record(CHAIN)])
    assert one.contains([KEY]) == [True]
    assert other.contains([KEY]) == [False]
    assert list(other.scan()) == []


@pytest.mark.parametrize(
    "payload_bytes", [PART_BYTES - 4096, PART_BYTES, 2 * PART_BYTES + 4096, 36 << 20], ids=str
)
def test_large_records_move_in_parts_and_come_back_whole(open_at: Open, payload_bytes: int) -> None:
    tier = open_at()
    wrote = record(CHAIN, payload_bytes=payload_bytes)
    assert fates(tier.write([KEY], [wrote])) == [Fate.OK]
    # A slot that is larger than the record, as in a store of several models: parts of it lie past the end.
    into = buffer(record_bytes(payload_bytes) + PART_BYTES + 4096)
    assert fates(tier.read([KEY], [into])) == [Fate.OK]
    assert into[: len(wrote)] == wrote
    assert isinstance(verify(into, KEY), Header)
    exact = buffer(len(wrote))
    assert fates(tier.read([KEY], [exact])) == [Fate.OK]
    assert exact == wrote


def test_a_large_record_that_is_not_there_is_missing(open_at: Open) -> None:
    assert fates(open_at().read([KEY], [buffer(2 * PART_BYTES)])) == [Fate.MISSING]


def test_an_object_larger_than_the_slot_is_corrupt_whatever_the_parts(open_at: Open) -> None:
    tier = open_at()
    tier.write([KEY], [record(CHAIN, payload_bytes=2 * PART_BYTES)])
    for room_bytes in (4096, PART_BYTES, 2 * PART_BYTES):
        into = buffer(room_bytes)
        (outcome,) = tier.read([KEY], [into])
        assert outcome.fate is Fate.CORRUPT
        assert f"object has {record_bytes(2 * PART_BYTES)} bytes" in outcome.reason
        assert bytes(into[:8]) == bytes(8)


@pytest.mark.parametrize("more", ["", "&bulk_delete=no"])
def test_a_large_batch_is_deleted_at_once(open_at: Open, more: str) -> None:
    tier = open_at(more=more)
    many = chain(100)
    assert set(fates(tier.write(many.keys, [record(CHAIN)] * 100))) == {Fate.OK}
    assert set(fates(tier.delete(many.keys))) == {Fate.OK}
    assert tier.contains(many.keys) == [False] * 100
    assert list(tier.scan()) == []


def test_a_listing_of_more_than_a_page_is_complete(open_at: Open) -> None:
    tier = open_at()
    many = chain(1100)
    assert set(fates(tier.write(many.keys, [record(CHAIN)] * 1100))) == {Fate.OK}
    found = list(tier.scan())
    assert sorted(one.key for one in found) == sorted(many.keys)


def test_it_peeks_at_headers_only(open_at: Open) -> None:
    tier = open_at()
    assert isinstance(tier, Peeks)
    wrote = record(CHAIN, payload_bytes=1 << 20)
    tier.write([KEY], [wrote])
    header, missing = tier.peek([KEY, CHAIN.keys[1]])
    assert header == bytes(wrote[:4096])
    assert not isinstance(missing, bytes)
    assert missing.fate is Fate.MISSING


def test_a_bucket_does_not_tell_its_room(open_at: Open) -> None:
    assert open_at().usage() == Usage()


def with_last_bytes(wrote: bytes, tail: bytes) -> bytes:
    return wrote[: -len(tail)] + tail


@pytest.mark.parametrize(
    ("name", "damage", "fate"),
    [
        ("nothing", lambda wrote: wrote, Fate.OK),
        ("emptied", lambda wrote: b"", Fate.CORRUPT),
        ("cut in the header", lambda wrote: wrote[:1000], Fate.CORRUPT),
        ("cut within a page", lambda wrote: wrote[:-1], Fate.CORRUPT),
        ("grown", lambda wrote: wrote + bytes(4096), Fate.CORRUPT),
        ("cut by a page", lambda wrote: wrote[:-4096], Fate.OK),
        ("another byte", lambda wrote: with_last_bytes(wrote, b"?"), Fate.OK),
        ("a pickle", lambda wrote: pickle.dumps(wrote).ljust(len(wrote), b"\0"), Fate.CORRUPT),
        ("a pickle of whole pages", lambda wrote: pickle.dumps(1).ljust(len(wrote), b"\0"), Fate.OK),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_d32_a_damaged_object_is_no_record(
    open_at: Open, server: S3Server, name: str, damage: Callable[[bytes], bytes], fate: Fate
) -> None:
    """What the length tells is CORRUPT here; the rest is for the store's checksum, which must refuse it."""
    tier = open_at()
    wrote = bytes(record(CHAIN, fill=7))
    tier.write([KEY], [memoryview(wrote)])
    obstore.put(server.bare(), tier.path(KEY), damage(wrote), use_multipart=False)
    into = buffer(RECORD_BYTES)
    assert fates(tier.read([KEY], [into])) == [fate]
    assert isinstance(verify(into, KEY), Header) is (name == "nothing")


def test_another_keys_object_does_not_pass_for_this_one(open_at: Open, server: S3Server) -> None:
    tier = open_at()
    keys, wrote = records(CHAIN)
    tier.write(keys, wrote)
    obstore.copy(server.bare(), tier.path(keys[1]), tier.path(keys[0]))
    into = [buffer(), buffer()]
    assert fates(tier.read(keys[:2], into)) == [Fate.OK, Fate.OK]
    assert verify(into[0], keys[0]) == "another block's record"
    assert isinstance(verify(into[1], keys[1]), Header)


def test_strange_names_in_the_bucket_are_passed_over(open_at: Open, server: S3Server) -> None:
    tier = open_at(within="team/strange")
    tier.write([KEY], [record(CHAIN)])
    root, named = f"team/strange/{FORMAT}", KEY.hex()
    for name in [
        "x y", "%2e%2e/%2e%2e/etc/passwd", "..a/b", "a\\b", "x#y?z&", "é\u202e", "q" * 200, "'; rm -rf /",
        f"{named[:16]}/{named[16:18]}/{named[18:]}.kv.pkl", f"{named[:16]}/{named[16:18]}/{named[18:]}",
        f"{named[:16]}/{named[16:18]}/{named[18:].upper()}.kv", f"{named[:16]}/{named[16:]}.kv", "FORMAT",
    ]:  # fmt: skip
        obstore.put(server.bare(), f"{root}/{name}", pickle.dumps(name), use_multipart=False)
    assert sum(len(page) for page in obstore.list(server.bare(), root)) == 14
    assert [one.key for one in tier.scan()] == [KEY]


@pytest.mark.parametrize(
    ("bucket", "keys", "reason"),
    [
        ("no-such-bucket", USER, "bucket does not exist"),
        (None, STRANGER, "access denied (403)"),
        (None, Keys("NOBODY", "secret-of-nobody"), "access denied (403)"),
        (None, Keys(USER.access, "secret-that-is-wrong"), "access denied (403)"),
    ],
    ids=["missing bucket", "no permission", "unknown key", "wrong secret"],
)
def test_refusals_are_failures_that_say_why_and_show_no_secret(
    open_at: Open, bucket: str | None, keys: Keys, reason: str
) -> None:
    assert fates(open_at().write([KEY], [record(CHAIN)])) == [Fate.OK]
    tier = open_at(bucket=bucket, keys=keys)
    for outcomes in (
        tier.write([KEY], [record(CHAIN)]),
        tier.read([KEY], [buffer()]),
        tier.delete(chain(40).keys)[:1],
    ):
        (outcome,) = outcomes
        assert outcome.fate is Fate.FAILED
        assert keys.secret not in outcome.reason
        assert keys.access not in outcome.reason
        assert "\n" not in outcome.reason
        assert reason in outcome.reason
    with pytest.raises(OSError, match=re.escape(reason)):
        list(tier.scan())
    if bucket is None:
        with pytest.raises(OSError, match="access denied"):
            tier.contains([KEY])
    else:
        # An answer to HEAD has no body to tell a missing bucket from a missing object.
        assert tier.contains([KEY]) == [False]


@pytest.mark.parametrize(
    ("bucket", "keys", "reason"),
    [
        ("no-such-bucket", USER, "bucket does not exist"),
        (BUCKET, STRANGER, "access denied (403)"),
        (BUCKET, Keys(USER.access, "secret-that-is-wrong"), "access denied (403)"),
    ],
    ids=["missing bucket", "no permission", "wrong secret"],
)
def test_opening_says_in_one_line_what_has_to_be_mended(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, bucket: str, keys: Keys, reason: str
) -> None:
    def open_(bucket: str, keys: Keys) -> ObjectsTier:
        for name, value in keys.environment.items():
            monkeypatch.setenv(name, value)
        return open_objects(
            TierUrl.parse(server.url(bucket)), name="objects", deadline_s=20, slot_bytes=RECORD_BYTES
        )

    with pytest.raises(TierError, match=re.escape(reason)) as caught:
        open_(bucket, keys)
    assert not isinstance(caught.value, TierUnreachable)
    assert "\n" not in str(caught.value)
    assert keys.secret not in str(caught.value)
    assert bucket in str(caught.value)
    assert open_(BUCKET, USER).contains([KEY]) == [False]


def test_opening_a_place_that_does_not_answer_is_told_apart(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in USER.environment.items():
        monkeypatch.setenv(name, value)
    (port,) = free_ports(1)
    with pytest.raises(TierUnreachable, match="does not answer: no connection"):
        open_objects(TierUrl.parse(server.url(port=port)), name="o", deadline_s=20, slot_bytes=RECORD_BYTES)


def test_whoever_administers_may_also_use_it(open_at: Open) -> None:
    assert fates(open_at(keys=ADMIN).write([KEY], [record(CHAIN)])) == [Fate.OK]
