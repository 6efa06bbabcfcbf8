"""What lies in a tier, seen from outside: what it is, whether it is sound, and clearing parts of it.

Works on every kind of tier, beside stores that use the place: each of them takes what vanishes as a miss.
Listing changes nothing, not even the date of a file; nothing here ever touches what is not named like ours.
Memory is bounded by the scopes there are, never by the records.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

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
from tiercel.tiers import Fate, FilesTier, Outcome, Stored, Tier
from tiercel.tiers.extras import Peeks, Tidies
from tiercel.tiers.folder import record_path

A = TypeVar("A")
B = TypeVar("B")

# Any payload is sound if it is what its header says; who can use it is another question.
EVERY_CODEC = range(1 << 32)
# No block comes near; memory for a longer one is only taken once its header says so too.
_TRUSTED_BYTES = 64 << 20
_HEADER_TRIES_MAX = 8
_BATCH_RECORDS = 16
_DELETE_BATCH = 256
_PROGRESS_RECORDS = 1024
# So many batches per thread are listed ahead of the checks.
_AHEAD = 4
# A place of which so many records in a row cannot be read does not answer.
_FAILURES_MAX = 32


@dataclass(slots=True)
class ScopeRow:
    """One scope of a place. `info` is what a record's header says of it, empty if none could be read."""

    tag: bytes
    blocks: int = 0
    file_bytes: int = 0
    oldest_s: float = float("inf")
    newest_s: float = 0.0
    info: Mapping[str, str | int] = field(default_factory=dict)
    root: bytes = b""

    def matches(self, model: str | None, salt: str | None) -> bool:
        """Whether this is a scope of this model and this tenant; None stands for any."""
        if model is not None and self.info.get("model") != model:
            return False
        return salt is None or self.has_salt(salt)

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
                lossy=str(info["lossy"]) if "lossy" in info else None,
            )
            return Scope(identity, _digest(info, "adapter"), salt).root == self.root
        except (KeyError, ValueError, RequestError):
            # A header may say anything; one that does not describe a scope describes nobody's.
            return False


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that is not what its name says, or could not be read (then it is left alone)."""

    key: BlockKey
    file_bytes: int
    reason: str
    deleted: bool

    @property
    def path(self) -> str:
        """Where it lies below the directory, in a tier of files."""
        return record_path(self.key)


@dataclass(slots=True)
class VerifyReport:
    """What checking a place found. `leftovers` are unfinished files of writers that are gone.

    `locked` records are encrypted with a key that we do not have: neither checked nor deleted.
    """

    checked: int = 0
    checked_bytes: int = 0
    bad: list[BadRecord] = field(default_factory=list)
    locked: int = 0
    leftovers: int = 0
    other_files: int = 0


class CachePlace:
    """A tier and what to call it. Every method raises `TierError`, one line, when it is out of reach."""

    def __init__(self, tier: Tier, shown: str) -> None:
        self.tier = tier
        self.shown = shown

    @classmethod
    def directory(cls, root: Path) -> CachePlace:
        """A directory of records, left as it is. Raises `TierError` when it is none."""
        return cls(FilesTier(root, create=False), str(root))

    def records(self, older_than_s: float = 0.0) -> Iterator[Stored]:
        """Every record last used that many seconds ago or longer, in no order."""
        cutoff_s = time.time() - older_than_s if older_than_s else float("inf")
        with self.one_line():
            for one in self.tier.scan():
                if one.used_s <= cutoff_s:
                    yield one

    def scopes(
        self, *, older_than_s: float = 0.0, progress: Callable[[int], None] = lambda records: None
    ) -> list[ScopeRow]:
        """Every scope, largest first, from names and sizes and the header of one record each.

        Only records last used `older_than_s` seconds ago or longer are counted.
        """
        rows: dict[bytes, ScopeRow] = {}
        tries: dict[bytes, int] = {}
        for number, one in enumerate(self.records(older_than_s), 1):
            if number % _PROGRESS_RECORDS == 0:
                progress(number)
            tag = one.key[:TAG_BYTES]
            row = rows.setdefault(tag, ScopeRow(tag))
            row.blocks += 1
            row.file_bytes += one.record_bytes
            row.oldest_s = min(row.oldest_s, one.used_s)
            row.newest_s = max(row.newest_s, one.used_s)
            if not row.root and tries.setdefault(tag, 0) < _HEADER_TRIES_MAX:
                tries[tag] += 1
                self._describe(row, one)
        return sorted(rows.values(), key=lambda row: (-row.file_bytes, row.tag))

    def clear(self, tags: Collection[bytes], *, older_than_s: float = 0.0) -> tuple[int, int]:
        """Delete the records of these scopes (last used that long ago). Returns how many, and their bytes."""
        chosen = frozenset(tags)
        doomed = (one for one in self.records(older_than_s) if one.key[:TAG_BYTES] in chosen)
        blocks = file_bytes = 0
        while batch := list(islice(doomed, _DELETE_BATCH)):
            for one, outcome in zip(batch, self.tier.delete([one.key for one in batch]), strict=True):
                if outcome.fate is Fate.OK:
                    blocks += 1
                    file_bytes += one.record_bytes
                elif outcome.fate is not Fate.MISSING:
                    # MISSING: a store that uses the place was faster.
                    raise TierError(f"{self.shown}: a block could not be deleted: {outcome.reason}")
        if isinstance(self.tier, Tidies):
            with self.one_line():
                self.tier.prune(chosen)
        return blocks, file_bytes

    def verify(
        self,
        *,
        repair: bool,
        threads: int = 2,
        progress: Callable[[VerifyReport], None] = lambda report: None,
    ) -> VerifyReport:
        """Check every byte of every record; with `repair` delete the bad ones and the leftovers.

        Blocks; `progress(so far)` is called on this thread, and may raise to end it.
        """
        report = VerifyReport()
        checker = _Checker(self.tier, self.shown, repair)
        with self.one_line():
            for part in in_order(checker.check, batched(self.records(), _BATCH_RECORDS), threads):
                report.checked += part.checked
                report.checked_bytes += part.checked_bytes
                report.bad += part.bad
                report.locked += part.locked
                progress(report)
        if isinstance(self.tier, Tidies):
            with self.one_line():
                found = self.tier.oddments(repair)
            report.leftovers, report.other_files = found.leftovers, found.other_files
        return report

    def close(self) -> None:
        """Release what the tier holds open."""
        self.tier.close()

    @contextmanager
    def one_line(self) -> Iterator[None]:
        """Turn what a tier raises for a place that is gone into an error of the user's."""
        try:
            yield
        except OSError as fault:
            raise TierError(f"{self.shown}: {fault.strerror or fault}") from None

    def _describe(self, row: ScopeRow, one: Stored) -> None:
        header = head_of(self.tier, one)
        if isinstance(header, Header) and header.key == one.key:
            row.info = header.info
            row.root = header.root


