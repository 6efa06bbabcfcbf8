"""Files of evicted records, kept under another name to be written over by the next ones.

Freeing a file's space and finding it again costs a file system several times what writing a block does (ext4
on a virtual disk: 220 MB/s of 1 MiB blocks with a deletion each, 1,700 MB/s when files are written over). A
spare is named like an unfinished record, so whoever finds one of a process that is gone removes it.

Holds two descriptors for each spare. What is written over is seen by who has the file still open: a reader
has to make sure, after reading, that the name still leads to what it read.
"""

from __future__ import annotations

import os
import stat
import threading
from dataclasses import dataclass

from tiercel.blocks import BlockKey
from tiercel.tiers.folder import Visit, record_name, temp_name, unlink_quietly

_SPARES_MAX = 32
_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class Spare:
    """An open file to be written over: its name in its folder, and its length."""

    fd: int
    folder_fd: int
    name: str
    file_bytes: int

    def close(self) -> None:
        """Release the descriptors; the file stays."""
        os.close(self.fd)
        os.close(self.folder_fd)

    def discard(self) -> None:
        """Delete the file."""
        unlink_quietly(self.name, self.folder_fd)
        self.close()


class Spares:
    """A few spares of one tier, at most 64 MiB of them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spares: list[Spare] = []
        self._bytes = 0
        self._closed = False

    def keep(self, visit: Visit, key: BlockKey) -> None:
        """Take the record of `key` away from its name, as a spare or for good. Raises `OSError`."""
        folder_fd = visit.folder(key)
        name = temp_name()
        # The name first: what is opened then is nobody else's any more.
        os.rename(record_name(key), name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        spare = _opened(name, folder_fd)
        if spare is None:
            unlink_quietly(name, folder_fd)
            return
        surplus = []
        with self._lock:
            self._spares.append(spare)
            self._bytes += spare.file_bytes
            while self._closed or len(self._spares) > _SPARES_MAX or self._bytes > _BYTES_MAX:
                surplus.append(self._spares.pop(0))
                self._bytes -= surplus[-1].file_bytes
                if not self._spares:
                    break
        for one in surplus:
            one.discard()

    def take(self, file_bytes: int) -> Spare | None:
        """A spare of this length, now the caller's."""
        with self._lock:
            for at, one in enumerate(self._spares):
                if one.file_bytes == file_bytes:
                    self._bytes -= file_bytes
                    return self._spares.pop(at)
        return None

    def close(self) -> None:
        """Delete all, and keep none from now on."""
        with self._lock:
            self._closed = True
            spares, self._spares = self._spares, []
            self._bytes = 0
        for one in spares:
            one.discard()


def _opened(name: str, folder_fd: int) -> Spare | None:
    """The file as a spare; None if it must not be written over."""
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_fd)
    except OSError:
        return None
    seen = os.fstat(fd)
    # Not what has another name too, perhaps outside the cache, nor what is not ours alone.
    if not stat.S_ISREG(seen.st_mode) or seen.st_nlink != 1 or seen.st_uid != os.geteuid():
        os.close(fd)
        return None
    return Spare(fd, os.dup(folder_fd), name, seen.st_size)
