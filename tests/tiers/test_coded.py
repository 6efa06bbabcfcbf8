"""Codecs around a tier: the contract holds, exact and lossy blocks never meet, nothing hostile comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.servers.valkey import ValkeyServer

from tiercel.blocks import (
    HEADER_BYTES,
    Chain,
    Header,
    Identity,
    Scope,
    parse,
    payload_of,
    record_bytes,
    seal,
    verify,
)  # fmt: skip
from tiercel.blocks.record import ENCRYPTED_CODEC, RAW_CODEC, header_info, write_header
from tiercel.codecs import LOSSY, BlockShape, LossyTiers, Mark, codec_named, codec_of, marked
from tiercel.config import Config, TierConfig
from tiercel.errors import EngineError
from tiercel.store import TieredStore, open_store
from tiercel.store.copying import copy
from tiercel.store.inspect import CachePlace
from tiercel.store.scopes import label_of
from tiercel.testing.conformance import TierContract
from tiercel.testing.records import buffer, identity
from tiercel.tiers import Fate, FilesTier, Outcome, Tier
from tiercel.tiers.coded import Coded, coded
from tiercel.tiers.encrypted import encrypted
from tiercel.tiers.extras import Peeks, Recycles, Shared, Tidies
from tiercel.tiers.keyring import KeyRing
from tiercel.tiers.memory import MemoryTier
from tiercel.tiers.registry import open_tier

SHAPE = BlockShape("bfloat16", (2, 2, 2, 64, 32))
PAYLOAD = 2 * 2 * 2 * 64 * 32 * 2
RECORD = record_bytes(PAYLOAD)
LOSSLESS = codec_named("lossless")


def ring() -> KeyRing:
    return KeyRing([("k1", bytes([7]) * 32)])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as one:
        yield one


class TestLosslessOverMemory(TierContract):
    shrinks = True

    @pytest.fixture
    def tier(self) -> Tier:
        return coded(MemoryTier(64 << 20), LOSSLESS)


class TestLosslessOverFiles(TierContract):
    shrinks = True

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return coded(FilesTier(tmp_path / "cache"), LOSSLESS)


class TestLosslessOverEncryptedFiles(TierContract):
    shrinks = True

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return coded(encrypted(FilesTier(tmp_path / "cache"), ring()), LOSSLESS)


class TestLosslessOverValkey(TierContract):
    shrinks = True

    @pytest.fixture
    def tier(self, server: ValkeyServer) -> Iterator[Tier]:
        config = TierConfig(kind="valkey", url=f"valkey://127.0.0.1:{server.port}", required=True)
        inner = open_tier(config, "valkey", 1 << 20)
        inner.delete([one.key for one in inner.scan()])
        yield coded(inner, LOSSLESS)
        inner.close()


class TestLossyKeepsUnmarkedBlocksExactly(TierContract):
    shrinks = True

    @pytest.fixture
    def tier(self) -> Tier:
        return coded(MemoryTier(64 << 20), LOSSY["int4"])


class TestNoneOnlyReads(TierContract):
    @pytest.fixture
    def tier(self) -> Tier:
        return coded(MemoryTier(64 << 20), None)


def exact() -> Identity:
    return replace(identity(), kv_dtype="bfloat16")


def lossy(*codecs: str, shape: BlockShape | None = SHAPE) -> Identity:
    return marked(exact(), LossyTiers(codecs), shape, PAYLOAD)


def chain_of(who: Identity, blocks: int = 2) -> Chain:
    return Scope(who).chain(range(blocks * who.block_tokens))


def numbers(seed: int = 1) -> np.ndarray:
    """KV-like bfloat16, as bits."""
    made = np.random.default_rng(seed).normal(size=PAYLOAD // 2).astype(np.float32)
    return (made.view(np.uint32) >> 16).astype(np.uint16)


def floats(record: memoryview) -> np.ndarray:
    bits = np.frombuffer(payload_of(record, PAYLOAD), np.uint16)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def block(chain: Chain, index: int = 0, seed: int = 1) -> memoryview:
    made = buffer(RECORD)
    payload_of(made, PAYLOAD)[:] = numbers(seed).tobytes()
    seal(made, chain, index, PAYLOAD, time.time_ns())
    return made


def read(tier: Tier, chain: Chain, index: int = 0) -> tuple[Outcome, memoryview]:
    into = buffer(RECORD)
    return tier.read([chain.keys[index]], [into])[0], into


def at_rest(inner: Tier, chain: Chain, index: int = 0) -> memoryview:
    (stored,) = [one for one in inner.scan() if one.key == chain.keys[index]]
    into = buffer(stored.record_bytes)
    assert inner.read([chain.keys[index]], [into])[0].fate is Fate.OK
    return into


def test_an_exact_codec_gives_back_the_record_bit_for_bit_and_takes_less() -> None:
    inner, chain = MemoryTier(64 << 20), chain_of(exact())
    wrote = block(chain)
    (outcome,) = coded(inner, LOSSLESS).write([chain.keys[0]], [wrote])
    lies = at_rest(inner, chain)
    assert outcome.fate is Fate.OK
    assert outcome.stored_bytes == len(lies) < 0.8 * RECORD
    found, back = read(coded(inner, LOSSLESS), chain)
    assert (found.fate, found.stored_bytes) == (Fate.OK, len(lies))
    assert bytes(back) == bytes(wrote)


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_codec_gives_back_a_sealed_record_of_nearly_equal_numbers(name: str) -> None:
    inner, chain = MemoryTier(64 << 20), chain_of(lossy(name))
    wrote = block(chain)
    before = bytes(wrote)
    tier = coded(inner, LOSSY[name])
    tier.write([chain.keys[0]], [wrote])
    assert bytes(wrote) == before, "what is in RAM stays as it was"
    lies = parse(at_rest(inner, chain))
    assert isinstance(lies, Header)
    assert (lies.codec, lies.decoded_bytes) == (LOSSY[name].number, PAYLOAD)
    outcome, back = read(tier, chain)
    assert outcome.fate is Fate.OK
    plain = verify(back, chain.keys[0])
    assert isinstance(plain, Header)
    assert (plain.codec, plain.payload_bytes) == (RAW_CODEC, PAYLOAD)
    off = floats(back) - floats(wrote)
    assert 0 < np.linalg.norm(off) / np.linalg.norm(floats(wrote)) < 0.12
    again = coded(MemoryTier(64 << 20), LOSSY[name])
    again.write([chain.keys[0]], [back])
    twice = floats(read(again, chain)[1])
    assert np.linalg.norm(twice - floats(back)) <= 0.5 * np.linalg.norm(off), "a second time adds little"


# Promise 1: lossy blocks never reach who asked for exact ones.


@pytest.mark.parametrize("name", LOSSY)
def test_exact_and_lossy_blocks_of_the_same_tokens_have_no_key_in_common(name: str) -> None:
    plain, near = chain_of(exact(), 8), chain_of(lossy(name), 8)
    assert not set(plain.keys) & set(near.keys)
    assert plain.keys == chain_of(exact(), 8).keys, "the control: equal identities agree"
    other = chain_of(lossy(*sorted({name, "int8", "fp8"} - ({name} if name != "int4" else set()))), 8)
    assert not set(near.keys) & set(other.keys), "nor do those of other codecs"


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_tier_keeps_a_block_without_its_mark_exactly(name: str) -> None:
    others = [one for one in LOSSY if one != name]
    for who in (exact(), lossy(others[0])):
        inner, chain = MemoryTier(64 << 20), chain_of(who)
        tier, wrote = coded(inner, LOSSY[name]), block(chain)
        tier.write([chain.keys[0]], [wrote])
        lies = parse(at_rest(inner, chain))
        assert isinstance(lies, Header)
        assert lies.codec == LOSSLESS.number
        assert bytes(read(tier, chain)[1]) == bytes(wrote)
    chain = chain_of(lossy(name))
    tier.write([chain.keys[0]], [block(chain)])
    control = parse(at_rest(inner, chain))
    assert isinstance(control, Header)
    assert control.codec == LOSSY[name].number, "the control: a marked one is encoded"


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_record_under_the_key_of_an_exact_block_is_corrupt(name: str) -> None:
    """However it came to lie there."""
    inner = MemoryTier(64 << 20)
    near, plain = chain_of(lossy(name)), chain_of(exact())
    tier = coded(inner, LOSSY[name])
    tier.write([near.keys[0]], [block(near)])
    assert read(tier, near)[0].fate is Fate.OK, "the control"
    lies = at_rest(inner, near)
    header = parse(lies)
    assert isinstance(header, Header)
    write_header(lies, replace(header, key=plain.keys[0], root=plain.root), plain.info)
    inner.write([plain.keys[0]], [lies])
    outcome, _ = read(tier, plain)
    assert outcome.fate is Fate.CORRUPT
    assert "not marked" in outcome.reason


def test_stores_with_and_without_codecs_share_a_place_and_read_each_others_exact_blocks() -> None:
    inner, chain = MemoryTier(64 << 20), chain_of(exact(), 2)
    packing, plain = coded(inner, LOSSLESS), coded(inner, None)
    packing.write([chain.keys[0]], [block(chain, 0)])
    plain.write([chain.keys[1]], [block(chain, 1, seed=2)])
    for tier in (packing, plain):
        assert bytes(read(tier, chain, 0)[1])[HEADER_BYTES:] == bytes(block(chain, 0))[HEADER_BYTES:]
        assert bytes(read(tier, chain, 1)[1])[HEADER_BYTES:] == bytes(block(chain, 1, seed=2))[HEADER_BYTES:]


@pytest.mark.parametrize("number", [2, 3, 41])
def test_a_codec_of_another_release_is_a_miss_and_the_record_stays(number: int) -> None:
    inner, chain = MemoryTier(64 << 20), chain_of(exact())
    tier = coded(inner, LOSSLESS)
    tier.write([chain.keys[0]], [block(chain)])
    lies = at_rest(inner, chain)
    header = parse(lies)
    assert isinstance(header, Header)
    info = header_info(lies)
    write_header(lies, replace(header, codec=number), info)
    inner.write([chain.keys[0]], [lies])
    assert read(tier, chain)[0].fate is Fate.MISSING


def test_blocks_in_an_older_format_of_a_codec_have_other_keys() -> None:
    inner, chain = MemoryTier(64 << 20), chain_of(lossy("int8"))
    older = chain_of(replace(lossy("int8"), lossy=f"int8 {SHAPE}"))
    tier = coded(inner, LOSSY["int8"])
    tier.write([older.keys[0]], [block(older)])
    assert read(tier, chain)[0].fate is Fate.MISSING
    assert read(tier, older)[0].fate is Fate.OK, "the control: kept exactly, as its mark says nothing to us"
    tier.write([chain.keys[0]], [block(chain)])
    assert read(tier, chain)[0].fate is Fate.OK


# Bounds and bytes that nobody of us wrote.


@pytest.mark.parametrize("name", ["lossless", *LOSSY])
def test_no_byte_of_an_encoded_record_can_change_unseen(name: str) -> None:
    """Byte for byte: whatever is flipped is a miss, or lies in the padding behind the payload."""
    shape, payload = BlockShape("bfloat16", (1, 2, 2, 96, 32)), 1 * 2 * 2 * 96 * 32 * 2
    who = exact() if name == "lossless" else marked(exact(), LossyTiers((name,)), shape, payload)
    chain = chain_of(who)
    wrote = buffer(record_bytes(payload))
    payload_of(wrote, payload)[:] = numbers()[: payload // 2].tobytes()
    seal(wrote, chain, 0, payload, time.time_ns())
    inner = MemoryTier(64 << 20)
    tier = coded(inner, codec_of(name))
    tier.write([chain.keys[0]], [wrote])
    lies = at_rest(inner, chain)
    header = parse(lies)
    assert isinstance(header, Header)
    assert header.codec
    whole = buffer(len(wrote))
    assert tier.read([chain.keys[0]], [whole])[0].fate is Fate.OK
    end = HEADER_BYTES + header.payload_bytes
    for at in range(len(lies)):
        flipped, into = bytearray(lies), buffer(len(wrote))
        flipped[at] ^= 1 if at % 2 else 255
        inner.write([chain.keys[0]], [memoryview(flipped)])
        fate = tier.read([chain.keys[0]], [into])[0].fate
        if at < end:
            assert fate is not Fate.OK or isinstance(verify(into, chain.keys[0]), str), at
        elif fate is Fate.OK:
            assert into == whole


def test_noise_is_stored_plain_and_no_record_gets_longer() -> None:
    inner, chain = MemoryTier(64 << 20), chain_of(exact())
    made = buffer(RECORD)
    noise = np.random.default_rng(1).integers(0, 256, PAYLOAD, np.uint8)
    payload_of(made, PAYLOAD)[:] = noise.tobytes()
    seal(made, chain, 0, PAYLOAD, time.time_ns())
    (outcome,) = coded(inner, LOSSLESS).write([chain.keys[0]], [made])
    assert outcome.stored_bytes == RECORD
    assert bytes(at_rest(inner, chain)) == bytes(made)


@pytest.mark.parametrize("codec", [LOSSLESS, *LOSSY.values()], ids=["lossless", *LOSSY])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_hostile_records_are_a_miss_or_a_sealed_block_never_a_crash(
    codec: object, data: st.DataObject
) -> None:
    inner = MemoryTier(64 << 20)
    assert hasattr(codec, "name")
    chain = chain_of(exact() if codec is LOSSLESS else lossy(codec.name))
    tier = coded(inner, codec_of(codec.name))
    tier.write([chain.keys[0]], [block(chain)])
    assert read(tier, chain)[0].fate is Fate.OK
    lies = bytearray(at_rest(inner, chain))
    for _ in range(data.draw(st.integers(1, 3))):
        lies[data.draw(st.integers(0, len(lies) - 1))] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        # A forger makes checksums fit and may lie about lengths.
        forge(lies, data)
    inner.write([chain.keys[0]], [memoryview(lies)])
    outcome, into = read(tier, chain)
    assert outcome.fate in (Fate.OK, Fate.CORRUPT, Fate.MISSING)
    if outcome.fate is Fate.OK and codec is LOSSLESS:
        found = verify(into, chain.keys[0])
        assert isinstance(found, str) or bytes(into)[HEADER_BYTES:] == bytes(block(chain))[HEADER_BYTES:]


def forge(lies: bytearray, data: st.DataObject) -> None:
    import xxhash

    view = memoryview(lies)
    header = parse(view)
    if isinstance(header, str):
        return
    sizes = st.sampled_from([0, 1, 16, 17, header.payload_bytes, header.payload_bytes - 1, 1 << 40])
    size = data.draw(sizes)
    decoded = data.draw(st.sampled_from([PAYLOAD, PAYLOAD - 1, 0, 1 << 50]))
    checksum = xxhash.xxh3_128_digest(view[HEADER_BYTES : HEADER_BYTES + size])
    made = replace(header, payload_bytes=size, decoded_bytes=decoded, checksum=checksum)
    write_header(view, made, header_info(view))


def test_a_flipped_bit_under_the_checksum_is_never_served() -> None:
    """The checksum of the plain payload is the last word, whatever lies in between."""
    import xxhash

    inner, chain = MemoryTier(64 << 20), chain_of(exact())
    tier = coded(inner, LOSSLESS)
    tier.write([chain.keys[0]], [block(chain)])
    lies = at_rest(inner, chain)
    header = parse(lies)
    assert isinstance(header, Header)
    lies[HEADER_BYTES + 200] ^= 1  # in the mantissas, which come first and are stored as they are
    body = payload_of(lies, header.payload_bytes)
    write_header(lies, replace(header, checksum=xxhash.xxh3_128_digest(body)), header_info(lies))
    inner.write([chain.keys[0]], [lies])
    outcome, into = read(tier, chain)
    assert outcome.fate is Fate.OK, "the forged record decodes"
    assert verify(into, chain.keys[0]) == "payload checksum differs"


# Around it.


def test_what_the_inner_tier_offers_is_offered(tmp_path: Path) -> None:
    files = coded(FilesTier(tmp_path / "cache"), LOSSLESS)
    assert [isinstance(files, one) for one in (Shared, Recycles, Peeks, Tidies)] == [
        isinstance(files.inner, one) for one in (Shared, Recycles, Peeks, Tidies)
    ]
    assert isinstance(files, Shared)
    assert not isinstance(coded(MemoryTier(64 << 20), LOSSLESS), Shared)


def test_encoded_then_encrypted_and_sound_for_whoever_lacks_the_key(tmp_path: Path) -> None:
    files, chain = FilesTier(tmp_path / "cache"), chain_of(lossy("int8"))
    tier = coded(encrypted(files, ring()), LOSSY["int8"])
    tier.write([chain.keys[0]], [block(chain)])
    (stored,) = list(files.scan())
    assert stored.record_bytes < 0.7 * RECORD
    lies = buffer(stored.record_bytes)
    assert files.read([chain.keys[0]], [lies])[0].fate is Fate.OK
    seen = verify(lies, chain.keys[0], {ENCRYPTED_CODEC})
    assert isinstance(seen, Header)
    assert b"int8" not in bytes(lies)
    assert read(tier, chain)[0].fate is Fate.OK


def configured(tmp_path: Path, **settings: str) -> Config:
    given = {"ram.size": "4MiB", "tiers.0.path": str(tmp_path / "cache"), "tiers.0.size": "2MiB"}
    return Config.load(environ={}, overrides=given | {k.replace("__", "."): v for k, v in settings.items()})


@pytest.mark.parametrize(("codec", "fits"), [("none", 56), ("lossless", 73), ("int4", 100)])
def test_a_cap_holds_as_many_blocks_as_take_its_bytes(tmp_path: Path, codec: str, fits: int) -> None:
    config = configured(tmp_path, tiers__0__codec=codec, store__accept_lossy="yes")
    with open_store(config, PAYLOAD) as store:
        chain = chain_of(marked(exact(), store.lossy, SHAPE, PAYLOAD), 100)
        for start in range(0, 100, 10):
            with store.begin_store(chain, start, start + 10, PAYLOAD, 5.0) as lease:
                for new in lease:
                    new.payload[:] = numbers(new.index).tobytes()
                lease.commit()
            assert store.flush(20)
        tier = store.stats().tiers[0]
        assert fits * 0.85 <= tier.blocks <= fits
        assert tier.used_bytes <= 2 << 20
        assert tier.used_bytes == sum(one.record_bytes for one in tier_of(store).scan())
        assert tier.counters.written_bytes < tier.counters.written_blocks * RECORD or codec == "none"
        assert store.stats().lossy == (("int4",) if codec == "int4" else ())


def tier_of(store: TieredStore) -> Tier:
    tier = store.below.traffic[0].lane.tier
    assert isinstance(tier, Coded)
    return tier


Marking = Callable[[], Identity]


@pytest.mark.parametrize(
    ("marking", "words"),
    [
        (lambda: marked(exact(), LossyTiers(("int4",)), None, PAYLOAD), "not described"),
        (lambda: marked(exact(), LossyTiers(("int4",)), BlockShape("bfloat16", (32,)), PAYLOAD), "int4"),
        (lambda: marked(exact(), LossyTiers(("int8",)), SHAPE, PAYLOAD - 2), "does not understand"),
        (lambda: marked(exact(), LossyTiers(("int8",), ("other",)), SHAPE, PAYLOAD), "judged for other"),
    ],
)
def test_a_codec_that_does_not_go_with_the_model_is_refused_in_one_line(marking: Marking, words: str) -> None:
    with pytest.raises(EngineError) as caught:
        marking()
    assert words in str(caught.value)
    assert "accepted: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_lossy_tier_changes_no_name_and_a_judged_model_is_marked() -> None:
    assert marked(exact(), LossyTiers(), None, PAYLOAD) == exact()
    judged = LossyTiers(("int8",), (f"{exact().model}@{exact().revision}",))
    mark = Mark.parse(marked(exact(), judged, SHAPE, PAYLOAD).lossy)
    assert mark == Mark(("int8",), SHAPE)
    assert Mark.parse("int4+int8 bfloat16:64 4+5") == Mark(("int4", "int8"), BlockShape("bfloat16", (64,)))
    for text in (None, "", "int8", "int9 bfloat16:64 5", "int8 bfloat16:64 5 ", 3, "+ bfloat16:64 +"):
        assert Mark.parse(text) is None
    for older in ("int8 bfloat16:64", "int8 bfloat16:64 ", "int8 bfloat16:64 2", "int4+int8 bfloat16:64 5"):
        assert Mark.parse(older) is None, "another format"


# Tools that look at a place from outside.


def test_tools_see_sound_records_name_the_codec_and_know_a_tenants_marked_scope(tmp_path: Path) -> None:
    scope = Scope(lossy("int8"), salt="s3cret")
    chain = scope.chain(range(2 * scope.identity.block_tokens))
    tier = coded(FilesTier(tmp_path / "cache"), LOSSY["int8"])
    tier.write(list(chain.keys), [block(chain, 0), block(chain, 1, seed=2)])
    place = CachePlace.directory(tmp_path / "cache")
    report = place.verify(repair=True)
    assert (report.checked, report.bad) == (2, [])
    (row,) = place.scopes()
    assert row.info["lossy"] == f"int8 {SHAPE} 5"
    assert row.has_salt("s3cret")
    assert not row.has_salt("guess")
    assert label_of(scope.info).model == "model (int8)"
    assert label_of(Scope(exact()).info).model == "model", "the control"


def test_records_are_copied_as_they_lie_and_read_from_the_copy(tmp_path: Path) -> None:
    chain = chain_of(lossy("int4"))
    source = FilesTier(tmp_path / "from")
    coded(source, LOSSY["int4"]).write([chain.keys[0]], [block(chain)])
    target = FilesTier(tmp_path / "to")
    told = copy(CachePlace(source, "from"), CachePlace(target, "to"))
    assert (told.copied, told.bad) == (1, 0)
    assert bytes(at_rest(target, chain)) == bytes(at_rest(source, chain))
    assert read(coded(target, None), chain)[0].fate is Fate.OK