class _Checker:
    """Checks batches of records on several threads, each with a buffer of its own."""

    def __init__(self, tier: Tier, shown: str, repair: bool) -> None:
        self._tier = tier
        self._shown = shown
        self._repair = repair
        self._own = threading.local()
        self._failures = 0

    def check(self, batch: Sequence[Stored]) -> VerifyReport:
        report = VerifyReport()
        for one in batch:
            outcome = self._check(one)
            if outcome.fate is Fate.MISSING:
                # Gone meanwhile, unless it is still there and only unreadable for us.
                report.locked += self._tier.contains([one.key])[0]
                continue
            report.checked += 1
            report.checked_bytes += one.record_bytes
            if outcome.fate is not Fate.OK:
                failed = outcome.fate is not Fate.CORRUPT
                self._count(outcome, failed)
                deleted = self._repair and not failed and self._delete(one.key)
                report.bad.append(BadRecord(one.key, one.record_bytes, outcome.reason, deleted))
            else:
                self._failures = 0
        return report

    def _check(self, one: Stored) -> Outcome:
        if one.record_bytes > _TRUSTED_BYTES:
            # Checked before memory is taken for it: the size of a planted file may be anything.
            header = head_of(self._tier, one)
            if isinstance(header, Outcome):
                return header
            if wrong := _length(header, one):
                return wrong
        record = self._buffer(max(one.record_bytes, HEADER_BYTES))[: max(one.record_bytes, HEADER_BYTES)]
        (outcome,) = self._tier.read([one.key], [record])
        if outcome.fate is not Fate.OK:
            return outcome
        found = verify(record, one.key, EVERY_CODEC)
        return Outcome(Fate.CORRUPT, found) if isinstance(found, str) else _length(found, one) or outcome

    def _delete(self, key: BlockKey) -> bool:
        (outcome,) = self._tier.delete([key])
        return outcome.fate in (Fate.OK, Fate.MISSING)

    def _count(self, outcome: Outcome, failed: bool) -> None:
        self._failures = self._failures + 1 if failed else 0
        if self._failures >= _FAILURES_MAX:
            raise TierError(f"{self._shown}: does not answer: {outcome.reason}")

    def _buffer(self, wanted_bytes: int) -> memoryview:
        buffer: memoryview | None = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer) < wanted_bytes:
            # A map is page aligned, as direct I/O needs it.
            buffer = self._own.buffer = memoryview(mmap.mmap(-1, wanted_bytes))
        return buffer


def head_of(tier: Tier, one: Stored) -> Header | Outcome:
    """A record's header, or what is wrong with it; from its first page where the tier can do that."""
    if isinstance(tier, Peeks):
        (page,) = tier.peek([one.key])
        if isinstance(page, Outcome):
            return page
    elif one.record_bytes > _TRUSTED_BYTES:
        return Outcome(Fate.CORRUPT, f"record has {one.record_bytes} bytes, more than any block")
    else:
        record = memoryview(mmap.mmap(-1, max(one.record_bytes, HEADER_BYTES)))
        (outcome,) = tier.read([one.key], [record])
        if outcome.fate is not Fate.OK:
            return outcome
        page = bytes(record[:HEADER_BYTES])
    header = parse(page)
    return Outcome(Fate.CORRUPT, header) if isinstance(header, str) else header


def batched(records: Iterator[Stored], size: int) -> Iterator[list[Stored]]:
    """Lists of `size` records, the last one shorter."""
    while batch := list(islice(records, size)):
        yield batch


def in_order(act: Callable[[A], B], items: Iterator[A], threads: int) -> Iterator[B]:
    """What `act` makes of each item, on several threads, in order, only a few items ahead."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="tiercel-inspect")
    waiting: list[Future[B]] = []
    try:
        for item in items:
            waiting.append(pool.submit(act, item))
            while waiting and (len(waiting) >= threads * _AHEAD or waiting[0].done()):
                yield waiting.pop(0).result()
        while waiting:
            yield waiting.pop(0).result()
    finally:
        pool.shutdown(cancel_futures=True)


def _length(header: Header, one: Stored) -> Outcome | None:
    """What is wrong with a record's length at rest, if anything."""
    expected_bytes = record_bytes(header.payload_bytes)
    if expected_bytes == one.record_bytes:
        return None
    return Outcome(Fate.CORRUPT, f"file has {one.record_bytes} bytes, its header says {expected_bytes}")


def _digest(info: Mapping[str, str | int], name: str) -> bytes | None:
    return bytes.fromhex(str(info[name])) if name in info else None
