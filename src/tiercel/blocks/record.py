"""A block at rest: 4 KiB of header, then the payload, padded to whole pages.

    offset bytes  field
    0      8      magic  b"TIERCEL\\x01"
    8      4      header version (u32, little endian like all numbers)
    12     4      codec of the payload (0 = raw, 1..63 see `tiercel.codecs`, 64 = encrypted)
    16     32     block key
    48     32     scope root
    80     8      payload bytes at rest
    88     8      payload bytes decoded
    96     4      depth: index of the block in its chain
    100    4      info bytes
    104    8      time of sealing, ns since the epoch
    112    16     xxh3-128 of the payload
    128    16     xxh3-128 of header bytes 0..127 and the info
    144    info   identity as JSON, for listings only (never trusted for a hit)

The header lies in front of the payload in the arena slot too, so that a tier moves a record with one
vectored, page-aligned read or write. The checksum guards against rot and torn writes; the key, not
the checksum, is what guards identity.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Container
from dataclasses import dataclass, field

import xxhash

from tiercel.blocks.chain import KEY_BYTES, BlockKey, Chain

HEADER_BYTES = 4096
PAGE_BYTES = 4096
HEADER_VERSION = 1
RAW_CODEC = 0
ENCRYPTED_CODEC = 64
_MAGIC = b"TIERCEL\x01"
_FIXED = struct.Struct("<8sII32s32sQQIIQ16s")
_SUM_BYTES = 16
_INFO_AT = _FIXED.size + _SUM_BYTES
INFO_BYTES_MAX = HEADER_BYTES - _INFO_AT
assert _FIXED.size == 128
assert _INFO_AT == 144


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed record header; sizes in bytes."""

    key: BlockKey
    root: bytes
    codec: int
    payload_bytes: int
    decoded_bytes: int
    depth: int
    sealed_ns: int
    checksum: bytes
    info: dict[str, str | int] = field(default_factory=dict)


def record_bytes(payload_bytes: int) -> int:
    """Bytes a record with this payload takes at rest: header and payload in whole pages."""
    return HEADER_BYTES + -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES


def payload_of(record: memoryview, payload_bytes: int) -> memoryview:
    """The payload within a record's buffer."""
    return record[HEADER_BYTES : HEADER_BYTES + payload_bytes]


def seal(record: memoryview, chain: Chain, index: int, payload_bytes: int, now_ns: int) -> None:
    """Write the header of block `index` of `chain` in front of its finished payload and zero the padding.

    Reads the whole payload once (checksum, about 10 GB/s or more) and releases the interpreter lock for it.
    """
    end = HEADER_BYTES + payload_bytes
    checksum = xxhash.xxh3_128_digest(record[HEADER_BYTES:end])
    # Names are bounded (Identity), but a many-byte script could still overflow the page: listings then
    # lose the description, never the block.
    info = chain.info if len(chain.info) <= INFO_BYTES_MAX else b"{}"
    sealed = Header(
        key=chain.keys[index],
        root=chain.root,
        codec=RAW_CODEC,
        payload_bytes=payload_bytes,
        decoded_bytes=payload_bytes,
        depth=index,
        sealed_ns=now_ns,
        checksum=checksum,
    )
    write_header(record, sealed, info)
    padding = record_bytes(payload_bytes) - end
    record[end : end + padding] = bytes(padding)


def write_header(record: memoryview, header: Header, info: bytes) -> None:
    """Fill the first page of `record`. `info` is the JSON of `header.info`, at most `INFO_BYTES_MAX` long."""
    fixed = _FIXED.pack(
        _MAGIC, HEADER_VERSION, header.codec, header.key, header.root, header.payload_bytes,
        header.decoded_bytes, header.depth, len(info), header.sealed_ns, header.checksum,
    )  # fmt: skip
    page = fixed + xxhash.xxh3_128_digest(fixed + info) + info
    record[: len(page)] = page
    record[len(page) : HEADER_BYTES] = bytes(HEADER_BYTES - len(page))


def header_part(record: memoryview) -> bytes:
    """The bytes of a parsed record's header without the zeros that fill its page."""
    return bytes(record[: _INFO_AT + int.from_bytes(record[100:104], "little")])


def header_info(record: memoryview) -> bytes:
    """The description in a parsed record's header, as it lies there."""
    return header_part(record)[_INFO_AT:]


def parse(record: memoryview | bytes) -> Header | str:
    """Read a header, or say in a few words what is wrong with it. Trusts no byte."""
    if len(record) < HEADER_BYTES:
        return "shorter than a header"
    fixed = bytes(record[: _FIXED.size])
    magic, version, codec, key, root, at_rest, decoded, depth, info_bytes, sealed_ns, checksum = (
        _FIXED.unpack(fixed)
    )
    if magic != _MAGIC:
        return "not a block record"
    if version != HEADER_VERSION:
        return f"header version {version}, not {HEADER_VERSION}"
    if info_bytes > INFO_BYTES_MAX:
        return "header length out of range"
    info = bytes(record[_INFO_AT : _INFO_AT + info_bytes])
    if xxhash.xxh3_128_digest(fixed + info) != bytes(record[_FIXED.size : _INFO_AT]):
        return "header checksum differs"
    if not _zeros(record[_INFO_AT + info_bytes : HEADER_BYTES]):
        return "header is not followed by zeros"
    return Header(BlockKey(key), root, codec, at_rest, decoded, depth, sealed_ns, checksum, _parse_info(info))


def verify(
    record: memoryview, key: BlockKey, codecs: Container[int] = frozenset({RAW_CODEC})
) -> Header | str:
    """The header if `record` is exactly the block `key`, else what is wrong. Reads every byte.

    Whoever only wants to know whether a record is sound as it lies there names more `codecs`.
    """
    header = parse(record)
    if isinstance(header, str):
        return header
    if header.key != key:
        return "another block's record"
    if header.codec not in codecs:
        return f"codec {header.codec} is unknown"
    end = HEADER_BYTES + header.payload_bytes
    if end > len(record):
        return "payload is cut short"
    if xxhash.xxh3_128_digest(record[HEADER_BYTES:end]) != header.checksum:
        return "payload checksum differs"
    if not _zeros(record[end : record_bytes(header.payload_bytes)]):
        return "payload is not followed by zeros"
    return header


def depth_of(record: memoryview) -> int:
    """The block's index in its chain, from a record sealed in this process."""
    return int.from_bytes(record[96:100], "little")


def _zeros(part: memoryview | bytes) -> bool:
    return bytes(part).count(0) == len(part)


def _parse_info(info: bytes) -> dict[str, str | int]:
    try:
        shown = json.loads(info)
    except ValueError:
        return {}
    if not isinstance(shown, dict):
        return {}
    return {str(name): value for name, value in shown.items() if isinstance(value, str | int)}


assert KEY_BYTES == 32
