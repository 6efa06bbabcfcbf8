"""Records as files below one directory: a local SSD, or a file system several hosts share.

A file appears under its final name only when complete (temporary name, checked write, rename); nothing
is fsynced, for a torn file fails its checksum on the way back. Reads and writes are direct I/O where the
file system allows, one vectored call into or out of page-aligned slots. No index, no eviction, no locks:
any number of processes, also on several hosts, may share the directory, and `changes`, `dates` and `touch`
tell each what the others do. Names and folders are `tiercel.tiers.folder`'s.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from tiercel.blocks import PAGE_BYTES, BlockKey
from tiercel.blocks.record import HEADER_BYTES, depth_of
from tiercel.tiers.base import MISSING, OK, Fate, Outcome, Stored, Usage
from tiercel.tiers.extras import Oddments, Part, age_s
from tiercel.tiers.folder import (
    Folder,
    Mark,
    Visit,
    prepare,
    record_name,
    record_path,
    temp_name,
    unlink_quietly,
)
from tiercel.tiers.spares import Spares
from tiercel.tiers.transfer import Transfer

# A read refreshes a file's time at most this often: recency for other processes without a write per hit.
_RETOUCH_S = 60.0
# So far the clocks of hosts that share a directory may be apart.
_CLOCKS_DIFFER_S = 3600.0
# A folder's time is trusted to show a later change once another folder's is so much younger: the clock of the
# file system has moved on since, however coarse it is.
_SETTLED_NS = 10_000_000_000
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# On NFS a file or folder that another host has removed may say so only when it is used.
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_CLOSED = Outcome(Fate.FAILED, "closed")
_LINK = Outcome(Fate.CORRUPT, "a link, not a file")


class FilesTier:
    """A directory of records. Raises `TierError` when it cannot be used at all; later faults are outcomes.

    With `create` false it is looked at from outside: a directory that is not yet a cache is refused instead
    of made into one, and nothing is changed unasked, not even the date of a file.
    """

    def __init__(self, root: Path, *, name: str = "disk", direct: bool = True, create: bool = True) -> None:
        prepare(root, create)
        self._root = root
        self._name = name
        self._resident = create
        self._transfer = Transfer(direct, str(root))
        self._spares = Spares()
        self._mark: Mark | None = None
        # By folder: when it had changed last, and whether that time would show a later change.
        self._listed: dict[bytes, tuple[int, bool]] = {}
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

    def recycle(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Delete records, and write the next ones over a few of their files."""
        return self._each(len(keys), lambda visit, at: self._recycle(visit, keys[at]))

    def scan(self) -> Iterator[Stored]:
        """Every record, by names and sizes only; leftovers of dead writers are removed on the way."""
        self._check_open()
        with self._visit() as visit:
            for folder in visit.folders():
                yield from self._records(folder)

    def changes(self, afresh: bool) -> Iterator[Part]:
        """The folders whose listing changed since the last call; an unchanged one costs opening it."""
        self._check_open()
        if afresh:
            self._listed.clear()
        gone = set(self._listed)
        newest_ns = max((changed_ns for changed_ns, _ in self._listed.values()), default=0)
        with self._visit() as visit:
            for folder in visit.folders():
                gone.discard(folder.prefix)
                changed_ns = folder.changed_ns
                newest_ns = max(newest_ns, changed_ns)
                if self._listed.get(folder.prefix) == (changed_ns, True):
                    continue
                seen_before = self._listed.get(folder.prefix) == (changed_ns, False)
                yield Part(folder.prefix, list(self._records(folder)))
                settled = seen_before or changed_ns < newest_ns - _SETTLED_NS
                self._listed[folder.prefix] = (changed_ns, settled)
        for prefix in gone:
            yield Part(prefix, [])
            del self._listed[prefix]

    def dates(self, keys: Sequence[BlockKey]) -> list[float | None]:
        if self._closed:
            return [None] * len(keys)
        try:
            with self._visit() as visit:
                found = [visit.used_s(key) for key in keys]
        except OSError:
            return [None] * len(keys)
        now_s = time.time()
        return [None if one is None else _credible(one, now_s) for one in found]

    def touch(self, keys: Sequence[BlockKey], ages_s: Sequence[float]) -> list[Outcome]:
        now_ns = time.time_ns()
        dated = [(key, now_ns - int(one * 1e9)) for key, one in zip(keys, ages_s, strict=True)]
        return self._each(len(dated), lambda visit, at: _touch(visit, dated[at][0], now_ns, dated[at][1]))

    def peek(self, keys: Sequence[BlockKey]) -> list[bytes | Outcome]:
        heads = [bytes(HEADER_BYTES)] * len(keys)

        def head(visit: Visit, at: int) -> Outcome:
            outcome, heads[at] = _peek(visit, keys[at])
            return outcome

        outcomes = self._each(len(keys), head)
        return [heads[at] if outcome.fate is Fate.OK else outcome for at, outcome in enumerate(outcomes)]

    def oddments(self, remove: bool) -> Oddments:
        """What is no record in the folders of records. Raises `OSError` when the place is gone."""
        leftovers = other_files = 0
        now_s = time.time()
        with self._visit() as visit:
            for found in visit.walk():
                if found.key is not None:
                    continue
                if not found.abandoned(now_s):
                    other_files += not found.name.endswith(".tmp")
                    continue
                leftovers += 1
                if remove:
                    found.remove()
        return Oddments(leftovers, other_files)

    def prune(self, tags: Collection[bytes]) -> None:
        """Remove the empty folders of these scopes. Raises `OSError` when the place is gone."""
        with self._visit() as visit:
            for tag in tags:
                visit.prune(tag)

    def usage(self) -> Usage:
        try:
            seen = os.statvfs(self._root)
        except OSError:
            return Usage()
        return Usage(seen.f_bavail * seen.f_frsize, seen.f_blocks * seen.f_frsize)

    def close(self) -> None:
        self._closed = True
        self._spares.close()

    def _check_open(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, "closed")

    def _records(self, folder: Folder) -> Iterator[Stored]:
        now_s = time.time()
        for found in folder.files():
            if found.key is not None:
                yield Stored(found.key, found.file_bytes, _credible(found.used_s, now_s))
            elif self._resident and found.abandoned(now_s):
                found.remove()

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
        outcome, fd = _open(visit, key)
        if fd < 0:
            return outcome
        try:
            outcome = self._fill(fd, record)
            if outcome is OK and not visit.leads_to(key, fd):
                # Evicted meanwhile, and perhaps written over.
                return MISSING
            if outcome is OK and self._resident:
                _retouch(fd, record)
        except OSError as fault:
            return _unread(fault)
        finally:
            os.close(fd)
        return outcome

    def _fill(self, fd: int, record: memoryview) -> Outcome:
        seen = os.fstat(fd)
        size = seen.st_size
        if not stat.S_ISREG(seen.st_mode):
            return Outcome(Fate.CORRUPT, "not a file")
        if size < HEADER_BYTES or size % PAGE_BYTES or size > len(record):
            return Outcome(Fate.CORRUPT, f"file has {size} bytes")
        done = self._transfer.read(fd, record[:size])
        return OK if done == size else Outcome(Fate.CORRUPT, f"file ends at {done} of {size} bytes")

    def _recycle(self, visit: Visit, key: BlockKey) -> Outcome:
        try:
            self._spares.keep(visit, key)
        except OSError as fault:
            return _unread(fault)
        return OK

    def _write_over(self, visit: Visit, key: BlockKey, record: memoryview) -> bool:
        """Write a record over a spare, if there is one of its length. False: it has to be a new file."""
        spare = self._spares.take(len(record))
        if spare is None:
            return False
        try:
            self._transfer.write(spare.fd, record)
            visit.share(spare.fd)
            now_ns = time.time_ns()
            os.utime(spare.fd, ns=(now_ns, _dated(record, now_ns)))
            folder = visit.folder(key, create=True)
            os.rename(spare.name, record_name(key), src_dir_fd=spare.folder_fd, dst_dir_fd=folder)
        except OSError:
            # Its folder or the whole place went away, or was another one: a new file will tell.
            spare.discard()
            return False
        spare.close()
        return True

    def _write(self, visit: Visit, key: BlockKey, record: memoryview) -> Outcome:
        if self._write_over(visit, key, record):
            return OK
        temp = temp_name()
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


