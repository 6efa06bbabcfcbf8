"""A cache directory seen from outside: what lies in it, whether it is sound, and clearing parts of it.

Works beside stores that use the directory: each of them takes what vanishes as a miss. Listing changes
nothing, not even the date of a file; nothing here ever touches a file that is not named like ours.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tiercel.blocks import (
    HEADER_BYTES,
    TAG_BYTES,
    BlockKey,
    Header,
    Identity,
    Scope,
    parse,
    record_bytes,
    verify,
)
from tiercel.errors import RequestError, TierError
from tiercel.tiers import Fate
from tiercel.tiers.files import FilesTier
from tiercel.tiers.folder import Found, Visit, prepare, record_path, unlink_quietly
from tiercel.tiers.transfer import Transfer

_HEADER_TRIES_MAX = 8
_BATCH_RECORDS = 16


@dataclass(slots=True)
class ScopeRow:
    """One scope of a directory. `info` is what a record's header says of it, empty if none could be read."""

    tag: bytes
    blocks: int = 0
    file_bytes: int = 0
    oldest_s: float = float("inf")
    newest_s: float = 0.0
    info: Mapping[str, str | int] = field(default_factory=dict)
    root: bytes = b""

    def has_salt(self, salt: str) -> bool:
        """Whether this is the scope of tenant `salt`: all of its names with this salt give its root again."""
        info = self.info
        try:
            identity = Identity(
                model=str(info["model"]),
                revision=str(info["revision"]),
                kv_dtype=str(info["kv_dtype"]),
                geometry=bytes.fromhex(str(info["geometry"])),
                layout=str(info["layout"]),
                block_tokens=int(info["block_tokens"]),
                shard=int(info["shard"]),
                shards=int(info["shards"]),
                scales=_digest(info, "scales"),
            )
            return Scope(identity, _digest(info, "adapter"), salt).root == self.root
        except (KeyError, ValueError, RequestError):
            # A header may say anything; one that does not describe a scope describes nobody's.
            return False


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that is not what its name says."""

    path: str
    file_bytes: int
    reason: str
    deleted: bool


@dataclass(slots=True)
class VerifyReport:
    """What checking a directory found. `leftovers` are unfinished files of writers that are gone."""

    checked: int = 0
    checked_bytes: int = 0
    bad: list[BadRecord] = field(default_factory=list)
    leftovers: int = 0
    other_files: int = 0


class CacheDirectory:
    """A directory of records. Raises `TierError`, also from every method, when it is none or out of reach."""

    def __init__(self, root: Path) -> None:
        prepare(root, create=False)
        self.root = root

    def scopes(self, *, older_than_s: float = 0.0) -> list[ScopeRow]:
        """Every scope, largest first, from names and sizes and the header of one record each.

        Only records last used `older_than_s` seconds ago or longer are counted.
        """
        cutoff_s = _cutoff(older_than_s)
        rows: dict[bytes, ScopeRow] = {}
        tries: dict[bytes, int] = {}
        with self._visit() as visit:
            for found in visit.walk():
                if found.key is None or found.used_s > cutoff_s:
                    continue
                tag = found.key[:TAG_BYTES]
                row = rows.setdefault(tag, ScopeRow(tag))
                row.blocks += 1
                row.file_bytes += found.file_bytes
                row.oldest_s = min(row.oldest_s, found.used_s)
                row.newest_s = max(row.newest_s, found.used_s)
                if not row.root and tries.setdefault(tag, 0) < _HEADER_TRIES_MAX:
                    tries[tag] += 1
                    _describe(row, visit, found.key)
        return sorted(rows.values(), key=lambda row: (-row.file_bytes, row.tag))

    def clear(self, tags: Collection[bytes], *, older_than_s: float = 0.0) -> tuple[int, int]:
        """Delete the records of these scopes (last used that long ago). Returns how many, and their bytes."""
        cutoff_s = _cutoff(older_than_s)
        blocks = file_bytes = 0
        with self._visit() as visit:
            for tag in tags:
                for found in visit.walk(tag):
                    if found.key is not None and found.used_s <= cutoff_s:
                        if _unlink(found):
                            blocks += 1
                            file_bytes += found.file_bytes
                    elif found.abandoned(time.time()):
                        found.remove()
                visit.prune(tag)
        return blocks, file_bytes

    def verify(
        self,
        *,
        repair: bool,
        threads: int = 2,
        progress: Callable[[int, int], None] = lambda records, total: None,
    ) -> VerifyReport:
        """Check every byte of every record; with `repair` delete the bad ones and the leftovers.

        Blocks; `progress(checked, total)` is called on this thread.
        """
        report = VerifyReport()
        records = list(self._listed(report, repair))
        batches = [records[at : at + _BATCH_RECORDS] for at in range(0, len(records), _BATCH_RECORDS)]
        checker = _Checker(self.root, repair)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="tiercel-verify")
        done = 0
        try:
            with _one_line(self.root):
                for batch, part in zip(batches, pool.map(checker.check, batches), strict=True):
                    report.checked += part.checked
                    report.checked_bytes += part.checked_bytes
                    report.bad += part.bad
                    done += len(batch)
                    progress(done, len(records))
        finally:
            pool.shutdown(cancel_futures=True)
        return report

    def _listed(self, report: VerifyReport, repair: bool) -> Iterator[tuple[BlockKey, int]]:
        now_s = time.time()
        with self._visit() as visit:
            for found in visit.walk():
                if found.key is not None:
                    yield found.key, found.file_bytes
                elif found.abandoned(now_s):
                    report.leftovers += 1
                    _remove_if(repair, found)
                else:
                    report.other_files += not found.name.endswith(".tmp")

    @contextmanager
    def _visit(self) -> Iterator[Visit]:
        with _one_line(self.root), Visit(self.root) as visit:
            yield visit


class _Checker:
    """Checks batches of records on several threads, each with a buffer of its own."""

    def __init__(self, root: Path, repair: bool) -> None:
        self._root = root
        self._repair = repair
        # Direct, so that checking a large cache does not push everything else out of the page cache.
        self._tier = FilesTier(root, create=False)
        self._own = threading.local()

    def check(self, batch: Sequence[tuple[BlockKey, int]]) -> VerifyReport:
        report = VerifyReport()
        with Visit(self._root) as visit:
            for key, file_bytes in batch:
                reason = self._fault(visit, key, file_bytes)
                if reason is None:
                    continue
                report.checked += 1
                report.checked_bytes += file_bytes
                if reason:
                    deleted = self._repair and _delete(visit, key)
                    report.bad.append(BadRecord(record_path(key), file_bytes, reason, deleted))
        return report

    def _fault(self, visit: Visit, key: BlockKey, file_bytes: int) -> str | None:
        """What is wrong with a record; empty if nothing, None if it went away meanwhile."""
        try:
            header = _header(visit, key)
        except OSError as fault:
            return fault.strerror
        if not isinstance(header, Header):
            return header
        expected_bytes = record_bytes(header.payload_bytes)
        # Checked before memory is taken for it: the size of a planted file may be anything.
        if expected_bytes != file_bytes:
            return f"file has {file_bytes} bytes, its header says {expected_bytes}"
        record = self._buffer(file_bytes)[:file_bytes]
        (outcome,) = self._tier.read([key], [record])
        if outcome.fate is Fate.MISSING:
            return None
        if outcome.fate is not Fate.OK:
            return outcome.reason
        found = verify(record, key)
        return found if isinstance(found, str) else ""

    def _buffer(self, wanted_bytes: int) -> memoryview:
        buffer: memoryview | None = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer) < wanted_bytes:
            # A map is page aligned, as direct I/O needs it.
            buffer = self._own.buffer = memoryview(mmap.mmap(-1, wanted_bytes))
        return buffer


def _header(visit: Visit, key: BlockKey) -> Header | str | None:
    """A record's header, or what is wrong with it; None if there is no such record (any more)."""
    page = memoryview(bytearray(HEADER_BYTES))
    try:
        fd = visit.open(key)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        count = Transfer(direct=False).read(fd, page)
    finally:
        os.close(fd)
    return parse(page[:count])


def _describe(row: ScopeRow, visit: Visit, key: BlockKey) -> None:
    try:
        header = _header(visit, key)
    except OSError:
        # One unreadable record of a scope: the next one will tell.
        return
    if isinstance(header, Header) and header.key == key:
        row.info = header.info
        row.root = header.root


def _delete(visit: Visit, key: BlockKey) -> bool:
    path = record_path(key)
    unlink_quietly(path.rsplit("/", 1)[-1], visit.folder(key))
    return not visit.holds(key)


def _unlink(found: Found) -> bool:
    try:
        os.unlink(found.name, dir_fd=found.folder_fd)
    except FileNotFoundError:
        # A store that uses the directory was faster.
        return False
    return True


def _remove_if(repair: bool, found: Found) -> None:
    if repair:
        found.remove()


def _digest(info: Mapping[str, str | int], name: str) -> bytes | None:
    return bytes.fromhex(str(info[name])) if name in info else None


def _cutoff(older_than_s: float) -> float:
    return time.time() - older_than_s if older_than_s else float("inf")


@contextmanager
def _one_line(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        raise TierError(f"cache directory {root}: {fault.strerror} (user id {os.geteuid()})") from None
