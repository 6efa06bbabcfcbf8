"""Whole records between memory and open files: vectored calls, direct I/O where the file system allows it.

It knows nothing of names, folders or keys, and never closes what it is given.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading

from tiercel.blocks import PAGE_BYTES

log = logging.getLogger("tiercel")
_O_DIRECT = getattr(os, "O_DIRECT", 0)


class Transfer:
    """Reads and writes of one place. Direct I/O is given up once, for good, when the place refuses it."""

    def __init__(self, direct: bool, place: str = "") -> None:
        self._place = place
        self._direct = direct and _O_DIRECT != 0
        self._lock = threading.Lock()

    @property
    def direct(self) -> bool:
        """Whether direct I/O is in use."""
        return self._direct

    def read(self, fd: int, record: memoryview) -> int:
        """Fill `record` from the start of a file; returns the bytes read, fewer where the file ends early."""
        self._begin(fd)
        done = 0
        while done < len(record):
            try:
                count = os.preadv(fd, [record[done:]], done)
            except OSError as fault:
                if not self._end_direct(fd, fault, done):
                    raise
                continue
            if count <= 0:
                break
            done += count
        return done

    def write(self, fd: int, record: memoryview) -> None:
        """Write all of `record` at the start of a file. Raises `OSError` when not every byte was taken."""
        self._begin(fd)
        done = 0
        while done < len(record):
            try:
                count = os.pwritev(fd, [record[done:]], done)
            except OSError as fault:
                if not self._end_direct(fd, fault, done):
                    raise
                continue
            if count <= 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            done += count

    def _begin(self, fd: int) -> None:
        if not self._direct:
            return
        try:
            # Asked for after the opening: some file systems create a file before they refuse this for it.
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | _O_DIRECT)
        except OSError:
            self._give_up()

    def _end_direct(self, fd: int, fault: OSError, done: int) -> bool:
        """Turn a refused direct call into a buffered one; False if the fault was another."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if fault.errno != errno.EINVAL or not flags & _O_DIRECT:
            return False
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~_O_DIRECT)
        # After a call that stopped within a page (disk nearly full) the refusal says nothing of the place.
        if done % PAGE_BYTES == 0:
            self._give_up()
        return True

    def _give_up(self) -> None:
        with self._lock:
            first, self._direct = self._direct, False
        if first:
            log.warning(
                "%s: direct I/O is refused there; going through the page cache", self._place,
                extra={"kind": f"direct I/O in {self._place}"},
            )  # fmt: skip
