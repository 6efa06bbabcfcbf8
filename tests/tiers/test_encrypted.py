"""Encryption at rest: the tier contract holds, nothing readable lies there, nothing forged comes back."""

from __future__ import annotations

import base64
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiercel.blocks import BlockKey, Header, parse, verify
from tiercel.blocks.record import ENCRYPTED_CODEC, RAW_CODEC, header_part, write_header
from tiercel.config import Config, TierConfig
from tiercel.errors import TierError
from tiercel.store import open_store
from tiercel.testing.conformance import TierContract
from tiercel.testing.records import PAYLOAD_BYTES, RECORD_BYTES, buffer, chain, record
from tiercel.tiers import Fate, FilesTier, Outcome, Tier
from tiercel.tiers.encrypted import Encrypted, encrypted
from tiercel.tiers.extras import Peeks, Shared
from tiercel.tiers.keyring import KeyRing
from tiercel.tiers.memory import MemoryTier
from tiercel.tiers.registry import open_tier

OLD, NEW, OTHER = (bytes([fill]) * 32 for fill in (1, 2, 3))
CHAIN = chain(4, model="a secret model", salt="a secret tenant")
KEY = CHAIN.keys[0]


def ring(*keys: tuple[str, bytes]) -> KeyRing:
    return KeyRing(keys or [("k1", OLD)])


def at_rest(inner: Tier, key: BlockKey = KEY) -> memoryview:
    into = buffer()
    assert inner.read([key], [into])[0].fate is Fate.OK
    return into


def read(tier: Tier, key: BlockKey = KEY) -> tuple[Outcome, memoryview]:
    into = buffer()
    return tier.read([key], [into])[0], into


class TestOverMemory(TierContract):
    @pytest.fixture
    def tier(self) -> Tier:
        return encrypted(MemoryTier(64 << 20), ring())


class TestOverFilesWhileKeysRotate(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return encrypted(FilesTier(tmp_path / "cache"), ring(("k2", NEW), ("k1", OLD)))


def test_nothing_readable_lies_in_the_place_and_the_record_stays_as_long_as_it_was() -> None:
    inner = MemoryTier(64 << 20)
    wrote = record(CHAIN, fill=0x5A)
    encrypted(inner, ring()).write([KEY], [wrote])
    lies = bytes(at_rest(inner))
    assert len(lies) == len(wrote)
    plain = parse(wrote)
    assert isinstance(plain, Header)
    for readable in (b"secret", b"\x5a" * 16, plain.root[8:], plain.checksum, OLD):
        assert readable not in lies
    assert b"secret model" in bytes(wrote)
    seen = verify(memoryview(lies), KEY, {ENCRYPTED_CODEC})
    assert isinstance(seen, Header), "whoever has no key can still tell that the record is sound"
    assert (seen.codec, seen.root) == (ENCRYPTED_CODEC, bytes(32))
    assert verify(memoryview(lies), KEY) == "codec 64 is unknown"


def test_the_same_record_is_never_encrypted_alike_and_tenants_have_keys_of_their_own() -> None:
    inner = MemoryTier(64 << 20)
    tier = encrypted(inner, ring())
    tier.write([KEY], [record(CHAIN)])
    first = bytes(at_rest(inner))
    tier.write([KEY], [record(CHAIN)])
    assert bytes(at_rest(inner))[4096:] != first[4096:]
    keys = ring()
    assert keys.derive(keys.first, b"tenant_1") != keys.derive(keys.first, b"tenant_2")
    assert keys.derive(keys.first, b"tenant_1") != OLD


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, RECORD_BYTES - 1), flip=st.integers(1, 255))
def test_a_flipped_bit_anywhere_never_comes_back_as_a_hit(at: int, flip: int) -> None:
    inner = MemoryTier(64 << 20)
    tier = encrypted(inner, ring())
    tier.write([KEY], [record(CHAIN)])
    assert isinstance(verify(read(tier)[1], KEY), Header)
    lies = at_rest(inner)
    lies[at] ^= flip
    inner.write([KEY], [lies])
    outcome, into = read(tier)
    assert outcome.fate is Fate.CORRUPT or not isinstance(verify(into, KEY), Header)


def forged(inner: MemoryTier, tier: Tier) -> dict[str, memoryview]:
    """Records somebody could put in the place of block 0 who can write there but lacks the key."""
    tier.write([KEY], [record(CHAIN)])
    older = at_rest(inner)
    tier.write([KEY, CHAIN.keys[1]], [record(CHAIN), record(CHAIN, 1)])
    now, second = at_rest(inner), at_rest(inner, CHAIN.keys[1])
    mixed = buffer()
    mixed[:4096], mixed[4096:] = now[:4096], older[4096:]
    return {
        "another block's record": second,
        "payload of an older write": mixed,
        "a plain record": record(CHAIN),
    }


