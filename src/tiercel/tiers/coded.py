"""Codecs around any tier: what leaves through it is encoded, what comes back is as long as it was.

An encoded record has the plain one's header, with the codec's number and with length and checksum of the
payload as it lies there: of an exact codec first the checksum of the plain payload (16 bytes), which the
store then verifies as ever; then the encoded payload. What does not get shorter by a page is stored plain.

Every codec is understood when reading, whatever the tier is set to. A lossy one encodes only blocks whose
identity is marked with it; all others are kept exactly. Knows nothing of encryption, which lies below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import xxhash

from tiercel.blocks import HEADER_BYTES, BlockKey, Header, parse, payload_of, record_bytes
from tiercel.blocks.record import RAW_CODEC, header_info, write_header
from tiercel.codecs import Codec, Mark, codec_named, codec_numbered
from tiercel.errors import ConfigError
from tiercel.tiers.around import Around, offering
from tiercel.tiers.base import Fate, Outcome, Tier

_BATCH_BYTES = 16 << 20
_SUM_BYTES = 16
_CODEC_AT = slice(12, 16)
_PLAIN = RAW_CODEC.to_bytes(4, "little")


class Coded(Around):
    """A `Tier` over another one. Build it with `coded`, which forwards what else the inner one offers.

    `codec` None stores plain records. Owns its buffers: page-aligned, one per thread, as long as its largest
    batch and at most 16 MiB or one record.
    """

    def __init__(self, inner: Tier, codec: Codec | None) -> None:
        super().__init__(inner)
        self._codec = codec
        self._exact = _exact_codec(codec)

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        outcomes = self.inner.read(keys, records)
        for at, (key, record) in enumerate(zip(keys, records, strict=True)):
            if outcomes[at].fate is Fate.OK and record[_CODEC_AT] != _PLAIN:
                outcomes[at] = self._decode(key, record)
        return outcomes

    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        if self._codec is None or not keys:
            return self.inner.write(keys, records)
        outcomes: list[Outcome] = []
        first = total = 0
        for at, record in enumerate(records):
            if at > first and total + len(record) > _BATCH_BYTES:
                outcomes += self._write(keys[first:at], records[first:at], self._scratch(total))
                first, total = at, 0
            total += len(record)
        return outcomes + self._write(keys[first:], records[first:], self._scratch(total))

    def _write(
        self, keys: Sequence[BlockKey], records: Sequence[memoryview], scratch: memoryview
    ) -> list[Outcome]:
        made: list[memoryview] = []
        for record in records:
            made.append(self._encode(record, scratch[: len(record)]))
            scratch = scratch[len(record) :]
        outcomes = self.inner.write(keys, made)
        return [
            replace(outcome, stored_bytes=len(one)) if outcome.fate is Fate.OK else outcome
            for outcome, one in zip(outcomes, made, strict=True)
        ]

    def _encode(self, record: memoryview, into: memoryview) -> memoryview:
        """The encoded record, in `into`; or the record itself, where that is no longer."""
        header = parse(record)
        if isinstance(header, str) or header.codec != RAW_CODEC:
            return record
        mark = Mark.of(header.info)
        codec = self._codec_for(mark, header.payload_bytes)
        if codec is None or record_bytes(header.payload_bytes) > len(record):
            return record
        room = payload_of(into, header.payload_bytes)
        if codec.exact:
            room[:_SUM_BYTES] = header.checksum
            room = room[_SUM_BYTES:]
        plain = payload_of(record, header.payload_bytes)
        size = codec.encode(plain, room, None if mark is None else mark.shape)
        if size is None:
            return record
        size += _SUM_BYTES if codec.exact else 0
        total = record_bytes(size)
        if total >= len(record):
            return record
        body = payload_of(into, size)
        sealed = replace(
            header, codec=codec.number, payload_bytes=size, checksum=xxhash.xxh3_128_digest(body)
        )
        write_header(into, sealed, header_info(record))
        into[HEADER_BYTES + size : total] = bytes(total - HEADER_BYTES - size)
        return into[:total]

    def _codec_for(self, mark: Mark | None, payload_bytes: int) -> Codec | None:
        codec = self._codec
        if codec is None or codec.exact:
            return codec
        if mark is None or codec.name not in mark.codecs or not codec.fits(mark.shape, payload_bytes):
            return self._exact
        return codec

    def _decode(self, key: BlockKey, record: memoryview) -> Outcome:
        """Turn an encoded record into the plain one, in place. Trusts no byte."""
        header = parse(record)
        if isinstance(header, str):
            return Outcome(Fate.CORRUPT, header)
        if header.key != key:
            return Outcome(Fate.CORRUPT, "another block's record")
        codec = codec_numbered(header.codec)
        if codec is None:
            return Outcome(Fate.MISSING, f"codec {header.codec} is not known here")
        mark = Mark.of(header.info)
        if not codec.exact and (mark is None or codec.name not in mark.codecs):
            return Outcome(Fate.CORRUPT, f"codec {codec.name} on a block that is not marked with it")
        size, plain_bytes = header.payload_bytes, header.decoded_bytes
        if not _SUM_BYTES < size < plain_bytes or record_bytes(plain_bytes) > len(record):
            return Outcome(Fate.CORRUPT, "lengths do not fit")
        # Decoded from a copy: the plain payload goes where the encoded one lies.
        body = self._scratch(size)
        np.copyto(np.frombuffer(body, np.uint8), np.frombuffer(payload_of(record, size), np.uint8))
        if xxhash.xxh3_128_digest(body) != header.checksum:
            return Outcome(Fate.CORRUPT, "payload checksum differs")
        payload = payload_of(record, plain_bytes)
        encoded = body[_SUM_BYTES:] if codec.exact else body
        if not codec.decode(encoded, payload, None if mark is None else mark.shape):
            return Outcome(Fate.CORRUPT, f"not what codec {codec.name} makes")
        _restore_header(record, header, bytes(body[:_SUM_BYTES]) if codec.exact else None)
        return Outcome(Fate.OK, stored_bytes=record_bytes(size))


def _restore_header(record: memoryview, header: Header, checksum: bytes | None) -> None:
    """Seal a decoded record as a plain one: with the checksum of what was stored, or of what it is now."""
    if checksum is None:
        checksum = xxhash.xxh3_128_digest(payload_of(record, header.decoded_bytes))
    info = header_info(record)
    plain = replace(header, codec=RAW_CODEC, payload_bytes=header.decoded_bytes, checksum=checksum)
    write_header(record, plain, info)
    end, total = HEADER_BYTES + header.decoded_bytes, record_bytes(header.decoded_bytes)
    record[end:total] = bytes(total - end)


def _exact_codec(codec: Codec | None) -> Codec | None:
    """What a tier set to a lossy codec keeps unmarked blocks with: lossless, where that is installed."""
    if codec is None or codec.exact:
        return codec
    try:
        return codec_named("lossless")
    except ConfigError:
        return None


def coded(inner: Tier, codec: Codec | None) -> Coded:
    """Keep what is written to `inner` with a codec (None: plain), and offer what `inner` offers."""
    made: Coded = offering(Coded, inner)(inner, codec)
    return made
