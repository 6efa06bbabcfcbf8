"""int8: keys by channel, between the lowest and the highest number of a group; values by token.

    keys    code = round((x - low) / (high - low) * 255)   |x - x'| <= (high - low) / 510
    values  code = round(x / peak * 127)                   |x - x'| <= peak / 254

and half a step of the KV dtype on top, for rounding back. Keys have channels that are large in all tokens,
which would set the scale of every row; in a channel they lie together. A group is a channel of one head over
128 tokens, or 64, whichever divides those that lie together; `low` and `high` are numbers of it and come back
as they were. Values have one scale per row, one token's head, its largest magnitude: a scale for a whole
tensor would be set by a few tokens.

Where a shape does not say which numbers are keys, or neither 64 nor 128 divides the tokens (two scales for
fewer numbers take too much room), keys are rows too.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tiercel.codecs.floats import F32, PEAK_MAX, PEAK_MIN, Floats, Stored, reduced
from tiercel.codecs.scaled import CHUNK, Codes, Panel, Scaled, inverse, peaks_of, tops_of, widened
from tiercel.codecs.shape import BlockShape

_SPANS = (128, 64)
_SIGNED_MAX, _CODE_MAX = np.float32(127), np.float32(255)


class Int8(Scaled):
    """Eight bits and what they are measured with: nothing that an answer shows, about half the bytes."""

    name = "int8"
    number = 5

    def _panels(self, numbers: Stored, shape: BlockShape) -> Iterable[Panel]:
        span = _span(shape)
        if span is None:
            return super()._panels(numbers, shape)
        forms = {True: (-1, span, shape.row), False: (-1, shape.row)}
        return ((view, forms[keys]) for view, keys in shape.panels(numbers, CHUNK))

    def _scales(self, count: int, shape: BlockShape) -> int:
        span = _span(shape)
        return count // shape.row if span is None else count // 2 // shape.row + count // span

    def _quantise(self, view: Stored, x: F32, scales: Stored, codes: Codes, floats: Floats) -> bool:
        if x.ndim == 3:
            return _quantise_channels(x, scales, codes, floats)
        tops = peaks_of(view, scales, floats)
        if tops is None:
            return False
        x *= inverse(tops, _SIGNED_MAX)
        np.rint(x, out=x)
        np.copyto(codes.view(np.int8), x, casting="unsafe")
        return True

    def _restore(self, codes: Codes, scales: Stored, x: F32, floats: Floats) -> bool:
        if x.ndim == 3:
            return _restore_channels(codes, scales, x, floats)
        tops = tops_of(scales, floats)
        if tops is None:
            return False
        np.copyto(x, codes.view(np.int8))
        x *= tops / _SIGNED_MAX
        return True


def _span(shape: BlockShape) -> int | None:
    """Tokens of a group of keys; None where keys are rows."""
    tokens = shape.tokens
    return None if tokens is None else next((one for one in _SPANS if tokens % one == 0), None)


def _quantise_channels(x: F32, scales: Stored, codes: Codes, floats: Floats) -> bool:
    low, high = reduced(np.minimum, x), reduced(np.maximum, x)
    if not (np.all(low >= -PEAK_MAX) and np.all(high <= PEAK_MAX)):  # NaN is neither
        return False
    width = high - low
    if not np.all((width == 0) | (width >= PEAK_MIN)):
        return False
    lows, highs = scales.reshape(2, *low.shape)
    x -= low
    x *= inverse(width, _CODE_MAX)
    np.rint(x, out=x)
    np.copyto(codes, x, casting="unsafe")
    floats.narrow(low, lows)
    floats.narrow(high, highs)
    return True


def _restore_channels(codes: Codes, scales: Stored, x: F32, floats: Floats) -> bool:
    low, high = widened(scales, floats).reshape(2, len(x), 1, x.shape[2])
    if not (np.all(np.abs(low) <= PEAK_MAX) and np.all(np.abs(high) <= PEAK_MAX)):
        return False
    np.copyto(x, codes)
    x *= (high - low) / _CODE_MAX
    x += low
    return True