@pytest.mark.parametrize("what", ["another block's record", "payload of an older write", "a plain record"])
def test_a_record_put_in_by_somebody_without_the_key_is_corrupt(what: str) -> None:
    inner = MemoryTier(64 << 20)
    tier = encrypted(inner, ring())
    planted = forged(inner, tier)[what]
    assert read(tier)[0].fate is Fate.OK
    inner.write([KEY], [planted])
    assert read(tier)[0].fate is Fate.CORRUPT


def test_a_record_renamed_to_another_key_with_its_header_made_to_fit_is_corrupt() -> None:
    inner = MemoryTier(64 << 20)
    tier = encrypted(inner, ring())
    tier.write([CHAIN.keys[1]], [record(CHAIN, 1)])
    moved = at_rest(inner, CHAIN.keys[1])
    header = parse(moved)
    assert isinstance(header, Header)
    write_header(moved, replace(header, key=KEY), header_part(moved)[144:])
    assert isinstance(verify(moved, KEY, {ENCRYPTED_CODEC}), Header), "without the key it looks right"
    inner.write([KEY], [moved])
    assert read(tier)[0] == Outcome(Fate.CORRUPT, "authentication failed")


@pytest.mark.parametrize("wrong", [("k2", OTHER), ("k1", OTHER)], ids=["another id", "the same id"])
def test_the_wrong_key_is_a_miss_and_leaves_the_record_alone(wrong: tuple[str, bytes]) -> None:
    inner = MemoryTier(64 << 20)
    encrypted(inner, ring(("k1", OLD))).write([KEY], [record(CHAIN)])
    assert read(encrypted(inner, ring(wrong)))[0].fate is Fate.MISSING
    outcome, into = read(encrypted(inner, ring(("k1", OLD))))
    assert outcome.fate is Fate.OK
    assert isinstance(verify(into, KEY), Header)


def rotated(inner: Tier) -> str:
    header = parse(at_rest(inner))
    assert isinstance(header, Header)
    return str(header.info["key_id"]).split(":")[0]


def eventually(holds: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + 10
    while not holds():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.005)
    return True


def test_a_record_under_an_older_key_is_read_and_written_again_under_the_first() -> None:
    inner = MemoryTier(64 << 20)
    encrypted(inner, ring(("k1", OLD))).write([KEY], [record(CHAIN)])
    both = encrypted(inner, ring(("k2", NEW), ("k1", OLD)))
    assert rotated(inner) == "k1"
    outcome, into = read(both)
    assert outcome.fate is Fate.OK
    assert isinstance(verify(into, KEY), Header)
    assert eventually(lambda: rotated(inner) == "k2")
    assert read(encrypted(inner, ring(("k2", NEW))))[0].fate is Fate.OK


class Slow(MemoryTier):
    """Holds every write until `go`, once told to."""

    def __init__(self) -> None:
        super().__init__(64 << 20)
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Event()

    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        self.entered.set()
        assert self.go.wait(10)
        return super().write(keys, records)


def test_what_is_deleted_while_it_is_being_rewritten_stays_deleted() -> None:
    inner = Slow()
    encrypted(inner, ring(("k1", OLD))).write([KEY], [record(CHAIN)])
    both = encrypted(inner, ring(("k2", NEW), ("k1", OLD)))
    inner.go.clear()
    inner.entered.clear()
    assert read(both)[0].fate is Fate.OK
    assert inner.entered.wait(10), "a rewrite is under way"
    deleting = threading.Thread(target=both.delete, args=([KEY],))
    deleting.start()
    inner.go.set()
    deleting.join(10)
    assert not deleting.is_alive()
    assert both.contains([KEY]) == [False]
    assert list(inner.scan()) == []


def test_extras_of_the_place_are_offered_and_a_peek_sees_the_plain_header(tmp_path: Path) -> None:
    inner = FilesTier(tmp_path / "cache")
    tier = encrypted(inner, ring())
    assert isinstance(tier, Shared) is isinstance(inner, Shared)
    assert not isinstance(encrypted(MemoryTier(64 << 20), ring()), Shared)
    if not isinstance(inner, Peeks):
        pytest.skip("the files tier does not peek yet")
    tier.write([KEY], [record(CHAIN)])
    assert isinstance(tier, Peeks)
    (page,) = tier.peek([KEY])
    assert isinstance(page, bytes)
    header = parse(page)
    assert isinstance(header, Header)
    assert (header.codec, header.info["model"], header.root) == (RAW_CODEC, "a secret model", CHAIN.root)


