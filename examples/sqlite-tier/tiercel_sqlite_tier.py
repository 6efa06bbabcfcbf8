"""Records in one SQLite file: `sqlite:///path/to/file.db?sync=yes`.

A tier moves bytes and says what became of them. It verifies nothing, evicts nothing and keeps no index:
the store does that, once, for every tier.
"""

from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tiercel.blocks import KEY_BYTES, BlockKey
from tiercel.errors import TierError
from tiercel.tiers import MISSING, OK, Fate, Outcome, Stored, Usage
from tiercel.tiers.url import TierUrl

TABLE = "CREATE TABLE IF NOT EXISTS records (key BLOB PRIMARY KEY, used_s REAL, record BLOB)"
# A read is noted at most this often: recency for an eviction that follows a restart, without a write per hit.
NOTE_S = 60.0


class SqliteTier:
    """What the entry point names. Raises `TierError` for what the operator has to mend."""

    def __init__(self, url: TierUrl, *, name: str, deadline_s: float, slot_bytes: int) -> None:
        if url.host or not url.path.strip("/"):
            raise TierError(f"{url} names no file; accepted: sqlite:///path/to/file.db")
        sync = url.flag("sync", False)
        url.done()
        self.name = name
        self._path = Path(url.path)
        # Nothing need survive a power cut: a torn record fails its checksum and is a miss.
        self._setup = f"PRAGMA journal_mode = WAL; PRAGMA synchronous = {'FULL' if sync else 'OFF'}; {TABLE}"
        self._deadline_s = deadline_s
        self._local = threading.local()
        self._closed = False
        try:
            self._db()
        except sqlite3.Error as fault:
            raise TierError(f"{url} cannot be opened: {fault}") from None

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [self._one(_find, key).fate is Fate.OK for key in keys]

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        return [self._one(_read, key, record) for key, record in zip(keys, records, strict=True)]

    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        return [self._one(_write, key, record) for key, record in zip(keys, records, strict=True)]

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return [self._one(_delete, key) for key in keys]

    def scan(self) -> Iterator[Stored]:
        if self._closed:
            raise OSError("closed")
        try:
            rows = self._db().execute("SELECT key, length(record), used_s FROM records").fetchall()
        except sqlite3.Error as fault:
            raise OSError(str(fault)) from fault
        yield from (
            Stored(BlockKey(key), size, used_s) for key, size, used_s in rows if len(key) == KEY_BYTES
        )

    def usage(self) -> Usage:
        try:
            seen = shutil.disk_usage(self._path.parent)
        except OSError:
            return Usage()
        return Usage(seen.free, seen.total)

    def close(self) -> None:
        self._closed = True

    def _one(self, act: Callable[..., Outcome], *args: object) -> Outcome:
        """Do one thing in a transaction of its own. A fault is an outcome, never an exception."""
        if self._closed:
            return Outcome(Fate.FAILED, "closed")
        try:
            with self._db() as db:
                return act(db, *args)
        except sqlite3.Error as fault:
            full = getattr(fault, "sqlite_errorname", "") == "SQLITE_FULL"
            return Outcome(Fate.FULL if full else Fate.FAILED, str(fault))

    def _db(self) -> sqlite3.Connection:
        """This thread's connection: calls come from several threads at once."""
        db: sqlite3.Connection | None = getattr(self._local, "db", None)
        if db is None:
            db = sqlite3.connect(self._path, timeout=self._deadline_s)
            db.executescript(self._setup)
            self._local.db = db
        return db


def _find(db: sqlite3.Connection, key: BlockKey) -> Outcome:
    return OK if db.execute("SELECT 1 FROM records WHERE key = ?", (key,)).fetchone() else MISSING


def _read(db: sqlite3.Connection, key: BlockKey, into: memoryview) -> Outcome:
    row = db.execute("SELECT record, used_s FROM records WHERE key = ?", (key,)).fetchone()
    if row is None:
        return MISSING
    record, used_s = row
    if len(record) > len(into):
        return Outcome(Fate.CORRUPT, f"record has {len(record)} bytes")
    into[: len(record)] = record
    if (now_s := time.time()) - used_s > NOTE_S:
        db.execute("UPDATE records SET used_s = ? WHERE key = ?", (now_s, key))
    return OK


def _write(db: sqlite3.Connection, key: BlockKey, record: memoryview) -> Outcome:
    db.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", (key, time.time(), record))
    return OK


def _delete(db: sqlite3.Connection, key: BlockKey) -> Outcome:
    return OK if db.execute("DELETE FROM records WHERE key = ?", (key,)).rowcount else MISSING
