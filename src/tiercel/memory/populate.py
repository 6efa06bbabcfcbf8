"""Touching pages ahead of need, without holding the interpreter: where memory is short, the kernel call takes
as long as it takes to free some, and everything else in the process must go on meanwhile.
"""

from __future__ import annotations

import ctypes
import mmap

_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def populate(slab: mmap.mmap, start: int, length: int) -> bool:
    """Touch `length` bytes from `start` on, whole pages. False where the kernel does not do that.

    Blocks. Raises ValueError once the slab is closed.
    """
    # Also keeps the slab mapped for as long as the call takes.
    first = ctypes.c_char.from_buffer(slab, start)
    return bool(_libc.madvise(ctypes.addressof(first), length, _MADV_POPULATE_WRITE) == 0)
