"""Records as files below one directory: a local SSD, or a file system several hosts share.

    <root>/FORMAT                               "tiercel-files 1"
    <root>/<scope tag, 16 hex>/<2 hex>/<46 hex>.kv   one record

A file appears under its final name only when complete (temporary name, checked write, rename); nothing
is fsynced, for a torn file fails its checksum on the way back. Reads and writes are direct I/O where the
file system allows, one vectored call into or out of page-aligned slots. No index, no eviction, no locks:
any number of processes may share the directory.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from tiercel.blocks import PAGE_BYTES, TAG_BYTES, BlockKey
from tiercel.blocks.record import HEADER_BYTES, depth_of
from tiercel.errors import TierError
from tiercel.memory import filesystem_free_bytes
from tiercel.tiers.base import MISSING, OK, Fate, Outcome, Stored, Usage

FORMAT_TEXT = "tiercel-files 1\n"
_FORMAT_NAME = "FORMAT"
_SUFFIX = ".kv"
_TAG_NAME = re.compile(r"[0-9a-f]{16}")
_FAN_NAME = re.compile(r"[0-9a-f]{2}")
_RECORD_NAME = re.compile(r"([0-9a-f]{46})\.kv")
_TEMP_NAME = re.compile(r"\.([0-9a-f]{8})-(\d+)-\d+\.tmp")
_TEMP_ABANDONED_S = 3600.0
# A read refreshes a file's time at most this often: recency for other processes without a write per hit.
_RETOUCH_S = 60.0
# Parents are dated younger than their children, so that whoever evicts by age takes leaves first.
_DEPTH_AGE_NS = 10_000_000
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class FilesTier:
    """A directory of records. Raises `TierError` when it cannot be used at all; later faults are outcomes.

    With `create` false a directory that is not yet a cache is refused instead of made into one.
    """

    def __init__(self, root: Path, *, name: str = "disk", direct: bool = True, create: bool = True) -> None:
        self._root = root
        self._name = name
        self._direct = direct and hasattr(os, "O_DIRECT")
        self._host = blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()
        self._serial = itertools.count()
        self._closed = False
        self._direct_lock = threading.Lock()
        _open_root(root, create)

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
        return self._direct

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [not self._closed and os.path.exists(self.path(key)) for key in keys]

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        return [self._read(key, record) for key, record in zip(keys, records, strict=True)]

    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        return [self._write(key, record) for key, record in zip(keys, records, strict=True)]

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return [self._delete(key) for key in keys]

    def scan(self) -> Iterator[Stored]:
        """Every record, by names and sizes only; leftovers of dead writers are removed on the way."""
        for tag in _folders(self._root, _TAG_NAME):
            for fan in _folders(Path(tag.path), _FAN_NAME):
                yield from self._scan_folder(tag.name, fan)

    def usage(self) -> Usage:
        try:
            return Usage(filesystem_free_bytes(self._root))
        except OSError:
            return Usage(None)

    def close(self) -> None:
        self._closed = True

    def path(self, key: BlockKey) -> str:
        """Where the record of `key` lies."""
        tag, rest = key[:TAG_BYTES].hex(), key[TAG_BYTES:].hex()
        return f"{self._root}/{tag}/{rest[:2]}/{rest[2:]}{_SUFFIX}"

    def _read(self, key: BlockKey, record: memoryview) -> Outcome:
        if self._closed:
            return Outcome(Fate.FAILED, "closed")
        try:
            fd = self._open(self.path(key), os.O_RDONLY)
        except FileNotFoundError:
            return MISSING
        except OSError as fault:
            return _failed(fault)
        try:
            return _read_all(fd, record)
        except OSError as fault:
            return _failed(fault)
        finally:
            os.close(fd)

    def _write(self, key: BlockKey, record: memoryview) -> Outcome:
        if self._closed:
            return Outcome(Fate.FAILED, "closed")
        path = self.path(key)
        folder = os.path.dirname(path)
        temp = f"{folder}/.{self._host}-{os.getpid()}-{next(self._serial)}.tmp"
        try:
            self._write_temp(temp, folder, record)
            os.rename(temp, path)
        except OSError as fault:
            _unlink_quietly(temp)
            return Outcome(Fate.FULL, "no space left") if fault.errno in _NO_ROOM else _failed(fault)
        return OK

    def _write_temp(self, temp: str, folder: str, record: memoryview) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            fd = self._open(temp, flags)
        except FileNotFoundError:
            # Only below a root that still exists: a removed cache directory must not grow back by itself.
            os.makedirs(
                os.path.join(self._root, os.path.basename(os.path.dirname(folder))), mode=0o700, exist_ok=True
            )
            os.makedirs(folder, mode=0o700, exist_ok=True)
            fd = self._open(temp, flags)
        try:
            written = 0
            while written < len(record):
                count = os.pwritev(fd, [record[written:]], written)
                if count <= 0:
                    raise OSError(errno.EIO, "nothing written")
                written += count
            now_ns = time.time_ns()
            os.utime(fd, ns=(now_ns, now_ns - depth_of(record) * _DEPTH_AGE_NS))
        finally:
            os.close(fd)

    def _open(self, path: str, flags: int) -> int:
        """Open without following links, with direct I/O unless this file system is known to refuse it."""
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        if self._direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as fault:
                if fault.errno != errno.EINVAL:
                    raise
                # Some file systems create the file before they refuse direct access to it.
                if flags & os.O_CREAT:
                    _unlink_quietly(path)
                with self._direct_lock:
                    self._direct = False
        return os.open(path, flags, 0o600)

    def _delete(self, key: BlockKey) -> Outcome:
        try:
            os.unlink(self.path(key))
        except FileNotFoundError:
            return MISSING
        except OSError as fault:
            return _failed(fault)
        return OK

    def _scan_folder(self, tag: str, fan: os.DirEntry[str]) -> Iterator[Stored]:
        for entry in _entries(Path(fan.path)):
            try:
                seen = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            named = _RECORD_NAME.fullmatch(entry.name)
            if named and entry.is_file(follow_symlinks=False):
                yield Stored(BlockKey(bytes.fromhex(tag + fan.name + named[1])), seen.st_size, seen.st_mtime)
            elif self._abandoned(entry.name, seen.st_mtime):
                _unlink_quietly(entry.path)

    def _abandoned(self, name: str, written_s: float) -> bool:
        named = _TEMP_NAME.fullmatch(name)
        if named is None:
            return False
        if named[1] == self._host and not _alive(int(named[2])):
            return True
        return time.time() - written_s > _TEMP_ABANDONED_S


def _open_root(root: Path, create: bool) -> None:
    marker = root / _FORMAT_NAME
    try:
        if create:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not root.is_dir():
            raise TierError(f"cache directory {root}: there is no such directory")
        if marker.exists():
            found = marker.read_text(errors="replace")
            if found != FORMAT_TEXT:
                raise TierError(
                    f"cache directory {root}: format {found.strip()[:40]!r}, accepted is {FORMAT_TEXT.strip()!r}; "
                    "use another directory or delete this one"
                )
        elif not create or any(root.iterdir()):
            raise TierError(
                f"cache directory {root}: not empty and not a Tiercel cache; use another directory"
            )
        else:
            _write_marker(marker)
        if create and not os.access(root, os.W_OK | os.X_OK):
            raise TierError(f"cache directory {root}: not writable by user id {os.geteuid()}")
    except OSError as fault:
        raise TierError(f"cache directory {root}: {fault.strerror}") from None


def _write_marker(marker: Path) -> None:
    temp = marker.with_name(f".{_FORMAT_NAME}-{os.getpid()}")
    temp.write_text(FORMAT_TEXT)
    os.rename(temp, marker)


def _read_all(fd: int, record: memoryview) -> Outcome:
    seen = os.fstat(fd)
    size = seen.st_size
    if size < HEADER_BYTES or size % PAGE_BYTES or size > len(record):
        return Outcome(Fate.CORRUPT, f"file has {size} bytes")
    done = 0
    while done < size:
        count = os.preadv(fd, [record[done:size]], done)
        if count <= 0:
            return Outcome(Fate.CORRUPT, f"file ends at {done} of {size} bytes")
        done += count
    now_s = time.time()
    if now_s - seen.st_mtime > _RETOUCH_S:
        try:
            os.utime(fd)
        except OSError:
            # A reader without write permission may still read: its use is just not recorded.
            return OK
    return OK


def _folders(parent: Path, name: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
    for entry in _entries(parent):
        if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            yield entry


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:
        return []


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _failed(fault: OSError) -> Outcome:
    return Outcome(Fate.FAILED, os.strerror(fault.errno) if fault.errno else str(fault))


def _unlink_quietly(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return
