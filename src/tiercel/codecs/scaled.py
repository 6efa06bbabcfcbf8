"""What int8 and fp8 have in common: groups of numbers that share a scale, a byte for each number.

    encoded = scales in the KV dtype, then codes; both in the order in which the codec walks through a payload

The walk is in panels that fit a core's cache. A panel is a view of numbers, and how they are grouped: a group
lies along axis 1, a row [rows, head_dim] or a head's channels over some tokens [groups, tokens, head_dim].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from tiercel.codecs.floats import F32, FLOATS, Floats, Stored, usable
from tiercel.codecs.shape import BlockShape

Codes = npt.NDArray[np.uint8]
Panel = tuple[Stored, tuple[int, ...]]

# So many numbers at a time: 256 Ki are a fifth faster than 64 Ki and twice as fast as 16 Ki, as calls cost
# more than leaving the cache does. The order of int8's panels depends on it: it is part of the format.
CHUNK = 1 << 18


class Scaled:
    """Layout and walk; what becomes of a panel is its codec's."""

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
        split = self._scales(len(numbers), shape) * shape.item_bytes
        size = split + len(numbers)
        if size >= len(payload):
            return None
        scales, codes = np.frombuffer(into[:split], floats.stored), np.frombuffer(into[split:size], np.uint8)
        for view, x, some_scales, some_codes in self._walk(numbers, shape, scales, codes):
            floats.widen(view, x.reshape(view.shape))
            if not self._quantise(view, x, some_scales, some_codes, floats):
                return None
        return size

    def decode(self, encoded: memoryview, payload: memoryview, shape: BlockShape | None) -> bool:
        if shape is None or not shape.covers(len(payload)):
            return False
        floats = FLOATS[shape.dtype]
        numbers = np.frombuffer(payload, floats.stored)
        split = self._scales(len(numbers), shape) * shape.item_bytes
        if len(encoded) != split + len(numbers):
            return False
        scales, codes = (
            np.frombuffer(encoded[:split], floats.stored),
            np.frombuffer(encoded[split:], np.uint8),
        )
        for view, x, some_scales, some_codes in self._walk(numbers, shape, scales, codes):
            if not self._restore(some_codes, some_scales, x, floats):
                return False
            floats.narrow(x.reshape(view.shape), view)
        return True

    def _walk(
        self, numbers: Stored, shape: BlockShape, scales: Stored, codes: Codes
    ) -> Iterator[tuple[Stored, F32, Stored, Codes]]:
        """Each panel: its numbers, a float32 for each of them, grouped, and its part of scales and codes."""
        at = first = 0
        values = np.empty(0, np.float32)
        for view, form in self._panels(numbers, shape):
            values = values if at else np.empty(view.size, np.float32)
            x = values[: view.size].reshape(form)
            end, last = at + view.size, first + scales_of(x)
            yield view, x, scales[first:last], codes[at:end].reshape(x.shape)
            at, first = end, last

    def _panels(self, numbers: Stored, shape: BlockShape) -> Iterable[Panel]:
        """All numbers, none in a larger panel than the first."""
        return [(rows, (-1, shape.row)) for rows in shape.rows(numbers, CHUNK)]

    def _scales(self, count: int, shape: BlockShape) -> int:
        """How many there are for so many numbers."""
        return count // shape.row

    def _quantise(self, view: Stored, x: F32, scales: Stored, codes: Codes, floats: Floats) -> bool:
        """Fill scales and codes of a panel, `x` as float32; may change `x`. False: it cannot be kept."""
        raise NotImplementedError

    def _restore(self, codes: Codes, scales: Stored, x: F32, floats: Floats) -> bool:
        """Fill `x` with what codes and scales stand for. False: nobody of us made them."""
        raise NotImplementedError


def scales_of(x: F32) -> int:
    """The scales of a panel: one for a row, two for a channel's group, its lowest and highest number."""
    return len(x) if x.ndim == 2 else 2 * len(x) * x.shape[2]


def peaks_of(view: Stored, scales: Stored, floats: Floats) -> F32 | None:
    """The largest magnitude of each row, [rows, 1], put down as its scale; None where one is out of range."""
    scales[:] = floats.peaks(view)
    return tops_of(scales, floats)


def tops_of(scales: Stored, floats: Floats) -> F32 | None:
    """The scales of rows, [rows, 1]; None where one is out of range."""
    tops = widened(scales, floats)[:, None]
    return tops if usable(tops) else None


def widened(scales: Stored, floats: Floats) -> F32:
    """Scales as float32."""
    wide = np.empty(scales.shape, np.float32)
    floats.widen(scales, wide)
    return wide


def inverse(tops: F32, top: np.float32) -> F32:
    """What numbers are multiplied with, so that `tops` become `top`; 0 where there are only zeros."""
    found: F32 = np.divide(top, tops, out=np.zeros_like(tops), where=tops > 0)
    return found
