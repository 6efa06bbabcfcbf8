"""One slab of host memory cut into equal slots: the RAM tier and the staging area of every transfer.

Handing out a slot is O(1) and allocates nothing. At most `slots - reserved` slots are kept at a time, so
that a full RAM tier can always stage a load. Pages are touched when first written, or ahead by `prefault`.
The arena knows nothing of blocks, keys or eviction.

Locking: none here. `allocate` and `free` belong to one owner (the store) and are called under its lock.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from enum import StrEnum
from pathlib import Path

from tiercel.blocks import PAGE_BYTES
from tiercel.errors import MemoryLimitError
from tiercel.memory.limits import filesystem_free_bytes
from tiercel.memory.populate import populate
from tiercel.memory.slab import advise_huge, check_host, private_slab

_PREFAULT_STEP_BYTES = 4 << 20
_PREFAULT_PAUSE_S = 0.001
_KEPT, _STAGED = 1, 2


class ArenaKind(StrEnum):
    """Where the slab lives: this process' own memory, or memory other processes can map."""

    PRIVATE = "private"
    SHARED = "shared"


class Arena:
    """`slots` slots of `slot_bytes` bytes each, page aligned.

    `reserved` of them are only given to callers that ask for staging. A SHARED arena is an anonymous
    memory file whose descriptor (`fileno`) can be handed to another process; with `shared_dir` it is an
    unlinked file on that (tmpfs) directory instead. Raises `MemoryLimitError` when the slab does not fit
    the host, its cgroup or the directory's file system, before any page is touched.
    """

    def __init__(
        self,
        slot_bytes: int,
        slots: int,
        *,
        reserved: int = 0,
        kind: ArenaKind = ArenaKind.PRIVATE,
        shared_dir: Path | None = None,
    ) -> None:
        if slot_bytes < 1 or slots < 1 or not 0 <= reserved < slots:
            raise MemoryLimitError(
                f"arena of {slots} slots of {slot_bytes} bytes with {reserved} reserved: "
                "accepted are 1 or more slots and fewer reserved ones"
            )
        self.slot_bytes = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
        self.slots = slots
        self.reserved = reserved
        self.kind = kind
        self._fd, self._map = _map_slab(self.slot_bytes * slots, kind, shared_dir)
        self.huge_pages = kind is ArenaKind.PRIVATE and advise_huge(self._map)
        self._view = memoryview(self._map)
        self._fresh = 0
        self._freed: list[int] = []
        self._use = bytearray(slots)
        self._kept = 0
        self._closing = threading.Event()

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole slab, touched or not."""
        return self.slot_bytes * self.slots

    @property
    def free_slots(self) -> int:
        """Slots nobody holds, reserved ones included."""
        return self.slots - self._fresh + len(self._freed)

    def allocate(self, *, staging: bool = False) -> int | None:
        """Hand out a slot, or None when none is free for this purpose."""
        if not self.free_slots or (not staging and self._kept >= self.slots - self.reserved):
            return None
        if self._freed:
            slot = self._freed.pop()
        else:
            slot, self._fresh = self._fresh, self._fresh + 1
        self._use[slot] = _STAGED if staging else _KEPT
        self._kept += not staging
        return slot

    def free(self, slot: int) -> None:
        """Take a slot back. Freeing one that is not handed out is a bug of ours and asserts."""
        assert self._use[slot], f"slot {slot} freed twice"
        self._kept -= self._use[slot] == _KEPT
        self._use[slot] = 0
        self._freed.append(slot)

    def view(self, slot: int) -> memoryview:
        """The slot's bytes, writable. Valid until the slot is freed."""
        start = slot * self.slot_bytes
        return self._view[start : start + self.slot_bytes]

    def fileno(self) -> int:
        """Descriptor of a SHARED arena, for another process to map; -1 for a private one."""
        return self._fd

    def prefault(self) -> None:
        """Touch every page now, in small steps, until done or closed. Blocks; run it on a thread of its own.

        Worth it without huge pages: direct reads into untouched 4 KiB pages ran at 0.4 GB/s, into touched
        ones at 1.9. In steps, so that closing need not wait long.
        """
        for start in range(0, self.total_bytes, _PREFAULT_STEP_BYTES):
            if self._closing.wait(_PREFAULT_PAUSE_S):
                return
            length = min(_PREFAULT_STEP_BYTES, self.total_bytes - start)
            try:
                if not populate(self._map, start, length):
                    return
            except ValueError:
                return

    def close(self) -> None:
        """Give the memory back. Views still held elsewhere keep it mapped until they are dropped."""
        self._closing.set()
        try:
            self._view.release()
            self._map.close()
        except BufferError:
            pass
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _map_slab(total_bytes: int, kind: ArenaKind, shared_dir: Path | None) -> tuple[int, mmap.mmap]:
    if kind is ArenaKind.PRIVATE:
        return -1, private_slab(total_bytes, "RAM tier")
    check_host(total_bytes, "RAM tier")
    fd = _shared_fd(total_bytes, shared_dir)
    try:
        return fd, mmap.mmap(fd, total_bytes, flags=mmap.MAP_SHARED)
    except OSError as fault:
        os.close(fd)
        raise MemoryLimitError(f"shared RAM tier of {total_bytes} bytes cannot be mapped: {fault}") from None


def _shared_fd(total_bytes: int, shared_dir: Path | None) -> int:
    """An unlinked memory file. Never larger than its file system: a write past that is a SIGBUS."""
    if shared_dir is None:
        fd = os.memfd_create("tiercel-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, total_bytes)
        return fd
    try:
        free_bytes = filesystem_free_bytes(shared_dir)
        if total_bytes > free_bytes:
            raise MemoryLimitError(
                f"shared RAM tier of {total_bytes} bytes does not fit {shared_dir}: {free_bytes} bytes are "
                "free there; enlarge it (/dev/shm: mount option size, emptyDir sizeLimit) or lower "
                "the RAM size"
            )
        fd, name = tempfile.mkstemp(prefix="tiercel-arena-", dir=shared_dir)
    except OSError as fault:
        raise _cannot_share(total_bytes, shared_dir, fault) from None
    try:
        os.unlink(name)
        # Takes the room at once, so that nobody else can take it from under us.
        os.posix_fallocate(fd, 0, total_bytes)
    except OSError as fault:
        os.close(fd)
        raise _cannot_share(total_bytes, shared_dir, fault) from None
    return fd


def _cannot_share(total_bytes: int, shared_dir: Path, fault: OSError) -> MemoryLimitError:
    return MemoryLimitError(f"shared RAM tier of {total_bytes} bytes in {shared_dir}: {fault.strerror}")
