"""The smallest tier there is, over a dict: the second kind of place that the protocol has to fit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from tiercel.blocks import BlockKey
from tiercel.tiers import MISSING, OK, Fate, Outcome, Stored, Usage


class MemoryTier:
    """Records as bytes in this process; for tests only."""

    def __init__(self, name: str = "memory") -> None:
        self.name = name
        self._records: dict[BlockKey, tuple[bytes, float]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._lock:
            return [not self._closed and key in self._records for key in keys]

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        return [self._read(key, record) for key, record in zip(keys, records, strict=True)]

    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        outcomes = []
        for key, record in zip(keys, records, strict=True):
            held = bytes(record)
            with self._lock:
                if not self._closed:
                    self._records[key] = (held, time.time())
            outcomes.append(Outcome(Fate.FAILED, "closed") if self._closed else OK)
        return outcomes

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        with self._lock:
            if self._closed:
                return [Outcome(Fate.FAILED, "closed") for _ in keys]
            return [OK if self._records.pop(key, None) else MISSING for key in keys]

    def scan(self) -> Iterator[Stored]:
        with self._lock:
            if self._closed:
                raise OSError("closed")
            listed = list(self._records.items())
        for key, (held, used_s) in listed:
            yield Stored(key, len(held), used_s)

    def usage(self) -> Usage:
        return Usage(None)

    def close(self) -> None:
        self._closed = True

    def _read(self, key: BlockKey, record: memoryview) -> Outcome:
        with self._lock:
            if self._closed:
                return Outcome(Fate.FAILED, "closed")
            held, _ = self._records.get(key, (None, 0.0))
        if held is None:
            return MISSING
        if len(held) > len(record):
            return Outcome(Fate.CORRUPT, f"record has {len(held)} bytes")
        record[: len(held)] = held
        return OK
