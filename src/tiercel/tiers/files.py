"""Records as files below one directory: a local SSD, or a file system several hosts share.

A file appears under its final name only when complete (temporary name, checked write, rename); nothing
is fsynced, for a torn file fails its checksum on the way back. Reads and writes are direct I/O where the
file system allows, one vectored call into or out of page-aligned slots. No index, no eviction, no locks:
any number of processes may share the directory. Names and folders are `tiercel.tiers.folder`'s.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tiercel.blocks import PAGE_BYTES, BlockKey
from tiercel.blocks.record import HEADER_BYTES, depth_of
from tiercel.tiers.base import MISSING, OK, Fate, Outcome, Stored, Usage
from tiercel.tiers.folder import Mark, Visit, prepare, record_name, record_path, temp_name, unlink_quietly
from tiercel.tiers.transfer import Transfer

# A read refreshes a file's time at most this often: recency for other processes without a write per hit.
_RETOUCH_S = 60.0
# Parents are dated younger than their children, so that whoever evicts by age takes leaves first. More than
# a block takes to be computed and written, or the order of writing would undo it. Bounded: the depth is read
# before the record is verified, and a file dated an hour back would pass for an abandoned one.
_DEPTH_AGE_NS = 1_000_000_000
_DEPTH_MAX = 1800
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_CLOSED = Outcome(Fate.FAILED, "closed")
_LINK = Outcome(Fate.CORRUPT, "a link, not a file")


class FilesTier:
    """A directory of records. Raises `TierError` when it cannot be used at all; later faults are outcomes.

    With `create` false a directory that is not yet a cache is refused instead of made into one.
    """

    def __init__(self, root: Path, *, name: str = "disk", direct: bool = True, create: bool = True) -> None:
        prepare(root, create)
        self._root = root
        self._name = name
        self._transfer = Transfer(direct)
        self._serial = itertools.count()
        self._mark: Mark | None = None
        self._closed = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def root(self) -> Path:
        """The directory that holds everything of this tier."""
        return self._root

    @property
    def direct(self) -> bool:
        """Whether direct I/O is in use (it is given up once, when the file system refuses it)."""
        return self._transfer.direct

    def path(self, key: BlockKey) -> Path:
        """Where the record of `key` lies."""
        return self._root / record_path(key)

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        if self._closed:
            return [False] * len(keys)
        try:
            with self._visit() as visit:
                return [visit.holds(key) for key in keys]
        except OSError:
            return [False] * len(keys)

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        pairs = list(zip(keys, records, strict=True))
        return self._each(len(pairs), lambda visit, at: self._read(visit, *pairs[at]))

    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        pairs = list(zip(keys, records, strict=True))
        return self._each(len(pairs), lambda visit, at: self._write(visit, *pairs[at]))

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self._each(len(keys), lambda visit, at: _delete(visit, keys[at]))

    def scan(self) -> Iterator[Stored]:
        """Every record, by names and sizes only; leftovers of dead writers are removed on the way."""
        if self._closed:
            raise OSError(errno.EBADF, "closed")
        now_s = time.time()
        with self._visit() as visit:
            for found in visit.walk():
                if found.key is not None:
                    yield Stored(found.key, found.file_bytes, found.used_s)
                elif found.abandoned(now_s):
                    found.remove()

    def usage(self) -> Usage:
        try:
            seen = os.statvfs(self._root)
        except OSError:
            return Usage()
        return Usage(seen.f_bavail * seen.f_frsize, seen.f_blocks * seen.f_frsize)

    def close(self) -> None:
        self._closed = True

    def _visit(self) -> Visit:
        visit = Visit(self._root, self._mark)
        self._mark = visit.mark
        return visit

    def _each(self, count: int, act: Callable[[Visit, int], Outcome]) -> list[Outcome]:
        """Do the same for every key of a batch; a root that is not there fails them all."""
        if self._closed:
            return [_CLOSED] * count
        try:
            visit = self._visit()
        except OSError as fault:
            return [_failed(fault)] * count
        with visit:
            return [act(visit, at) for at in range(count)]

    def _read(self, visit: Visit, key: BlockKey, record: memoryview) -> Outcome:
        return read_record(visit, self._transfer, key, record, _retouch)

    def _write(self, visit: Visit, key: BlockKey, record: memoryview) -> Outcome:
        temp = temp_name(next(self._serial))
        try:
            fd, folder = visit.create(key, temp)
        except OSError as fault:
            return _failed(fault)
        try:
            try:
                self._transfer.write(fd, record)
                now_ns = time.time_ns()
                os.utime(fd, ns=(now_ns, _dated(record, now_ns)))
            finally:
                os.close(fd)
            os.rename(temp, record_name(key), src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as fault:
            unlink_quietly(temp, folder)
            return _failed(fault)
        return OK


def read_record(
    visit: Visit,
    transfer: Transfer,
    key: BlockKey,
    record: memoryview,
    used: Callable[[int, memoryview], None] | None = None,
) -> Outcome:
    """Fill `record` with the file of `key`, and call `used` with its descriptor when that went well."""
    try:
        fd = visit.open(key)
    except (FileNotFoundError, NotADirectoryError):
        return MISSING
    except OSError as fault:
        return _LINK if fault.errno == errno.ELOOP else _failed(fault)
    try:
        seen = os.fstat(fd)
        size = seen.st_size
        if not stat.S_ISREG(seen.st_mode):
            return Outcome(Fate.CORRUPT, "not a file")
        if size < HEADER_BYTES or size % PAGE_BYTES or size > len(record):
            return Outcome(Fate.CORRUPT, f"file has {size} bytes")
        done = transfer.read(fd, record[:size])
        if done < size:
            return Outcome(Fate.CORRUPT, f"file ends at {done} of {size} bytes")
        if used is not None:
            used(fd, record)
    except OSError as fault:
        return _failed(fault)
    finally:
        os.close(fd)
    return OK


def _delete(visit: Visit, key: BlockKey) -> Outcome:
    try:
        os.unlink(record_name(key), dir_fd=visit.folder(key))
    except (FileNotFoundError, NotADirectoryError):
        return MISSING
    except OSError as fault:
        return _failed(fault)
    return OK


def _dated(record: memoryview, now_ns: int) -> int:
    """The time a record used at `now_ns` gets: a step older for each block that stands before it."""
    return now_ns - min(depth_of(record), _DEPTH_MAX) * _DEPTH_AGE_NS


def _retouch(fd: int, record: memoryview) -> None:
    used_ns = os.fstat(fd).st_mtime_ns
    now_ns = time.time_ns()
    dated_ns = _dated(record, now_ns)
    # Either way: a date from a clock that ran ahead would otherwise make the record immortal.
    if abs(dated_ns - used_ns) <= _RETOUCH_S * 1e9:
        return
    try:
        _date(fd, now_ns, dated_ns)
    except OSError:
        # A reader without write permission may still read: its use is just not recorded.
        return


def _date(fd: int, now_ns: int, dated_ns: int) -> None:
    try:
        os.utime(fd, ns=(now_ns, dated_ns))
    except PermissionError:
        # Who may write to another user's file may date it, but only as of now.
        os.utime(fd)


def _failed(fault: OSError) -> Outcome:
    if fault.errno in _NO_ROOM:
        return Outcome(Fate.FULL, "no space left")
    return Outcome(Fate.FAILED, fault.strerror or str(fault))
