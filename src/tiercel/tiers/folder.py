"""The directory of records: its format mark, its names, and the way from the root to a record.

    <root>/FORMAT                               "tiercel-files 1"
    <root>/<scope tag, 16 hex>/<2 hex>/<46 hex>.kv   one record
    <root>/<scope tag>/<2 hex>/.<host, 8 hex>-<pid>-<process, 8 hex>-<n>.tmp   one being written

The root itself may be a link. Below it every step is opened from the one before and follows none, so that
a link planted in the cache leads nowhere. Nothing here reads or writes a record.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Self

from tiercel.blocks import TAG_BYTES, BlockKey
from tiercel.errors import TierError

FORMAT_TEXT = "tiercel-files 1\n"
FORMAT_NAME = "FORMAT"
_SUFFIX = ".kv"
_TAG_NAME = re.compile(r"[0-9a-f]{16}")
_FAN_NAME = re.compile(r"[0-9a-f]{2}")
_RECORD_NAME = re.compile(r"([0-9a-f]{46})\.kv")
_TEMP_NAME = re.compile(r"\.([0-9a-f]{8})-(\d+)-([0-9a-f]{8})-\d+\.tmp")
_TEMP_ABANDONED_S = 3600.0
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# What a fresh volume, or another process that is just making the same cache, may have left in the root.
_EMPTY_ENOUGH = re.compile(rf"lost\+found|\.{FORMAT_NAME}-.*")

_HOST = blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()
# In a container every run has the same process id: this tells a leftover of the last run from our own file.
_PROCESS = os.urandom(4).hex()
# One for all: a process may have opened a directory twice.
_SERIAL = itertools.count()

Mark = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Found:
    """A file in a folder of records. `key` is None for what is not named like a record, or not a file."""

    key: BlockKey | None
    name: str
    file_bytes: int
    used_s: float
    folder_fd: int

    def abandoned(self, now_s: float) -> bool:
        """Whether this is the unfinished file of a writer that is gone."""
        named = _TEMP_NAME.fullmatch(self.name)
        if self.key is not None or named is None:
            return False
        host, pid, process = named[1], int(named[2]), named[3]
        if host == _HOST and (process != _PROCESS if pid == os.getpid() else not _alive(pid)):
            return True
        # Of another host only its age is known; a clock that jumped either way must not keep it for ever.
        return abs(now_s - self.used_s) > _TEMP_ABANDONED_S

    def remove(self) -> None:
        """Unlink the file. Only while the listing that gave it stands at it."""
        unlink_quietly(self.name, self.folder_fd)


@dataclass(frozen=True, slots=True)
class Folder:
    """An open folder of records: what their keys begin with, and when its listing last changed."""

    prefix: bytes
    changed_ns: int
    fd: int

    def files(self) -> Iterator[Found]:
        """Every file in it."""
        return _files(self.fd, self.prefix.hex())


def record_name(key: BlockKey) -> str:
    """Name of a record within its folder."""
    return key[TAG_BYTES + 1 :].hex() + _SUFFIX


def record_path(key: BlockKey) -> str:
    """Path of a record from the root."""
    return f"{key[:TAG_BYTES].hex()}/{key[TAG_BYTES : TAG_BYTES + 1].hex()}/{record_name(key)}"


def temp_name() -> str:
    """Name for an unfinished record, never used before by anybody; the same length for every key."""
    return f".{_HOST}-{os.getpid()}-{_PROCESS}-{next(_SERIAL)}.tmp"


def prepare(root: Path, create: bool) -> None:
    """Make `root` a cache directory, or make sure that it is one. Raises `TierError`, one line.

    With `create` false nothing is changed, and a directory that is not a cache is refused.
    """
    try:
        if create:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(root, _FOLDER_FLAGS)
        try:
            _check(root, fd, create)
        finally:
            os.close(fd)
        if create and not os.access(root, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, "not writable")
    except (FileExistsError, NotADirectoryError):
        raise TierError(f"cache directory {root}: is not a directory") from None
    except OSError as fault:
        who = (
            f" for user id {os.geteuid()}" if fault.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else ""
        )
        raise TierError(f"cache directory {root}: {fault.strerror}{who}") from None


def _check(root: Path, fd: int, create: bool) -> None:
    found = _read_mark(fd)
    if found is None and create and all(_EMPTY_ENOUGH.fullmatch(name) for name in os.listdir(fd)):
        _write_mark(fd)
        return
    if found is None:
        # What made the directory not empty may be another process that has just made the same cache.
        found = _read_mark(fd)
    if found is None:
        raise TierError(f"cache directory {root}: not a Tiercel cache; name an empty or a new directory")
    if found != FORMAT_TEXT:
        raise TierError(
            f"cache directory {root}: format {found.strip()[:40]!r}, accepted is {FORMAT_TEXT.strip()!r}; "
            "use another directory or delete this one"
        )


def _read_mark(root_fd: int) -> str | None:
    try:
        # A pipe in its place must not stop us.
        fd = os.open(FORMAT_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=root_fd)
    except FileNotFoundError:
        return None
    try:
        return os.read(fd, 256).decode(errors="replace")
    finally:
        os.close(fd)


def _write_mark(root_fd: int) -> None:
    temp = f".{FORMAT_NAME}-{os.getpid()}-{_PROCESS}"
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644, dir_fd=root_fd)
    try:
        os.write(fd, FORMAT_TEXT.encode())
        if os.fstat(root_fd).st_mode & stat.S_IWGRP:
            os.fchmod(fd, 0o664)
        # The one file that nobody makes again when a power cut empties it.
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temp, FORMAT_NAME, src_dir_fd=root_fd, dst_dir_fd=root_fd)


class Visit:
    """The root, opened for the time of one call; use as a context. Not for sharing between threads.

    Raises `OSError` when the root is gone, or is no longer the cache it was: a directory that was removed,
    or the bare mount point of a volume that went away, must not fill up again by itself. `mark` is that of
    an earlier visit, which spares reading it.
    """

    def __init__(self, root: Path, mark: Mark | None = None) -> None:
        self._tag: bytes | None = None
        self._fan: bytes | None = None
        self._tag_fd = self._fan_fd = -1
        self._root_fd = os.open(root, _FOLDER_FLAGS)
        try:
            self.mark = self._marked(mark)
            root_mode = os.fstat(self._root_fd).st_mode
        except OSError:
            os.close(self._root_fd)
            raise
        # Whoever lets a group write into the root means to share the cache with it; never with all others.
        self._shared = bool(root_mode & stat.S_IWGRP)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.forget()
        os.close(self._root_fd)

    def holds(self, key: BlockKey) -> bool:
        """Whether a file lies where the record of `key` belongs."""
        try:
            seen = os.stat(record_path(key), dir_fd=self._root_fd, follow_symlinks=False)
        except OSError:
            return False
        return stat.S_ISREG(seen.st_mode)

    def leads_to(self, key: BlockKey, fd: int) -> bool:
        """Whether the name of a record still leads to the file that was opened by it."""
        try:
            now = os.stat(record_name(key), dir_fd=self.folder(key), follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(now, os.fstat(fd))

    def share(self, fd: int) -> None:
        """Let the group use a file of ours, where the cache is shared with it."""
        if self._shared:
            os.fchmod(fd, 0o660)

    def used_s(self, key: BlockKey) -> float | None:
        """The date of a record; None where there is none."""
        try:
            return os.stat(record_name(key), dir_fd=self.folder(key), follow_symlinks=False).st_mtime
        except OSError:
            return None

    def date(self, key: BlockKey, now_ns: int, dated_ns: int) -> None:
        """Date a record as used at `dated_ns`. Raises `OSError`."""
        name, folder = record_name(key), self.folder(key)
        try:
            os.utime(name, ns=(now_ns, dated_ns), dir_fd=folder, follow_symlinks=False)
        except PermissionError:
            # Who may write to another user's file may date it, but only as of now.
            os.utime(name, dir_fd=folder, follow_symlinks=False)

    def open(self, key: BlockKey) -> int:
        """Open the record of `key` for reading; the descriptor is the caller's.

        Raises `FileNotFoundError` or `NotADirectoryError` where there is none, ELOOP for a link.
        """
        # Without NONBLOCK a pipe in the place of a record would hold the thread for ever.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(record_name(key), flags, dir_fd=self.folder(key))

    def create(self, key: BlockKey, name: str) -> tuple[int, int]:
        """Create `name` in the folder of `key`. Returns its descriptor (the caller's) and the folder's."""
        try:
            return self._create(key, name)
        except FileNotFoundError:
            # Somebody cleared the cache, and removed the empty folder just after it was opened.
            self.forget()
            return self._create(key, name)

    def folder(self, key: BlockKey, *, create: bool = False) -> int:
        """Descriptor of the folder of `key`, valid until the next call with a key."""
        tag, fan = key[:TAG_BYTES], key[TAG_BYTES : TAG_BYTES + 1]
        if tag != self._tag:
            self.forget()
            self._tag_fd = self._step(self._root_fd, tag.hex(), create)
            self._tag = tag
        if fan != self._fan:
            self._forget_fan()
            self._fan_fd = self._step(self._tag_fd, fan.hex(), create)
            self._fan = fan
        return self._fan_fd

    def forget(self) -> None:
        """Close the folders opened so far."""
        self._forget_fan()
        if self._tag is not None:
            os.close(self._tag_fd)
            self._tag = None

    def walk(self, tag: bytes | None = None) -> Iterator[Found]:
        """Every file in the folders of records (of one scope), in no order. Raises `OSError`."""
        for folder in self.folders(tag):
            yield from folder.files()

    def folders(self, tag: bytes | None = None) -> Iterator[Folder]:
        """Every folder of records (of one scope), each open until the next is asked for. Raises `OSError`."""
        names = _folder_names(self._root_fd, _TAG_NAME) if tag is None else [tag.hex()]
        for name in names:
            yield from self._folders_of(name)

    def prune(self, tag: bytes) -> None:
        """Remove the folders of a scope that are empty; others stay."""
        try:
            fd = self._step(self._root_fd, tag.hex(), create=False)
        except OSError:
            return
        try:
            for fan in _folder_names(fd, _FAN_NAME):
                _rmdir_quietly(fan, fd)
        finally:
            os.close(fd)
        _rmdir_quietly(tag.hex(), self._root_fd)

    def _marked(self, mark: Mark | None) -> Mark:
        seen = os.stat(FORMAT_NAME, dir_fd=self._root_fd, follow_symlinks=False)
        now = (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns)
        if now != mark and _read_mark(self._root_fd) != FORMAT_TEXT:
            raise OSError(errno.ENOENT, "no longer a cache directory of this format")
        return now

    def _create(self, key: BlockKey, name: str) -> tuple[int, int]:
        folder = self.folder(key, create=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(name, flags, 0o600, dir_fd=folder)
        self.share(fd)
        return fd, folder

    def _step(self, parent_fd: int, name: str, create: bool) -> int:
        flags = _FOLDER_FLAGS | os.O_NOFOLLOW
        try:
            return os.open(name, flags, dir_fd=parent_fd)
        except FileNotFoundError:
            if not create:
                raise
        try:
            os.mkdir(name, 0o700, dir_fd=parent_fd)
        except FileExistsError:
            return os.open(name, flags, dir_fd=parent_fd)
        fd = os.open(name, flags, dir_fd=parent_fd)
        if self._shared:
            os.fchmod(fd, os.fstat(fd).st_mode & 0o7000 | 0o770)
        return fd

    def _folders_of(self, tag: str) -> Iterator[Folder]:
        try:
            tag_fd = self._step(self._root_fd, tag, create=False)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            for fan in _folder_names(tag_fd, _FAN_NAME):
                try:
                    fan_fd = self._step(tag_fd, fan, create=False)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                try:
                    yield Folder(bytes.fromhex(tag + fan), os.fstat(fan_fd).st_mtime_ns, fan_fd)
                finally:
                    os.close(fan_fd)
        finally:
            os.close(tag_fd)

    def _forget_fan(self) -> None:
        if self._fan is not None:
            os.close(self._fan_fd)
            self._fan = None


def unlink_quietly(name: str, folder_fd: int) -> None:
    """Remove a file if that is possible."""
    try:
        os.unlink(name, dir_fd=folder_fd)
    except OSError:
        return


def _files(folder_fd: int, key_head: str) -> Iterator[Found]:
    with os.scandir(folder_fd) as listing:
        entries = list(listing)
        # Inside the `with`: an entry's stat goes through the listing's own descriptor.
        for entry in entries:
            try:
                seen = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            named = _RECORD_NAME.fullmatch(entry.name) if stat.S_ISREG(seen.st_mode) else None
            key = BlockKey(bytes.fromhex(key_head + named[1])) if named else None
            yield Found(key, entry.name, seen.st_size, seen.st_mtime, folder_fd)


def _folder_names(folder_fd: int, name: re.Pattern[str]) -> list[str]:
    with os.scandir(folder_fd) as listing:
        return sorted(
            entry.name
            for entry in listing
            if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        )


def _rmdir_quietly(name: str, parent_fd: int) -> None:
    try:
        os.rmdir(name, dir_fd=parent_fd)
    except OSError:
        return


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
