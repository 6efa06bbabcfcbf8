"""Slabs of this process' own memory: checked against what the host has left before any page is touched."""

from __future__ import annotations

import mmap
from pathlib import Path

from tiercel.errors import MemoryLimitError
from tiercel.memory.limits import host_limit

_MADV_HUGEPAGE = 14
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def check_host(total_bytes: int, what: str) -> None:
    """Raise `MemoryLimitError` where so many more bytes do not fit the host or our control groups."""
    limit = host_limit()
    if total_bytes > limit.available_bytes:
        raise MemoryLimitError(
            f"{what} of {total_bytes} bytes does not fit: {limit.available_bytes} bytes are left "
            f"({limit.source})"
        )


def private_slab(total_bytes: int, what: str) -> mmap.mmap:
    """Memory of this process alone, none of it touched. Raises `MemoryLimitError` where it does not fit."""
    check_host(total_bytes, what)
    try:
        return mmap.mmap(-1, total_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as fault:
        raise MemoryLimitError(f"{what} of {total_bytes} bytes cannot be mapped: {fault.strerror}") from None


def advise_huge(slab: mmap.mmap) -> bool:
    """Ask for huge pages, which cut first-touch cost and TLB misses. Whether this kernel gives them."""
    try:
        slab.madvise(_MADV_HUGEPAGE)
        return "[never]" not in _HUGE_PAGES.read_text()
    except (OSError, ValueError):
        return False
