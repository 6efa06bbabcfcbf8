"""int8 and fp8: every row (one token's head) has one scale, its largest magnitude.

    encoded = peaks [rows] in the KV dtype, then codes [rows, head_dim], a byte each

    int8:  code = round(x / peak * 127)            |x - x'| <= peak / 254
    fp8:   code = float8 e4m3 of (x / peak * 448)  |x - x'| <= max(|x| / 16, peak / 448 / 1024)

and half a step of the KV dtype on top, for rounding back. One scale per token and head keeps attention as it
was: a scale for a whole tensor is set by a few tokens and wastes most of the codes on the others. Rows
follow each other as the shape lists them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tiercel.codecs.floats import F32, FLOATS, Floats, Stored, usable
from tiercel.codecs.shape import BlockShape

Codes = npt.NDArray[Any]

# So many numbers at a time: what is worked on stays in a core's cache. 16 Ki to 64 Ki are alike, 8 Ki is 40 %
# slower (calls cost more than they do).
_CHUNK = 1 << 16
_INT8_MAX = np.float32(127)
_E4M3_MAX = np.float32(448)
# Between the exponent biases of e4m3 and float32. With both, e4m3's bits are the upper ones of a float32's,
# also where it has no leading one any more.
_BIAS = np.float32(2.0**120)


class _Rows:
    """What both have in common: the layout, and the walk over it in parts that fit the cache."""

    exact = False
    name: str
    number: int

    def fits(self, shape: BlockShape | None, payload_bytes: int) -> bool:
        return shape is not None and shape.covers(payload_bytes)

    def encode(self, payload: memoryview, into: memoryview, shape: BlockShape | None) -> int | None:
        if shape is None or not shape.covers(len(payload)):
            return None
        floats = FLOATS[shape.dtype]
        numbers = np.frombuffer(payload, floats.stored)
        rows = len(numbers) // shape.row
        size = self._size(rows, shape)
        if size >= len(payload):
            return None
        peaks, codes = self._parts(into[:size], rows, shape, floats)
        at, values = 0, np.empty(0, np.float32)
        for part in shape.rows(numbers, _CHUNK):
            values = values if at else np.empty(part.size, np.float32)
            end = at + part.size // shape.row
            peaks[at:end] = floats.peaks(part).reshape(-1)
            tops = _widened(peaks[at:end], floats)
            if not usable(tops):
                return None
            x = values[: part.size]
            floats.widen(part, x.reshape(part.shape))
            self._quantise(x.reshape(-1, shape.row), tops, codes[at:end])
            at = end
        return size

    def decode(self, encoded: memoryview, payload: memoryview, shape: BlockShape | None) -> bool:
        if shape is None or not shape.covers(len(payload)):
            return False
        floats = FLOATS[shape.dtype]
        numbers = np.frombuffer(payload, floats.stored)
        rows = len(numbers) // shape.row
        if len(encoded) != self._size(rows, shape):
            return False
        peaks, codes = self._parts(encoded, rows, shape, floats)
        at, values = 0, np.empty(0, np.float32)
        for part in shape.rows(numbers, _CHUNK):
            values = values if at else np.empty(part.size, np.float32)
            end = at + part.size // shape.row
            tops = _widened(peaks[at:end], floats)
            if not usable(tops):
                return False
            x = values[: part.size]
            self._restore(codes[at:end], tops, x.reshape(-1, shape.row))
            floats.narrow(x.reshape(part.shape), part)
            at = end
        return True

    def _size(self, rows: int, shape: BlockShape) -> int:
        return rows * (shape.item_bytes + shape.row)

    def _parts(
        self, encoded: memoryview, rows: int, shape: BlockShape, floats: Floats
    ) -> tuple[Stored, Codes]:
        split = rows * shape.item_bytes
        peaks = np.frombuffer(encoded[:split], floats.stored)
        return peaks, np.frombuffer(encoded[split:], self._code()).reshape(rows, shape.row)

    def _code(self) -> np.dtype[Any]:
        raise NotImplementedError

    def _quantise(self, x: F32, tops: F32, codes: Codes) -> None:
        raise NotImplementedError

    def _restore(self, codes: Codes, tops: F32, x: F32) -> None:
        raise NotImplementedError


class Int8(_Rows):
    """Eight bits and a scale per token and head: nothing that an answer shows, about half the bytes."""

    name = "int8"
    number = 2

    def _code(self) -> np.dtype[Any]:
        return np.dtype(np.int8)

    def _quantise(self, x: F32, tops: F32, codes: Codes) -> None:
        x *= _inverse(tops, _INT8_MAX)
        np.rint(x, out=x)
        np.copyto(codes, x, casting="unsafe")

    def _restore(self, codes: Codes, tops: F32, x: F32) -> None:
        np.multiply(codes, (tops / _INT8_MAX)[:, None], out=x, dtype=np.float32)


class Fp8(_Rows):
    """float8 e4m3 and a scale per token and head: finer than int8 near zero, coarser elsewhere."""

    name = "fp8"
    number = 3

    def _code(self) -> np.dtype[Any]:
        return np.dtype(np.uint8)

    def _quantise(self, x: F32, tops: F32, codes: Codes) -> None:
        x *= _inverse(tops, _E4M3_MAX / _BIAS)
        bits = x.view(np.uint32)
        sign = (bits >> np.uint32(24)).astype(np.uint8)
        sign &= np.uint8(0x80)
        bits &= np.uint32(0x7FFFFFFF)
        # Round to the four bits of exponent and three of mantissa, ties to even.
        odd = bits >> np.uint32(20)
        odd &= np.uint32(1)
        bits += odd
        bits += np.uint32(0x7FFFF)
        bits >>= np.uint32(20)
        np.copyto(codes, bits, casting="same_kind")
        codes |= sign

    def _restore(self, codes: Codes, tops: F32, x: F32) -> None:
        sign = codes.astype(np.uint16)
        size = sign & np.uint16(0x7F)
        size <<= np.uint16(4)
        sign &= np.uint16(0x80)
        sign <<= np.uint16(8)
        size |= sign
        np.left_shift(size, 16, out=x.view(np.uint32), dtype=np.uint32)
        x *= (tops * (_BIAS / _E4M3_MAX))[:, None]


def _widened(peaks: Stored, floats: Floats) -> F32:
    tops = np.empty(peaks.shape, np.float32)
    floats.widen(peaks, tops)
    return tops


def _inverse(tops: F32, top: np.float32) -> F32:
    """What a row is multiplied with, so that its peak becomes `top`; 0 for a row of zeros."""
    found: F32 = np.divide(top, tops, out=np.zeros_like(tops), where=tops > 0)
    return found[:, None]
