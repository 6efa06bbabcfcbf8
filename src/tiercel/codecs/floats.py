"""Numbers of KV as float32 and back, for each dtype a cache may have; numpy has no bfloat16.

Arrays are [rows, width]. `narrow` rounds to nearest, ties to even, as a cast of torch does.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U32 = npt.NDArray[np.uint32]
# Numbers as they lie in the payload: bfloat16 as uint16, all others as what they are.
Stored = npt.NDArray[Any]

# Blocks with larger peaks, or smaller ones that are not zero, are kept exactly: scales stay ordinary numbers.
PEAK_MAX, PEAK_MIN = 1e5, 1e-30


class Floats(Protocol):
    """One dtype."""

    @property
    def stored(self) -> np.dtype[Any]:
        """How numpy sees the payload."""

    def widen(self, part: Stored, into: F32) -> None:
        """Numbers as float32, without loss."""

    def narrow(self, values: F32, into: Stored) -> None:
        """The nearest numbers of the dtype; may change `values`."""

    def peaks(self, part: Stored) -> Stored:
        """The largest magnitude of each row, one after the other."""


class _Native:
    """float16 and float32, which numpy has."""

    def __init__(self, name: str) -> None:
        self._stored: np.dtype[Any] = np.dtype(name)

    @property
    def stored(self) -> np.dtype[Any]:
        return self._stored

    def widen(self, part: Stored, into: F32) -> None:
        np.copyto(into, part)

    def narrow(self, values: F32, into: Stored) -> None:
        # Beyond the dtype's largest number there is only what nobody of us encoded.
        with np.errstate(over="ignore"):
            np.copyto(into, values, casting="same_kind")

    def peaks(self, part: Stored) -> Stored:
        found: Stored = np.maximum(part.max(axis=-1), -part.min(axis=-1))
        return found.reshape(-1)


class _BFloat16:
    """The upper half of a float32."""

    @property
    def stored(self) -> np.dtype[Any]:
        return np.dtype(np.uint16)

    def widen(self, part: Stored, into: F32) -> None:
        np.left_shift(part, 16, out=into.view(np.uint32), dtype=np.uint32)

    def narrow(self, values: F32, into: Stored) -> None:
        bits: U32 = values.view(np.uint32)
        odd = bits >> np.uint32(16)
        odd &= np.uint32(1)
        bits += odd
        bits += np.uint32(0x7FFF)
        bits >>= np.uint32(16)
        np.copyto(into, bits, casting="same_kind")

    def peaks(self, part: Stored) -> Stored:
        # Without the sign, the order of the bits is the order of the numbers. numpy reduces short rows
        # slowly: they become columns, several numbers at a time.
        sizes = np.bitwise_and(part, np.uint16(0x7FFF), order="C").reshape(-1, part.shape[-1])
        words = sizes.view(np.uint64) if sizes.shape[1] % 4 == 0 else sizes
        tops = np.ascontiguousarray(words.T).view(np.uint16).max(axis=0)
        return reduced(np.maximum, tops.reshape(len(sizes), -1)).reshape(-1)


FLOATS: dict[str, Floats] = {
    "bfloat16": _BFloat16(),
    "float16": _Native("float16"),
    "float32": _Native("float32"),
}


def usable(peaks: F32) -> bool:
    """Whether rows with these peaks can be scaled: ordinary numbers all of them (NaN is not), or zero."""
    return bool(np.all((peaks == 0) | ((peaks >= PEAK_MIN) & (peaks <= PEAK_MAX))))


def reduced(take: np.ufunc, columns: Stored) -> Stored:
    """The lowest or highest along axis 1, whose length is a power of two; the axis stays.

    numpy reduces an axis slowly where what lies behind it is short: halves are compared instead.
    """
    while columns.shape[1] > 1:
        half = columns.shape[1] // 2
        columns = take(columns[:, :half], columns[:, half:])
    return columns