def _open(visit: Visit, key: BlockKey) -> tuple[Outcome, int]:
    """The record of `key` opened for reading; -1 with the reason if it cannot be."""
    try:
        return OK, visit.open(key)
    except OSError as fault:
        return (_LINK if fault.errno == errno.ELOOP else _unread(fault)), -1


def _peek(visit: Visit, key: BlockKey) -> tuple[Outcome, bytes]:
    outcome, fd = _open(visit, key)
    if fd < 0:
        return outcome, b""
    try:
        page = memoryview(bytearray(HEADER_BYTES))
        # Buffered: direct I/O would read no less.
        count = Transfer(direct=False).read(fd, page)
    except OSError as fault:
        return _unread(fault), b""
    finally:
        os.close(fd)
    return OK, bytes(page[:count])


def _delete(visit: Visit, key: BlockKey) -> Outcome:
    try:
        os.unlink(record_name(key), dir_fd=visit.folder(key))
    except OSError as fault:
        return _unread(fault)
    return OK


def _touch(visit: Visit, key: BlockKey, now_ns: int, dated_ns: int) -> Outcome:
    try:
        visit.date(key, now_ns, dated_ns)
    except PermissionError:
        # Of another user, in a directory that we may only read: our use is just not recorded.
        return OK
    except OSError as fault:
        return _unread(fault)
    return OK


def _credible(used_s: float, now_s: float) -> float:
    """When a record with such a date was last used. A date far ahead, of a clock that was wrong, is as old
    as it is early, or the record would stay for ever."""
    return used_s if used_s <= now_s + _CLOCKS_DIFFER_S else 2 * now_s - used_s


def _dated(record: memoryview, now_ns: int) -> int:
    """The time a record used at `now_ns` gets."""
    return now_ns - int(age_s(depth_of(record)) * 1e9)


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


def _unread(fault: OSError) -> Outcome:
    return MISSING if fault.errno in _NOT_THERE else _failed(fault)


def _failed(fault: OSError) -> Outcome:
    if fault.errno in _NO_ROOM:
        return Outcome(Fate.FULL, "no space left")
    return Outcome(Fate.FAILED, fault.strerror or str(fault))
