"""Lossless: the bytes of numbers sorted by their place, each place compressed by itself where it pays.

    encoded = stride (1 byte), then for each of `stride` planes: length (8 bytes, little endian) and its bytes

Plane `k` holds the bytes k, k + stride, ...: sign and exponent of all numbers together, mantissas together. A
plane as long as it was is stored as it is. Exponents of KV are few, but stand in no order: entropy coding is
all there is to gain (`docs/decisions/codecs.md`), so zstd is told not to search for repetitions. Works on
any bytes: the stride is the one that pays best on a sample.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import zstandard

from tiercel.codecs.shape import BlockShape

Plane = npt.NDArray[np.uint8]

_STRIDES = (2, 4, 1)
_LENGTH_BYTES = 8
_SAMPLE_BYTES = 64 << 10
# What does not shrink by this is not worth the time to undo it.
_WORTH = 0.97
# The smallest tables zstd has: on KV they find nothing less than the larger ones, and take half the time.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7
)


class Lossless:
    """Byte planes and zstd. A zstd context is not for two threads at once, so each has its own."""

    name = "lossless"
    number = 1
    exact = True

    def __init__(self) -> None:
        self._own = threading.local()

    def fits(self, shape: BlockShape | None, payload_bytes: int) -> bool:
        return True

    def encode(self, payload: memoryview, into: memoryview, shape: BlockShape | None) -> int | None:
        data = np.frombuffer(payload, np.uint8)
        compressor = self._compressor()
        stride = _best_stride(data, compressor)
        if not stride:
            return None
        into[0] = stride
        at = 1
        for k in range(stride):
            plane = np.ascontiguousarray(data[k::stride])
            body = _compressed(plane, compressor)
            end = at + _LENGTH_BYTES + len(body)
            if end >= len(payload):
                return None
            into[at : at + _LENGTH_BYTES] = len(body).to_bytes(_LENGTH_BYTES, "little")
            np.copyto(np.frombuffer(into[end - len(body) : end], np.uint8), np.frombuffer(body, np.uint8))
            at = end
        return at

    def decode(self, encoded: memoryview, payload: memoryview, shape: BlockShape | None) -> bool:
        if not len(encoded) or encoded[0] not in _STRIDES:
            return False
        stride = encoded[0]
        data = np.frombuffer(payload, np.uint8)
        at = 1
        for k in range(stride):
            length = int.from_bytes(encoded[at : at + _LENGTH_BYTES], "little")
            at += _LENGTH_BYTES
            if length > len(encoded) - at:
                return False
            target = data[k::stride]
            plane = self._plane(encoded[at : at + length], len(target))
            if plane is None:
                return False
            target[:] = plane
            at += length
        return at == len(encoded)

    def _plane(self, body: memoryview, size: int) -> Plane | None:
        """A plane's `size` bytes. What says it is longer is not unpacked at all."""
        if len(body) == size:
            return np.frombuffer(body, np.uint8)
        try:
            if zstandard.frame_content_size(body) != size:
                return None
            plain = self._decompressor().decompress(body, max_output_size=size)
        except zstandard.ZstdError:
            return None
        return np.frombuffer(plain, np.uint8) if len(plain) == size else None

    def _compressor(self) -> zstandard.ZstdCompressor:
        found: zstandard.ZstdCompressor | None = getattr(self._own, "compressor", None)
        if found is None:
            found = self._own.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        return found

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        found: zstandard.ZstdDecompressor | None = getattr(self._own, "decompressor", None)
        if found is None:
            found = self._own.decompressor = zstandard.ZstdDecompressor()
        return found


def _compressed(plane: Plane, compressor: zstandard.ZstdCompressor) -> bytes | Plane:
    """A plane's bytes at rest: itself where a sample of it, or all of it, does not shrink."""
    if len(plane) > 2 * _SAMPLE_BYTES and _share(_sample(plane), compressor) > _WORTH:
        return plane
    body = compressor.compress(plane.data)
    return body if len(body) < len(plane) * _WORTH else plane


def _best_stride(data: Plane, compressor: zstandard.ZstdCompressor) -> int:
    """How many bytes a number has, as far as it matters; 0 where nothing shrinks."""
    sample = _sample(data)
    shares = {}
    for stride in _STRIDES:
        planes = [np.ascontiguousarray(sample[k::stride]) for k in range(stride)]
        shares[stride] = sum(min(1.0, _share(one, compressor)) for one in planes) / stride
    best = min(shares.values(), default=1.0)
    # The first that is as good as any: fewer planes are quicker.
    return next(one for one in _STRIDES if shares[one] <= best + 0.01) if best < _WORTH else 0


def _sample(data: Plane) -> Plane:
    """Up to 64 KiB from four places, each beginning at a multiple of four bytes."""
    part = _SAMPLE_BYTES // 4
    if len(data) <= _SAMPLE_BYTES:
        return data
    starts = [(len(data) - part) * number // 3 // 4 * 4 for number in range(4)]
    return np.concatenate([data[at : at + part] for at in starts])


def _share(plane: Plane, compressor: zstandard.ZstdCompressor) -> float:
    return len(compressor.compress(plane.data)) / max(1, len(plane))
