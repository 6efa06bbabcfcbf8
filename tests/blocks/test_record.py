"""Records: a record is taken for a block only if every byte of it is that block's."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.blocks import (
    HEADER_BYTES,
    PAGE_BYTES,
    BlockKey,
    Header,
    Identity,
    Scope,
    parse,
    payload_of,
    record_bytes,
    seal,
    verify,
)

SCOPE = Scope(Identity("org/model", "r", "bf16", b"g", "hf/1", 2), adapter=b"lora", salt="s")
CHAIN = SCOPE.chain(range(20))
PAYLOAD = 5000


def sealed(payload_bytes: int = PAYLOAD, index: int = 3) -> bytearray:
    record = bytearray(b"\xff" * record_bytes(payload_bytes))
    payload_of(memoryview(record), payload_bytes)[:] = bytes(i * 7 % 251 for i in range(payload_bytes))
    seal(memoryview(record), CHAIN, index, payload_bytes, 123)
    return record


@given(st.integers(1, 3 * PAGE_BYTES), st.integers(0, 9))
def test_a_sealed_record_is_verified_and_says_what_it_is(payload_bytes: int, index: int) -> None:
    record = sealed(payload_bytes, index)
    header = verify(memoryview(record), CHAIN.keys[index])
    assert isinstance(header, Header)
    assert (header.key, header.root, header.depth, header.payload_bytes, header.decoded_bytes) == (
        CHAIN.keys[index],
        SCOPE.root,
        index,
        payload_bytes,
        payload_bytes,
    )
    assert header.info["model"] == "org/model"
    assert header.sealed_ns == 123
    assert len(record) % PAGE_BYTES == 0


COVERED = st.integers(0, record_bytes(PAYLOAD) * 8 - 1)


@settings(max_examples=1500)
@given(COVERED)
def test_any_flipped_bit_is_noticed(bit: int) -> None:
    """D32."""
    record = sealed()
    assert isinstance(verify(memoryview(record), CHAIN.keys[3]), Header), "the control"
    record[bit // 8] ^= 1 << bit % 8
    assert isinstance(verify(memoryview(record), CHAIN.keys[3]), str)


def test_no_bit_of_the_header_goes_unnoticed() -> None:
    record = sealed(16)
    for bit in range(HEADER_BYTES * 8):
        record[bit // 8] ^= 1 << bit % 8
        assert isinstance(verify(memoryview(record), CHAIN.keys[3]), str), bit
        record[bit // 8] ^= 1 << bit % 8
    assert isinstance(verify(memoryview(record), CHAIN.keys[3]), Header), "the control"


def test_another_blocks_record_is_refused() -> None:
    record = memoryview(sealed())
    for index, key in enumerate(CHAIN.keys):
        assert isinstance(verify(record, key), Header) == (index == 3)
    assert isinstance(verify(record, BlockKey(CHAIN.keys[3][:-1] + b"\0")), str)


@given(st.integers(0, record_bytes(PAYLOAD) - 1))
def test_a_record_cut_short_is_refused_unless_only_padding_is_missing(cut: int) -> None:
    found = verify(memoryview(sealed())[:cut], CHAIN.keys[3])
    assert isinstance(found, Header) == (cut >= HEADER_BYTES + PAYLOAD)


@given(st.binary(max_size=300), st.integers(0, 5000))
def test_whatever_bytes_come_parsing_never_raises(start: bytes, length: int) -> None:
    record = (start + bytes(length))[: max(length, len(start))]
    assert isinstance(parse(record), str)
    assert isinstance(verify(memoryview(record), CHAIN.keys[0]), str)


@given(st.integers(8, 143), st.binary(min_size=1, max_size=64))
def test_a_true_header_overwritten_anywhere_never_raises(at: int, junk: bytes) -> None:
    record = sealed()
    before = bytes(record)
    record[at : at + len(junk)] = junk
    assert isinstance(verify(memoryview(record), CHAIN.keys[3]), Header) == (bytes(record) == before)


def test_nothing_of_the_slots_former_bytes_goes_to_rest() -> None:
    record = sealed()
    assert not any(record[144 + len(CHAIN.info) : HEADER_BYTES])
    assert not any(record[HEADER_BYTES + PAYLOAD :])


def test_a_name_too_long_for_the_header_loses_the_listing_not_the_block() -> None:
    scope = Scope(Identity("\U0001f600" * 1000, "r" * 2000, "bf16", b"g", "hf/1", 2))
    chain = scope.chain(range(4))
    record = bytearray(record_bytes(10))
    seal(memoryview(record), chain, 1, 10, 0)
    header = verify(memoryview(record), chain.keys[1])
    assert isinstance(header, Header)
    assert header.info == {}