def test_a_description_too_long_to_be_hidden_is_left_out_and_the_block_kept() -> None:
    wordy = chain(1, model="名" * 600)
    inner = MemoryTier(64 << 20)
    tier = encrypted(inner, ring())
    assert tier.write([wordy.keys[0]], [record(wordy)])[0].fate is Fate.OK
    outcome, into = read(tier, wordy.keys[0])
    header = verify(into, wordy.keys[0])
    assert outcome.fate is Fate.OK
    assert isinstance(header, Header)
    assert header.payload_bytes == PAYLOAD_BYTES


def test_what_is_no_record_is_refused_before_it_leaves() -> None:
    inner = MemoryTier(64 << 20)
    tier = encrypted(inner, ring())
    answers = tier.write([KEY, CHAIN.keys[1]], [buffer(), record(CHAIN, 1)])
    assert [one.fate for one in answers] == [Fate.FAILED, Fate.OK]
    assert inner.contains([KEY]) == [False]


# Where keys come from.

TEXTS = {
    "hex": OLD.hex(),
    "base64": base64.b64encode(OLD).decode(),
    "lines": f"k1:{OLD.hex()}\nk0:{NEW.hex()}\n",
}


@pytest.mark.parametrize("form", [*TEXTS, "raw"])
@pytest.mark.parametrize("source", ["file", "command", "env"])
def test_a_key_is_read_from_every_source_in_every_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, form: str
) -> None:
    held = OLD if form == "raw" else TEXTS[form].encode()
    path = tmp_path / "key"
    path.write_bytes(held)
    monkeypatch.setenv("THE_KEY", held.decode())
    place = {"file": f"{path}", "command": f"cat {path}", "env": "THE_KEY"}[source]
    keys = KeyRing.load(f"{source}:{place}")
    tag = KEY[:8]
    assert keys.derive(keys.first, tag) == ring().derive(ring().first, tag)
    assert len(keys) == (2 if form == "lines" else 1)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (OLD.hex(), "encrypt is no source of keys; accepted: file:PATH"),
        ("file:/no/such/file", "'file:/no/such/file' cannot be read: No such file"),
        ("env:NO_SUCH_VARIABLE", "'env:NO_SUCH_VARIABLE': the variable is not set"),
        ("command:/no/such/program --token Hunter2", r"'command:/no/such/program \.\.\.' cannot be run"),
        ("command:false", r"'command:false \.\.\.' ended with status 1: no message"),
        ("command:echo Hunter2", "'command:echo' does not hold keys; accepted: one key of 32 bytes"),
        ("command:echo 'un", "is no command line"),
    ],
)
def test_a_source_that_holds_no_key_is_one_line_that_shows_no_secret(source: str, says: str) -> None:
    with pytest.raises(TierError, match=says) as error:
        KeyRing.load(source)
    text = str(error.value)
    assert "\n" not in text
    assert "Hunter2" not in text
    assert OLD.hex() not in text


def test_two_keys_of_one_id_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", f"a:{OLD.hex()}\na:{NEW.hex()}")
    with pytest.raises(TierError, match="with different IDs"):
        KeyRing.load("env:THE_KEY")


# In a store.


def test_blocks_of_an_encrypted_tier_are_hits_again_after_a_restart_and_misses_without_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", os.urandom(32).hex())
    given = {
        "ram.size": "64MiB",
        "tiers.0.path": str(tmp_path / "cache"),
        "tiers.0.size": "1GiB",
        "tiers.0.encrypt": "env:THE_KEY",
    }
    config = Config.load(environ={}, overrides=given)
    with open_store(config, 1 << 20) as store:
        with store.begin_store(CHAIN, 0, 2, 1 << 20) as lease:
            for new in lease:
                new.payload[:] = bytes([7 + new.index]) * (1 << 20)
            lease.commit()
        assert store.flush()
    for restart in range(2):
        if restart:
            monkeypatch.setenv("THE_KEY", os.urandom(32).hex())
        with open_store(config, 1 << 20) as store:
            assert store.scanned(10)
            with store.acquire(CHAIN) as leased:
                loaded = [bytes(block.payload[:1]) for block in leased]
            assert loaded == ([] if restart else [b"\x07", b"\x08"])
            assert store.stats().tiers[0].counters.corrupt == 0


def test_an_encrypted_tier_opens_from_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(OLD.hex())
    config = TierConfig(path=tmp_path / "cache", size_bytes=1 << 30, encrypt=f"file:{tmp_path / 'key'}")
    assert isinstance(open_tier(config, "disk", RECORD_BYTES), Encrypted)
