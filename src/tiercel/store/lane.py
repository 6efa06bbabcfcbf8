"""One tier as the store uses it: what it holds, its byte cap, its breaker, and every call to it.

A lane is the single place where a tier is called, so deadlines, counting, verification, eviction at the
cap, pausing when full and the translation of a tier's exceptions exist once, for every kind of tier.
It decides nothing about RAM.

Locking: `known`, `used_bytes`, counters and breaker are protected by the store's lock, passed in; no tier
call is made under it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from tiercel.blocks import BlockKey, Header, verify
from tiercel.store.breaker import Breaker
from tiercel.store.faults import FaultLog
from tiercel.store.figures import TierCounters, TierStats
from tiercel.tiers import Fate, Outcome, Stored, Tier

_FULL_PAUSE_S = 5.0
_SCAN_BATCH = 4096
# Eviction frees a little more than asked, so that a full tier is not one delete per write.
_EVICT_AHEAD = 1 / 64


class WriteMode(StrEnum):
    """When a block goes down to this tier."""

    THROUGH = "through"
    ON_EVICT = "on-evict"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneOptions:
    """How a tier is used. `cap_bytes` None means no cap of ours; a batch slower than `deadline_s` is a stall."""

    cap_bytes: int | None = None
    write: WriteMode = WriteMode.THROUGH
    read_workers: int = 2
    write_workers: int = 1
    deadline_s: float = 5.0
    read_queue: int = 1024
    write_queue: int = 1024


class Lane:
    """A tier with its index (least recently used first) and its manners."""

    def __init__(
        self,
        tier: Tier,
        options: LaneOptions,
        lock: threading.Condition,
        protected: Callable[[BlockKey], bool],
        faults: FaultLog,
    ) -> None:
        self.tier = tier
        self.name = tier.name
        self.options = options
        self.counters = TierCounters()
        self.pending_writes = 0
        self.scanned = False
        self._lock = lock
        self._protected = protected
        self._faults = faults
        self._breaker = Breaker()
        # Record bytes by key; negative after a failed read: still there and counted, not to be believed.
        self._known: OrderedDict[BlockKey, int] = OrderedDict()
        self._used_bytes = 0
        self._running: dict[int, float] = {}
        # A purge makes what was listed or probed before it stale.
        self._generation = 0
        self._purging = 0
        self._paused_until_s = 0.0
        self._closed = False

    # Index. All of this under the store's lock.

    def has(self, key: BlockKey) -> bool:
        """Whether the tier holds a block worth asking for."""
        return self._known.get(key, 0) > 0

    def available(self, now_s: float) -> bool:
        """Whether a call may be made now: open, not broken, not stuck in an earlier call."""
        if self._closed or not self._breaker.allows(now_s):
            return False
        return not self._running or now_s - min(self._running.values()) < self.options.deadline_s

    def takes(self, now_s: float) -> bool:
        """Whether a write may be tried now."""
        return (
            self.options.write is not WriteMode.OFF
            and now_s >= self._paused_until_s
            and self.available(now_s)
        )

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Mark a chain as used now, leaf first, so that its parents are the younger ones."""
        for key in reversed(keys):
            if key in self._known:
                self._known.move_to_end(key)

    def forget(self, keys: Iterable[BlockKey]) -> dict[BlockKey, int]:
        """Drop keys from the index; returns those that were in it, with their bytes."""
        dropped: dict[BlockKey, int] = {}
        for key in keys:
            size = self._known.pop(key, None)
            if size is not None:
                dropped[key] = abs(size)
                self._used_bytes -= abs(size)
        return dropped

    def keys_of(self, tag: bytes | None) -> list[BlockKey]:
        """Every key of a scope, or of all scopes."""
        return [key for key in self._known if tag is None or key.startswith(tag)]

    def stats(self) -> TierStats:
        state = self._breaker.state(time.monotonic())
        return TierStats(
            name=self.name,
            blocks=len(self._known),
            used_bytes=self._used_bytes,
            cap_bytes=self.options.cap_bytes,
            pending_writes=self.pending_writes,
            breaker=state.value,
            counters=self.counters,
        )

    # Calls. None of this under the store's lock; each blocks for as long as the tier does.

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Header | None]:
        """Fill the buffers and check every byte. None for a block that did not come back as itself."""
        if not self._may_call():
            return [None] * len(keys)
        started_s = time.monotonic()
        outcomes = self._call(self.tier.read, keys, records)
        verified = [
            verify(record, key) if outcome.fate is Fate.OK else outcome.reason
            for key, record, outcome in zip(keys, records, outcomes, strict=True)
        ]
        rotten: dict[BlockKey, int] = {}
        with self._lock:
            self.counters.read_s += time.monotonic() - started_s
            for key, outcome, found in zip(keys, outcomes, verified, strict=True):
                if isinstance(found, Header):
                    self._read_went_well(key, found)
                elif self._read_failed(key, outcome, found):
                    rotten[key] = self.forget([key]).get(key, 0)
        if rotten:
            self.delete(rotten)
        return [found if isinstance(found, Header) else None for found in verified]

    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[bool]:
        """Store records, making room under the cap first. Says which are there now."""
        need_bytes = sum(len(record) for record in records)
        with self._lock:
            if not self.takes(time.monotonic()):
                return self._drop_locked(len(keys))
            evicted = self._reserve(keys, need_bytes)
            if evicted is None:
                return self._drop_locked(len(keys))
        if evicted and not self.delete(evicted):
            with self._lock:
                self._used_bytes -= need_bytes
                return self._drop_locked(len(keys))
        started_s = time.monotonic()
        outcomes = self._call(self.tier.write, keys, records)
        with self._lock:
            self.counters.write_s += time.monotonic() - started_s
            return [
                self._settle_write(key, len(record), outcome)
                for key, record, outcome in zip(keys, records, outcomes, strict=True)
            ]

    def delete(self, records: Mapping[BlockKey, int]) -> bool:
        """Remove records the index no longer lists. One that would not go is listed (not believed) again."""
        keys = list(records)
        gone = True
        for key, outcome in zip(keys, self._call(self.tier.delete, keys), strict=True):
            if outcome.fate in (Fate.OK, Fate.MISSING):
                continue
            gone = False
            with self._lock:
                self._count_failure("delete", outcome.reason)
                if key not in self._known:
                    self._enter(key, records[key])
                    self._known[key] = -records[key]
                    self._known.move_to_end(key, last=False)
        return gone

    def probe(self, keys: Sequence[BlockKey], guess_bytes: int) -> int:
        """Ask the tier for blocks the index does not know (others may write there); returns how many in a row.

        Found ones enter the index with a guessed size until they are read or scanned.
        """
        with self._lock:
            generation = self._generation
            if self._purging or not self.available(time.monotonic()):
                return 0
        found = 0
        for there in self._ask(keys):
            if not there:
                break
            found += 1
        with self._lock:
            if generation != self._generation:
                return 0
            for key in keys[:found]:
                self._enter(key, guess_bytes)
        return found

    def purge(self, tag: bytes | None) -> int:
        """Delete every record of a scope from the tier, also those the index never saw. Returns how many."""
        with self._lock:
            doomed = self.forget(self.keys_of(tag))
            self._purging += 1
            self._generation += 1
        try:
            for one in self._scan_tier() or ():
                if tag is None or one.key.startswith(tag):
                    doomed.setdefault(one.key, one.record_bytes)
            if doomed:
                self.delete(doomed)
        finally:
            with self._lock:
                self._purging -= 1
        return len(doomed)

    def scan(self) -> None:
        """Learn what the tier already holds: oldest first, behind everything learned meanwhile."""
        with self._lock:
            generation = self._generation
        stored = self._scan_tier()
        if stored is None:
            return
        stored.sort(key=lambda one: one.used_s, reverse=True)
        for start in range(0, len(stored), _SCAN_BATCH):
            with self._lock:
                if self._closed or generation != self._generation:
                    return
                for one in stored[start : start + _SCAN_BATCH]:
                    known = one.key in self._known
                    self._enter(one.key, one.record_bytes)
                    if not known:
                        self._known.move_to_end(one.key, last=False)
        self.trim()
        with self._lock:
            self.scanned = True

    def trim(self) -> None:
        """Evict down to the cap, should the tier hold more than it."""
        with self._lock:
            evicted = self._make_room(0)
        if evicted:
            self.delete(evicted)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.tier.close()

    # Inner workings.

    def _may_call(self) -> bool:
        with self._lock:
            return self.available(time.monotonic())

    def _drop_locked(self, blocks: int) -> list[bool]:
        self.counters.writes_dropped += blocks
        return [False] * blocks

    def _read_went_well(self, key: BlockKey, header: Header) -> None:
        self._breaker.succeeded()
        self.counters.read_blocks += 1
        self.counters.read_bytes += header.payload_bytes
        if key in self._known:
            self._known.move_to_end(key)

    def _read_failed(self, key: BlockKey, outcome: Outcome, reason: str) -> bool:
        """Count a bad read and stop believing the entry. True if the record is rotten and must go."""
        if outcome.fate is Fate.MISSING:
            self.counters.missing += 1
            self.forget([key])
            return False
        if outcome.fate is Fate.FAILED:
            self._count_failure("read", reason)
            if key in self._known:
                self._known[key] = -abs(self._known[key])
            return False
        self.counters.corrupt += 1
        self._faults.note(f"{self.name}.corrupt", f"{self.name}: a block came back wrong ({reason}); dropped")
        return True

    def _settle_write(self, key: BlockKey, record_bytes: int, outcome: Outcome) -> bool:
        self._used_bytes -= record_bytes
        if outcome.fate is Fate.OK:
            self._breaker.succeeded()
            self._enter(key, record_bytes)
            self.counters.written_blocks += 1
            self.counters.written_bytes += record_bytes
            return True
        if outcome.fate is Fate.FULL:
            self.counters.full += 1
            self._paused_until_s = time.monotonic() + _FULL_PAUSE_S
            self._faults.note(f"{self.name}.full", f"{self.name}: {outcome.reason}; writing pauses")
        else:
            self._count_failure("write", outcome.reason)
        self.counters.writes_dropped += 1
        return False

    def _enter(self, key: BlockKey, record_bytes: int) -> None:
        self._used_bytes += record_bytes - abs(self._known.get(key, 0))
        self._known[key] = record_bytes

    def _reserve(self, keys: Sequence[BlockKey], need_bytes: int) -> dict[BlockKey, int] | None:
        """Make room for records and count them as used. Returns what must be deleted, None if they cannot fit."""
        # A record that replaces one of its own key takes over that one's bytes.
        self.forget(keys)
        evicted = self._make_room(need_bytes)
        if evicted is not None:
            self._used_bytes += need_bytes
        return evicted

    def _make_room(self, need_bytes: int) -> dict[BlockKey, int] | None:
        cap_bytes = self.options.cap_bytes
        if cap_bytes is None or self._used_bytes + need_bytes <= cap_bytes:
            return {}
        must_free = self._used_bytes + need_bytes - cap_bytes
        wanted = must_free + int(cap_bytes * _EVICT_AHEAD)
        chosen: list[BlockKey] = []
        freed = 0
        for key, size in self._known.items():
            if freed >= wanted:
                break
            if not self._protected(key):
                chosen.append(key)
                freed += abs(size)
        if freed < must_free:
            return None
        self.counters.evicted_blocks += len(chosen)
        return self.forget(chosen)

    def _count_failure(self, what: str, reason: str) -> None:
        self.counters.failed += 1
        if self._breaker.failed(time.monotonic()):
            self.counters.breaker_opened += 1
        self._faults.note(f"{self.name}.{what}", f"{self.name}: {what} failed ({reason}); treated as a miss")

    # The one place where a tier is called: its exceptions and malformed answers end here.

    def _call(
        self, call: Callable[..., list[Outcome]], keys: Sequence[BlockKey], *args: object
    ) -> list[Outcome]:
        with self._timed():
            try:
                outcomes = call(keys, *args)
            except Exception as fault:
                return [Outcome(Fate.FAILED, f"{type(fault).__name__}: {fault}")] * len(keys)
        if len(outcomes) != len(keys):
            return [Outcome(Fate.FAILED, f"{len(outcomes)} answers to {len(keys)} keys")] * len(keys)
        return outcomes

    def _ask(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._timed():
            try:
                return [there is True for there in self.tier.contains(keys)]
            except Exception as fault:
                reason = f"{type(fault).__name__}: {fault}"
        with self._lock:
            self._count_failure("contains", reason)
        return []

    def _scan_tier(self) -> list[Stored] | None:
        try:
            return list(self.tier.scan())
        except Exception as fault:
            reason = f"{type(fault).__name__}: {fault}"
        with self._lock:
            self._count_failure("scan", reason)
        return None

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Note when a call began, so that one that hangs makes the lane unavailable."""
        call = object()
        with self._lock:
            self._running[id(call)] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                del self._running[id(call)]
            self._faults.emit()
