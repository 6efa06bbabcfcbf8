"""fp8: every row, one token's head, has one scale, its largest magnitude.

    code = float8 e4m3 of (x / peak * 448)      |x - x'| <= max(|x| / 16, peak / 448 / 1024)

and half a step of the KV dtype on top, for rounding back. A scale for a whole tensor would be set by a few
tokens and waste most of the codes on the others.
"""

from __future__ import annotations

import numpy as np

from tiercel.codecs.floats import F32, Floats, Stored
from tiercel.codecs.scaled import Codes, Scaled, inverse, peaks_of, tops_of

_E4M3_MAX = np.float32(448)
# Between the exponent biases of e4m3 and float32. With both, e4m3's bits are the upper ones of a float32's,
# also where it has no leading one any more.
_BIAS = np.float32(2.0**120)


class Fp8(Scaled):
    """float8 e4m3 and a scale per token and head: finer than int8 near zero, coarser elsewhere."""

    name = "fp8"
    number = 6

    def _quantise(self, view: Stored, x: F32, scales: Stored, codes: Codes, floats: Floats) -> bool:
        tops = peaks_of(view, scales, floats)
        if tops is None:
            return False
        x *= inverse(tops, _E4M3_MAX / _BIAS)
        signs = np.signbit(x).view(np.uint8)
        signs *= np.uint8(0x80)
        bits = x.view(np.uint32)
        # Round to four bits of exponent and three of mantissa, ties to even.
        odd = bits >> np.uint32(20)
        odd &= np.uint32(1)
        bits += odd
        bits += np.uint32(0x7FFFF)
        bits >>= np.uint32(20)
        # Their lowest byte: between it and the sign there are zeros.
        np.copyto(codes, bits, casting="unsafe")
        codes |= signs
        return True

    def _restore(self, codes: Codes, scales: Stored, x: F32, floats: Floats) -> bool:
        tops = tops_of(scales, floats)
        if tops is None:
            return False
        sign = codes.astype(np.uint16)
        size = sign & np.uint16(0x7F)
        size <<= np.uint16(4)
        sign &= np.uint16(0x80)
        sign <<= np.uint16(8)
        size |= sign
        np.left_shift(size, 16, out=x.view(np.uint32), dtype=np.uint32)
        x *= tops * (_BIAS / _E4M3_MAX)
        return True
