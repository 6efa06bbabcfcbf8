"""int4: keys by channel, values by token, groups of 32 numbers with a lowest number and a step each.

    payload: parts of keys and values, each [heads, tokens, head_dim], as its shape says
    encoded: of a few parts, of K then V, of a few heads: lows, steps (float16), codes (two per byte)

Keys have channels that are large in all tokens: one step along the tokens of a channel fits them, one along
the channels of a token would be set by those few. Values have none, and are added up by token. Group sizes:
the largest of 32, 16, 8, 4, 2 that divides tokens (keys) or head_dim (values). With code = (x - low) / step,
rounded to 0..15:

    |x - x'| <= step / 2, step <= (highest - low) / 15, rounded up to a float16

and half a step of the KV dtype on top. No tokens are kept apart: a block at rest is never the end of a prompt
(that is computed), and the first tokens, which attention leans on, are too few to matter
(`docs/decisions/codecs.md`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tiercel.codecs.floats import F32, FLOATS, PEAK_MAX, reduced
from tiercel.codecs.shape import BlockShape

F16 = npt.NDArray[np.float16]
Codes = npt.NDArray[np.uint8]

_GROUPS = (32, 16, 8, 4, 2)
_TOP = np.float32(15)
# So many numbers at a time: what is worked on stays in a core's cache.
_CHUNK = 1 << 16


class Int4:
    """Four bits and the lows and steps of groups: five in all."""

    name = "int4"
    number = 4
    exact = False

    def fits(self, shape: BlockShape | None, payload_bytes: int) -> bool:
        if shape is None or shape.tokens is None or not shape.covers(payload_bytes):
            return False
        return shape.tokens % 2 == 0 and shape.row % 2 == 0

    def encode(self, payload: memoryview, into: memoryview, shape: BlockShape | None) -> int | None:
        if shape is None or not self.fits(shape, len(payload)):
            return None
        floats = FLOATS[shape.dtype]
        at = 0
        for numbers, keys in shape.panels(np.frombuffer(payload, floats.stored), _CHUNK):
            x = np.empty((len(numbers) * numbers.shape[1], *numbers.shape[2:]), np.float32)
            floats.widen(numbers, x.reshape(numbers.shape))
            grouped = _grouped(x, keys)
            lows, steps, codes, end = _parts(into, at, x, grouped)
            if codes is None or not _measure(grouped, lows, steps):
                return None
            _quantise(x, grouped, lows, steps, codes)
            at = end
        return at

    def decode(self, encoded: memoryview, payload: memoryview, shape: BlockShape | None) -> bool:
        if shape is None or not self.fits(shape, len(payload)):
            return False
        floats = FLOATS[shape.dtype]
        at = 0
        for numbers, keys in shape.panels(np.frombuffer(payload, floats.stored), _CHUNK):
            x = np.empty((len(numbers) * numbers.shape[1], *numbers.shape[2:]), np.float32)
            grouped = _grouped(x, keys)
            lows, steps, codes, at = _parts(encoded, at, x, grouped)
            if codes is None or not (np.isfinite(lows).all() and np.isfinite(steps).all()):
                return False
            _restore(codes, lows, steps, x, grouped)
            floats.narrow(x.reshape(numbers.shape), numbers)
        return at == len(encoded)


def _grouped(x: F32, keys: bool) -> F32:
    """[heads, tokens, width] as [groups, length, together] or [groups, length]: a group lies along axis 1."""
    _, tokens, width = x.shape
    length = next(one for one in _GROUPS if (tokens if keys else width) % one == 0)
    return x.reshape(-1, length, width) if keys else x.reshape(-1, length)


def _parts(encoded: memoryview, at: int, x: F32, grouped: F32) -> tuple[F16, F16, Codes | None, int]:
    """Lows, steps and codes of one part, from byte `at` of the encoded payload on, and where they end.

    A byte holds the codes of token `t` (lower half) and token `t + tokens / 2` of the same channel.
    """
    heads, tokens, width = x.shape
    form = (len(grouped), 1, *grouped.shape[2:])
    scales = x.size // grouped.shape[1] * 2
    end = at + 2 * scales + x.size // 2
    if end > len(encoded):
        return np.empty(0, np.float16), np.empty(0, np.float16), None, at
    lows = np.frombuffer(encoded[at : at + scales], np.float16).reshape(form)
    steps = np.frombuffer(encoded[at + scales : at + 2 * scales], np.float16).reshape(form)
    codes = np.frombuffer(encoded[at + 2 * scales : end], np.uint8).reshape(heads, tokens // 2, width)
    return lows, steps, codes, end


def _measure(grouped: F32, lows: F16, steps: F16) -> bool:
    """Lowest numbers and steps, rounded so that nothing of a group lies outside of 0..15 steps."""
    # Values as columns.
    columns = grouped if grouped.ndim == 3 else np.ascontiguousarray(grouped.T)[None]
    low, high = (reduced(take, columns).reshape(lows.shape) for take in (np.minimum, np.maximum))
    if not (np.all(low > -_HALF_MAX) and np.all(high < _HALF_MAX)):  # NaN is in no order
        return False
    np.copyto(lows, low, casting="same_kind")
    lows[...] = np.where(lows > low, np.nextafter(lows, np.float16(-np.inf)), lows)
    step = (high - lows) / _TOP
    np.copyto(steps, step, casting="same_kind")
    steps[...] = np.where(steps < step, np.nextafter(steps, np.float16(np.inf)), steps)
    return True


def _quantise(x: F32, grouped: F32, lows: F16, steps: F16, codes: Codes) -> None:
    wide = steps.astype(np.float32)
    grouped -= lows.astype(np.float32)
    grouped *= np.divide(1, wide, out=np.zeros_like(wide), where=wide > 0)
    np.rint(x, out=x)
    whole = x.astype(np.uint8)
    half = x.shape[1] // 2
    np.left_shift(whole[:, half:], 4, out=codes)
    codes |= whole[:, :half]


def _restore(codes: Codes, lows: F16, steps: F16, x: F32, grouped: F32) -> None:
    half = x.shape[1] // 2
    np.copyto(x[:, :half], codes & np.uint8(15))
    np.copyto(x[:, half:], codes >> np.uint8(4))
    grouped *= steps.astype(np.float32)
    grouped += lows.astype(np.float32)


# Numbers of larger magnitude leave no room for a float16 step beside them.
_HALF_MAX = np.float32(min(PEAK_MAX, 30000.0))
