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
from typing import TypeVar

from tiercel.blocks import BlockKey, Header, record_bytes, verify
from tiercel.store.breaker import Breaker
from tiercel.store.faults import FaultLog
from tiercel.store.figures import TierCounters, TierStats
from tiercel.store.options import LaneOptions, WriteMode
from tiercel.tiers import Fate, Outcome, Stored, Tier

T = TypeVar("T")

_FULL_PAUSE_S = 5.0
_SCAN_BATCH = 4096
# Eviction frees a little more than asked, so that a full tier is not one delete per write.
_EVICT_AHEAD = 1 / 64
_NO_RECORD = bytes(8)


@dataclass(frozen=True, slots=True)
class _Room:
    """What left the index for a write, with bytes: other blocks, and older records of the keys written."""

    evicted: dict[BlockKey, int]
    replaced: dict[BlockKey, int]


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
        # A purge makes what was listed or probed before it stale; scopes being purged take nothing new.
        self._generation = 0
        self._purging: list[bytes | None] = []
        # Keys in a write call: the file may be there already, but only the end of the call decides.
        self._writing: set[BlockKey] = set()
        # Keys dropped while a scan runs: its listing may still name them.
        self._dropped_in_scan: set[BlockKey] | None = None
        self._paused_until_s = 0.0
        self._closed = False

    # Index. All of this under the store's lock.

    def has(self, key: BlockKey) -> bool:
        """Whether the tier holds a block worth asking for."""
        return self._known.get(key, 0) > 0

    def available(self, now_s: float) -> bool:
        """Whether a call may be made now: open, not broken, not stuck in an earlier call."""
        return not self._closed and self._breaker.allows(now_s) and not self.stuck(now_s)

    def stuck(self, now_s: float) -> bool:
        """Whether some call is out for longer than the deadline."""
        return bool(self._running) and now_s - min(self._running.values()) >= self.options.deadline_s

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
        if self._dropped_in_scan is not None:
            self._dropped_in_scan.update(dropped)
        return dropped

    def barred(self, key: BlockKey) -> bool:
        """Whether a block's scope is being purged, so that nothing of it may come or be found."""
        return any(tag is None or key.startswith(tag) for tag in self._purging)

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
        for record in records:
            # What the slot held before must not pass for an answer of the tier.
            record[: len(_NO_RECORD)] = _NO_RECORD
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
        self._faults.emit()
        return [found if isinstance(found, Header) else None for found in verified]

    def write(
        self,
        keys: Sequence[BlockKey],
        records: Sequence[memoryview],
        gone: Callable[[int], bool] = lambda index: False,
    ) -> list[bool]:
        """Store records, making room under the cap first. Says which are there now.

        `gone(i)` is asked under the lock, before and after: a block cleared meanwhile is deleted again and
        at no time found.
        """
        answers = [False] * len(keys)
        with self._lock:
            live = [index for index in range(len(keys)) if not gone(index)]
            chosen = [index for index in live if self._may_write(keys[index])]
            sizes = {keys[index]: len(records[index]) for index in chosen}
            room = self._reserve(sizes) if self.takes(time.monotonic()) else None
            self.counters.writes_dropped += len(live) - (len(chosen) if room else 0)
            if room is None:
                return answers
            self._writing.update(sizes)
        try:
            if room.evicted and not self.delete(room.evicted):
                with self._lock:
                    self._unreserve(sizes, room)
                return answers
            started_s = time.monotonic()
            outcomes = self._call(
                self.tier.write, [keys[index] for index in chosen], [records[index] for index in chosen]
            )
            unwanted: dict[BlockKey, int] = {}
            with self._lock:
                self.counters.write_s += time.monotonic() - started_s
                for index, outcome in zip(chosen, outcomes, strict=True):
                    key = keys[index]
                    self._used_bytes -= sizes[key]
                    if gone(index):
                        unwanted[key] = sizes[key]
                    else:
                        answers[index] = self._settle_write(key, sizes[key], outcome, room.replaced.get(key))
            if unwanted:
                self.delete(unwanted)
        finally:
            with self._lock:
                self._writing.difference_update(sizes)
            self._faults.emit()
        return answers

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
                self._relist(key, records[key])
        return gone

    def probe(self, keys: Sequence[BlockKey], guess_bytes: int) -> int:
        """Ask the tier for blocks the index does not know (others may write there): how many in a row.

        Found ones enter the index with a guessed size until they are read or scanned.
        """
        with self._lock:
            generation = self._generation
            if not self.available(time.monotonic()):
                return 0
        there = self._ask(keys)
        found = 0
        with self._lock:
            if generation != self._generation:
                return 0
            for key, seems_there in zip(keys, there, strict=False):
                if not seems_there or not self._learn(key, guess_bytes):
                    break
                found += 1
        return found

    def begin_purge_locked(self, tag: bytes | None) -> dict[BlockKey, int]:
        """Find nothing of a scope from now on, until `end_purge`. Returns what the index listed of it."""
        self._purging.append(tag)
        self._generation += 1
        return self.forget(self.keys_of(tag))

    def purge(self, tag: bytes | None, doomed: dict[BlockKey, int]) -> bool:
        """Delete every record of a scope, also those the index never saw; adds them to `doomed`.

        False when the tier did not let all of them be listed and deleted.
        """
        stored = self._scan_tier()
        if stored is None:
            return False
        for one in stored:
            if tag is None or one.key.startswith(tag):
                doomed.setdefault(one.key, one.record_bytes)
        with self._lock:
            self.forget(doomed)
        return not doomed or self.delete(doomed)

    def end_purge(self, tag: bytes | None) -> None:
        with self._lock:
            self._purging.remove(tag)

    def scan(self) -> None:
        """Learn what the tier already holds: oldest first, behind everything learned meanwhile."""
        with self._lock:
            generation = self._generation
            self._dropped_in_scan = set()
        stored = self._scan_tier()
        if stored is None:
            return
        stored.sort(key=lambda one: one.used_s, reverse=True)
        for start in range(0, len(stored), _SCAN_BATCH):
            with self._lock:
                if self._closed or generation != self._generation:
                    return
                for one in stored[start : start + _SCAN_BATCH]:
                    self._learn_scanned(one)
        with self._lock:
            self._dropped_in_scan = None
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
        _answer(self._close_tier, bool, 1)

    def _close_tier(self) -> list[bool]:
        self.tier.close()
        return [True]

    # Inner workings.

    def _may_call(self) -> bool:
        with self._lock:
            return self.available(time.monotonic())

    def _read_went_well(self, key: BlockKey, header: Header) -> None:
        self._breaker.succeeded()
        self.counters.read_blocks += 1
        self.counters.read_bytes += header.payload_bytes
        if self.has(key):
            # A probe could only guess the size. No move: recency is the chain's, see `touch`.
            self._enter(key, record_bytes(header.payload_bytes))

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

    def _may_write(self, key: BlockKey) -> bool:
        return key not in self._writing and not self.barred(key)

    def _settle_write(self, key: BlockKey, size: int, outcome: Outcome, replaced: int | None) -> bool:
        if outcome.fate is Fate.OK:
            self._breaker.succeeded()
            self._enter(key, size)
            self.counters.written_blocks += 1
            self.counters.written_bytes += size
            return True
        if outcome.fate is Fate.FULL:
            self.counters.full += 1
            self._paused_until_s = time.monotonic() + _FULL_PAUSE_S
            self._faults.note(f"{self.name}.full", f"{self.name}: {outcome.reason}; writing pauses")
        else:
            self._count_failure("write", outcome.reason)
        self.counters.writes_dropped += 1
        if replaced is not None:
            self._relist(key, replaced)
        return False

    def _enter(self, key: BlockKey, size: int) -> None:
        self._used_bytes += size - abs(self._known.get(key, 0))
        self._known[key] = size

    def _learn(self, key: BlockKey, guess_bytes: int) -> bool:
        """Enter a block the tier says it has, unless we know better. Whether it may be asked for now."""
        if key in self._writing or self.barred(key):
            return False
        if key not in self._known:
            self._enter(key, guess_bytes)
        return self.has(key)

    def _learn_scanned(self, one: Stored) -> None:
        assert self._dropped_in_scan is not None
        if one.key in self._known:
            if self.has(one.key):
                self._enter(one.key, one.record_bytes)
            return
        if one.key not in self._dropped_in_scan and self._learn(one.key, one.record_bytes):
            self._known.move_to_end(one.key, last=False)

    def _relist(self, key: BlockKey, size: int) -> None:
        """List a record that is probably still there: it takes room, but must not be believed."""
        if key not in self._known:
            self._enter(key, size)
            self._known[key] = -size
            self._known.move_to_end(key, last=False)

    def _reserve(self, sizes: Mapping[BlockKey, int]) -> _Room | None:
        """Make room for records and count them as used. None if they cannot fit."""
        # A record that replaces one of its own key takes over that one's bytes.
        replaced = self.forget(sizes)
        need_bytes = sum(sizes.values())
        evicted = self._make_room(need_bytes)
        if evicted is None:
            for key, size in replaced.items():
                self._relist(key, size)
            return None
        self._used_bytes += need_bytes
        return _Room(evicted, replaced)

    def _unreserve(self, sizes: Mapping[BlockKey, int], room: _Room) -> None:
        self._used_bytes -= sum(sizes.values())
        self.counters.writes_dropped += len(sizes)
        for key, size in room.replaced.items():
            self._relist(key, size)

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
        if not keys:
            return []
        with self._timed():
            answer = _answer(lambda: call(keys, *args), Outcome, len(keys))
        return answer if isinstance(answer, list) else [Outcome(Fate.FAILED, answer)] * len(keys)

    def _ask(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._timed():
            answer = _answer(lambda: self.tier.contains(keys), bool, len(keys))
        return answer if isinstance(answer, list) else self._failed_to("contains", answer, [])

    def _scan_tier(self) -> list[Stored] | None:
        answer = _answer(self.tier.scan, Stored, None)
        return answer if isinstance(answer, list) else self._failed_to("scan", answer, None)

    def _failed_to(self, what: str, reason: str, instead: T) -> T:
        with self._lock:
            self._count_failure(what, reason)
        self._faults.emit()
        return instead

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


def _answer(call: Callable[[], Iterable[T]], kind: type[T], count: int | None) -> list[T] | str:
    """What a tier answers, as a list of `count` answers of one kind; or what went wrong, in a few words."""
    try:
        answer = list(call())
    except Exception as fault:  # noqa: BLE001 (a tier may be anybody's code: its faults end here)
        return f"{type(fault).__name__}: {fault}"
    if count is not None and len(answer) != count:
        return f"{len(answer)} answers to {count} keys"
    if not all(isinstance(one, kind) for one in answer):
        return f"answers that are not {kind.__name__}"
    return answer
