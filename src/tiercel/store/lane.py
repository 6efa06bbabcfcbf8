"""One tier as the store uses it: every call to it, its breaker, its pauses and its counters.

A lane is the single place where a tier is called, so deadlines, counting, verification, pausing when full
and the translation of a tier's exceptions exist once, for every kind of tier. What the tier holds is kept in
its `LaneIndex`. It decides nothing about RAM.

Locking: index, counters, breaker and pauses are protected by the store's lock, passed in; no tier call is
made under it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from tiercel.blocks import BlockKey, Header, record_bytes, verify
from tiercel.store.faults import FaultLog
from tiercel.store.figures import TRANSFER_BOUNDS_S, Histogram, TierCounters, TierStats
from tiercel.store.gate import Gate
from tiercel.store.journal import Journal
from tiercel.store.lane_index import KEYS_MAX, Cell, LaneIndex, Room
from tiercel.store.options import LaneOptions, WriteMode
from tiercel.store.policy import TierSpeed
from tiercel.store.sharing import Sharing
from tiercel.tiers import Fate, Outcome, Stored, Tier, Usage
from tiercel.tiers.extras import Recycles, Shared

T = TypeVar("T")

_FULL_PAUSE_S = 5.0
# Writing stops before the place is full to the last byte: others live there too.
_SPARE_SHARE, _SPARE_BYTES_MAX = 0.01, 1 << 30
_SPARE_CHECK_S = 1.0
_SCAN_BATCH = 4096
_NO_RECORD = bytes(8)


class Lane:
    """A tier with its index and its manners."""

    def __init__(
        self,
        tier: Tier,
        options: LaneOptions,
        lock: threading.Condition,
        protected: Callable[[BlockKey], bool],
        faults: FaultLog,
        journal: Journal,
    ) -> None:
        self.tier = tier
        self.name = tier.name
        self.options = options
        self.index = LaneIndex(
            options.cap_bytes, protected, lambda key, stored: journal.note(key, tier.name, stored=stored)
        )
        self.counters = TierCounters()
        self._read_took, self._write_took = Histogram(TRANSFER_BOUNDS_S), Histogram(TRANSFER_BOUNDS_S)
        self.speed = TierSpeed(options.read_workers)
        self.pending_writes = 0
        self.scanned = False
        self._lock = lock
        self._faults = faults
        self.gate = Gate(lock, options.deadline_s, faults)
        self._paused_until_s = 0.0
        self._room_checked_s = -_SPARE_CHECK_S
        if isinstance(tier, Recycles) or options.own_memory:
            # One deletion per write is then what is fastest, or costs nothing.
            self.index.evict_ahead = 0.0
        self._sharing = Sharing(self, tier, lock) if isinstance(tier, Shared) else None

    # Under the store's lock.

    def has(self, key: BlockKey) -> bool:
        """Whether the tier holds a block worth asking for."""
        return self.index.has(key, time.monotonic())

    def takes(self, now_s: float) -> bool:
        """Whether a write may wait for its turn; it does also while the tier is being probed."""
        return self._writes(now_s) and not self.gate.hopeless(now_s)

    def _writes(self, now_s: float) -> bool:
        return self.options.write is not WriteMode.OFF and now_s >= self._paused_until_s

    def bar_locked(self, tag: bytes | None) -> dict[BlockKey, int]:
        """A scope is cleared: find nothing of it until `end_purge`. Returns its records, with bytes."""
        found = self.index.bar(tag)
        self.counters.cleared_blocks += len(found)
        return found

    def stats(self, pending_reads: int = 0) -> TierStats:
        """Figures of this moment; its counters are live objects."""
        self.counters.evicted_blocks = self.index.evicted_blocks
        return TierStats(
            name=self.name,
            blocks=len(self.index),
            used_bytes=self.index.used_bytes,
            cap_bytes=self.options.cap_bytes,
            pending_writes=self.pending_writes,
            breaker=self.gate.breaker.state(time.monotonic()).value,
            counters=self.counters,
            pending_reads=pending_reads,
            reads=self._read_took.copy(),
            writes=self._write_took.copy(),
        )

    # Calls. None of this under the store's lock; each blocks for as long as the tier does.

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Header | None]:
        """Fill the buffers and check every byte. None for a block that did not come back as itself."""
        with self.gate.permit() as permitted:
            return self._read(keys, records) if permitted else [None] * len(keys)

    def _read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Header | None]:
        started_s = time.monotonic()
        with self._lock:
            read = self.speed.began(started_s)
        for record in records:
            # What the slot held before must not pass for an answer of the tier.
            record[: len(_NO_RECORD)] = _NO_RECORD
        outcomes = self.outcomes(self.tier.read, keys, records)
        verified = [
            verify(record, key) if outcome.fate is Fate.OK else outcome.reason
            for key, record, outcome in zip(keys, records, outcomes, strict=True)
        ]
        rotten: dict[BlockKey, int] = {}
        with self._lock:
            ended_s = time.monotonic()
            self._read_took.observe(ended_s - started_s)
            self.speed.ended(read, sum(isinstance(found, Header) for found in verified), ended_s)
            for key, outcome, found in zip(keys, outcomes, verified, strict=True):
                if isinstance(found, Header):
                    self._read_went_well(key, outcome.stored_bytes or record_bytes(found.payload_bytes))
                elif self._read_failed(key, outcome, found):
                    rotten[key] = self.index.expel([key]).get(key, 0)
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
        self._check_room()
        with self.gate.permit() as permitted:
            return self._write(keys, records, gone, permitted)

    def _write(
        self,
        keys: Sequence[BlockKey],
        records: Sequence[memoryview],
        gone: Callable[[int], bool],
        permitted: bool,
    ) -> list[bool]:
        answers = [False] * len(keys)
        with self._lock:
            now_s = time.monotonic()
            live = [index for index in range(len(keys)) if not gone(index)]
            chosen = [index for index in live if self.index.may_write(keys[index])]
            sizes = {keys[index]: len(records[index]) for index in chosen}
            room = self.index.reserve(sizes, now_s) if permitted and self._writes(now_s) else None
            self.counters.writes_dropped += len(live) - (len(chosen) if room else 0)
        if room is None:
            return answers
        try:
            if self._evict(sizes, room):
                started_s = time.monotonic()
                outcomes = self.outcomes(
                    self.tier.write, [keys[index] for index in chosen], [records[index] for index in chosen]
                )
                with self._lock:
                    self._write_took.observe(time.monotonic() - started_s)
                    unwanted = self._settle(keys, chosen, outcomes, sizes, room, gone, answers)
                if unwanted:
                    self.delete(unwanted)
        finally:
            with self._lock:
                self.index.written(sizes)
            self._faults.emit()
        return answers

    def delete(self, records: Mapping[BlockKey, int], *, recycle: bool = False) -> bool:
        """Remove records the index no longer lists. One that would not go is listed (doubted) again.

        `recycle`: to make room for what is written next.
        """
        keys = list(records)
        tier = self.tier
        call = tier.recycle if recycle and isinstance(tier, Recycles) else tier.delete
        outcomes = self.outcomes(call, keys)
        with self._lock:
            kept = [
                (key, outcome)
                for key, outcome in zip(keys, outcomes, strict=True)
                if outcome.fate not in (Fate.OK, Fate.MISSING)
            ]
            for key, outcome in kept:
                self._count_failure("delete", outcome.reason)
                self.index.relist(key, records[key], time.monotonic())
            self.index.left(keys)
        return not kept

    def probe(self, keys: Sequence[BlockKey], guess_bytes: int) -> int:
        """Ask the tier for blocks the index does not know (others may write there): how many in a row.

        Found ones enter the index with a guessed size until they are read or scanned.
        """
        with self.gate.permit(wait=False) as permitted:
            if not permitted:
                return 0
            with self._lock:
                generation = self.index.generation
            there = self._ask(keys)
            with self._lock:
                now_s = time.monotonic()
                if any(there):
                    self.gate.breaker.answered(now_s)
                found = 0
                for key, seems_there in zip(keys, there, strict=False):
                    stale = generation != self.index.generation
                    if stale or not seems_there or not self.index.learn(key, guess_bytes, now_s):
                        break
                    found += 1
        return found

    def purge(self, tag: bytes | None, doomed: dict[BlockKey, int]) -> bool:
        """Delete every record of a barred scope, also those the index never saw; adds them to `doomed`.

        False when the tier did not let all of them be listed and deleted.
        """
        stored = self.listing(self.tier.scan, Stored)
        if stored is None:
            return False
        for one in stored:
            if tag is None or one.key.startswith(tag):
                doomed.setdefault(one.key, one.record_bytes)
        with self._lock:
            self.index.forget(doomed)
            self.index.leave(doomed)
        return not doomed or self.delete(doomed)

    def end_purge(self, tag: bytes | None) -> None:
        with self._lock:
            self.index.unbar(tag)

    def scan(self) -> None:
        """Learn what the tier already holds: oldest first, behind everything learned meanwhile."""
        with self._lock:
            generation = self.index.begin_scan()
        stored = self.listing(self._sharing.listed if self._sharing else self._some, Stored)
        if stored is None:
            return
        stored.sort(key=lambda one: one.used_s, reverse=True)
        for start in range(0, len(stored), _SCAN_BATCH):
            with self._lock:
                if self.gate.closed or generation != self.index.generation:
                    return
                now_s = time.monotonic()
                for one in stored[start : start + _SCAN_BATCH]:
                    self.index.learn_scanned(one, now_s)
        with self._lock:
            self.index.end_scan()
        self.trim()
        with self._lock:
            self.scanned = True

    def _some(self) -> Iterator[Stored]:
        """What the tier holds; of a place without a cap of ours no more than the index would keep."""
        return islice(self.tier.scan(), KEYS_MAX if self.options.cap_bytes is None else None)

    def trim(self) -> None:
        """Evict down to the cap, should the tier hold more than it."""
        with self._lock:
            evicted = self.index.make_room(0)
        if evicted:
            self.delete(self._unused(evicted))

    def keep_in_step(self) -> float | None:
        """Learn what others do in the place; after how many seconds to do so again, None if never."""
        return self._sharing.round() if self._sharing and not self.gate.closed else None

    def close(self, deadline_s: float, *, all_deleted: bool = True) -> None:
        """Call the tier no more and let it end; one that does not within the deadline is left behind."""
        with self._lock:
            self.gate.closed = True
        if not all_deleted:
            self._faults.note(
                f"{self.name}.undeleted",
                f"{self.name}: not all that was cleared or dropped could be deleted; it may be found again",
            )
            self._faults.emit()
        closer = threading.Thread(
            target=lambda: _answer(self._close_tier, bool, 1), name=f"tiercel-{self.name}-close", daemon=True
        )
        closer.start()
        closer.join(deadline_s)

    def _close_tier(self) -> list[bool]:
        self.tier.close()
        return [True]

    # Inner workings.

    def _read_went_well(self, key: BlockKey, stored_bytes: int) -> None:
        self.gate.breaker.succeeded()
        self.counters.read_blocks += 1
        self.counters.read_bytes += stored_bytes
        if self.has(key):
            # A probe could only guess the size. No move: recency is the chain's, see `touch`.
            self.index.enter(key, stored_bytes)

    def _read_failed(self, key: BlockKey, outcome: Outcome, reason: str) -> bool:
        """Count a bad read and stop believing the entry. True if the record is rotten and must go."""
        if outcome.fate is not Fate.FAILED:
            self.gate.breaker.answered(time.monotonic())
        if outcome.fate is Fate.MISSING:
            self.counters.missing += 1
            self.index.forget([key])
            return False
        if outcome.fate is Fate.FAILED:
            self._count_failure("read", reason)
            self.index.doubt(key, time.monotonic())
            return False
        self.counters.corrupt += 1
        self._faults.note(f"{self.name}.corrupt", f"{self.name}: a block came back wrong ({reason}); dropped")
        return True

    def _evict(self, sizes: Mapping[BlockKey, int], room: Room) -> bool:
        """Delete what must make room. False, with the reservation taken back, if it would not go."""
        if not room.evicted or self.delete(self._unused(room.evicted), recycle=True):
            return True
        with self._lock:
            self.counters.writes_dropped += len(sizes)
            self.index.unreserve(sizes, room, time.monotonic())
        return False

    def _unused(self, evicted: Mapping[BlockKey, Cell]) -> dict[BlockKey, int]:
        """Of blocks just evicted those to delete, with bytes: what others use in the place is spared."""
        if self._sharing is not None:
            return self._sharing.unused(evicted)
        return {key: cell.record_bytes for key, cell in evicted.items()}

    def _settle(
        self,
        keys: Sequence[BlockKey],
        chosen: Sequence[int],
        outcomes: Sequence[Outcome],
        sizes: Mapping[BlockKey, int],
        room: Room,
        gone: Callable[[int], bool],
        answers: list[bool],
    ) -> dict[BlockKey, int]:
        """Account for a finished write call. Returns what was cleared meanwhile and must be deleted again."""
        unwanted: dict[BlockKey, int] = {}
        for index, outcome in zip(chosen, outcomes, strict=True):
            key = keys[index]
            self.index.used_bytes -= sizes[key]
            # Also one that nobody wants any more tells how the tier fares.
            if outcome.fate is Fate.OK:
                self.gate.breaker.succeeded()
            else:
                self._write_failed(outcome)
            if gone(index):
                unwanted[key] = sizes[key]
                self.index.leave({key: sizes[key]})
            elif outcome.fate is Fate.OK:
                stored_bytes = outcome.stored_bytes or sizes[key]
                self.index.enter(key, stored_bytes)
                self.counters.written_blocks += 1
                self.counters.written_bytes += stored_bytes
                answers[index] = True
            elif key in room.replaced:
                self.index.relist(key, room.replaced[key], time.monotonic())
        return unwanted

    def _write_failed(self, outcome: Outcome) -> None:
        self.counters.writes_dropped += 1
        if outcome.fate is Fate.FULL:
            self.gate.breaker.answered(time.monotonic())
            self._pause(outcome.reason)
        else:
            self._count_failure("write", outcome.reason)

    def _check_room(self) -> None:
        """Now and then ask the place for its free room, and pause writing before it is used up."""
        if self.options.own_memory:
            return
        now_s = time.monotonic()
        with self._lock:
            if now_s - self._room_checked_s < _SPARE_CHECK_S:
                return
            if not (self._writes(now_s) and self.gate.available(now_s)):
                return
            self._room_checked_s = now_s
        with self.gate.timed():
            answer = _answer(lambda: [self.tier.usage()], Usage, 1)
        if isinstance(answer, str) or answer[0].free_bytes is None or answer[0].total_bytes is None:
            return
        spare_bytes = min(int(answer[0].total_bytes * _SPARE_SHARE), _SPARE_BYTES_MAX)
        if answer[0].free_bytes < spare_bytes:
            with self._lock:
                self._pause(
                    f"{answer[0].free_bytes} bytes are left there, fewer than the {spare_bytes} it spares"
                )

    def _pause(self, reason: str) -> None:
        self.counters.full += 1
        self._paused_until_s = time.monotonic() + _FULL_PAUSE_S
        self._faults.note(f"{self.name}.full", f"{self.name}: {reason}; writing pauses")

    def _count_failure(self, what: str, reason: str) -> None:
        self.counters.failed += 1
        if self.gate.breaker.failed(time.monotonic()):
            self.counters.breaker_opened += 1
        self._faults.note(f"{self.name}.{what}", f"{self.name}: {what} failed ({reason}); treated as a miss")

    # The one place where a tier is called: its exceptions and malformed answers end here.

    def outcomes(
        self, call: Callable[..., list[Outcome]], keys: Sequence[BlockKey], *args: object
    ) -> list[Outcome]:
        """What the tier says to a call about some keys."""
        if not keys:
            return []
        with self.gate.timed():
            answer = _answer(lambda: call(keys, *args), Outcome, len(keys))
        return answer if isinstance(answer, list) else [Outcome(Fate.FAILED, answer)] * len(keys)

    def _ask(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self.gate.timed():
            answer = _answer(lambda: self.tier.contains(keys), bool, len(keys))
        return answer if isinstance(answer, list) else self._failed_to("contains", answer, [])

    def listing(self, call: Callable[[], Iterable[T]], kind: type[T]) -> list[T] | None:
        """What the tier lists, which may take long; None if it could not."""
        answer = _answer(call, kind, None)
        return answer if isinstance(answer, list) else self._failed_to("scan", answer, None)

    def dates(
        self, call: Callable[[Sequence[BlockKey]], list[float | None]], keys: list[BlockKey]
    ) -> list[float | None]:
        """When the tier says that records were last used; None where it does not."""
        with self.gate.timed():
            answer = _answer(lambda: call(keys), object, len(keys))
        if not isinstance(answer, list):
            return self._failed_to("dates", answer, [None] * len(keys))
        return [one if isinstance(one, float) else None for one in answer]

    def _failed_to(self, what: str, reason: str, instead: T) -> T:
        with self._lock:
            self._count_failure(what, reason)
        self._faults.emit()
        return instead


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
