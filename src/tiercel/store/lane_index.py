"""What a tier holds, as far as we know: keys, bytes, recency, the cap, and what must not be believed.

Pure bookkeeping for one lane: no call to a tier, no clock of its own, no lock. The store's lock protects it.

In a place that others use too, what a record is listed with includes the date it carries there, to the
minute and as far as we know. So a use of ours is dated there once in a while only (`due`), and a younger date
found there is the use of another process.

A record may be *doubted*: it is there and takes room, but a read or write of it failed, so it is not offered
until a while has passed or it is written again. A scope may be *barred* while it is being purged: nothing of
it may come or be found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiercel.blocks import BlockKey
from tiercel.tiers import Stored

# Long enough that a bad spot on a disk costs a request a minute at most, short enough to get over an outage.
DOUBT_S = 60.0
# Without a cap of ours a place may hold any number of records: so many are known, those used last. Others are
# found by asking. About 260 MB of memory.
KEYS_MAX = 1_000_000
# Eviction frees a little more than asked, so that a full tier is not one delete per write.
_EVICT_AHEAD = 1 / 64
# A record in use is dated anew in a shared place once in so many minutes. Younger dates are others' uses.
_DATE_MIN = 5
_DUE_MAX = 1 << 14
# Pairs of size and date that records share in memory; more are forgotten, and then kept once per record.
_CELLS_MAX = 4096


class Cell(NamedTuple):
    """What a record is listed with: its bytes, and the minute (of the epoch) its date there shows."""

    record_bytes: int
    dated_min: int


@dataclass(frozen=True, slots=True)
class Room:
    """What left the index for a write: other blocks, and older records of the keys written (with bytes)."""

    evicted: dict[BlockKey, Cell]
    replaced: dict[BlockKey, int]


class LaneIndex:
    """Record bytes by key, least recently used first.

    `protected(key)` names what eviction must spare; `changed(key, stored)` is told of what comes and goes.
    """

    def __init__(
        self,
        cap_bytes: int | None,
        protected: Callable[[BlockKey], bool],
        changed: Callable[[BlockKey, bool], None] = lambda key, stored: None,
    ) -> None:
        self.cap_bytes = cap_bytes
        self.used_bytes = 0
        self.evicted_blocks = 0
        self.evict_ahead = _EVICT_AHEAD
        self.generation = 0
        self._protected = protected
        self._changed = changed
        self._known: OrderedDict[BlockKey, Cell] = OrderedDict()
        self._cells: dict[Cell, Cell] = {}
        # The minute now, set by whoever keeps a shared place in step; 0 where nobody does: no date matters.
        self.now_min = 0
        # Keys whose use is to be dated in the place, with how many blocks stand before each.
        self.due: dict[BlockKey, int] = {}
        self._doubted: dict[BlockKey, float] = {}
        self._barred: list[bytes | None] = []
        # Records that left the index and are being deleted: they take room until that is done.
        self._leaving: dict[BlockKey, int] = {}
        self._leaving_bytes = 0
        # Keys in a write call: the record may be there already, but only the end of the call decides.
        self._writing: set[BlockKey] = set()
        # Keys dropped while a scan runs: its listing may still name them.
        self._dropped_in_scan: set[BlockKey] | None = None
        self._entered_in_scan: set[BlockKey] = set()

    def __len__(self) -> int:
        return len(self._known)

    # What is there.

    def has(self, key: BlockKey, now_s: float) -> bool:
        """Whether the tier holds a block worth asking for."""
        return key in self._known and (not self._doubted or self._doubted.get(key, 0.0) <= now_s)

    def keys_of(self, tag: bytes | None) -> list[BlockKey]:
        """Every key of a scope, or of all scopes."""
        return [key for key in self._known if tag is None or key.startswith(tag)]

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Mark a chain as used now, leaf first, so that its parents are the younger ones."""
        for depth in range(len(keys) - 1, -1, -1):
            key = keys[depth]
            cell = self._known.get(key)
            if cell is None:
                continue
            self._known.move_to_end(key)
            # Either way: a date from a clock that ran ahead must not keep a record for good.
            if abs(self.now_min - cell.dated_min) > _DATE_MIN and self.now_min and len(self.due) < _DUE_MAX:
                self._known[key] = self._cell(cell.record_bytes, self.now_min)
                self.due[key] = depth

    def enter(self, key: BlockKey, record_bytes: int, dated_min: int | None = None) -> None:
        """List a record that is surely there, dated now unless `dated_min` says when."""
        old = self._known.get(key)
        if old is None:
            self._changed(key, True)
            if self._dropped_in_scan is not None:
                self._entered_in_scan.add(key)
        self.used_bytes += record_bytes - (old.record_bytes if old else 0)
        self._known[key] = self._cell(record_bytes, self.now_min if dated_min is None else dated_min)
        self._doubted.pop(key, None)
        self.left([key])
        if self.cap_bytes is None and len(self._known) > KEYS_MAX:
            self.forget([next(iter(self._known))])

    def forget(self, keys: Iterable[BlockKey]) -> dict[BlockKey, int]:
        """Drop keys from the index; returns those that were in it, with their bytes."""
        dropped: dict[BlockKey, int] = {}
        for key in keys:
            cell = self._known.pop(key, None)
            if cell is not None:
                dropped[key] = cell.record_bytes
                self._changed(key, False)
                self.used_bytes -= cell.record_bytes
                self._doubted.pop(key, None)
        if self._dropped_in_scan is not None:
            self._dropped_in_scan.update(dropped)
        return dropped

    def expel(self, keys: Iterable[BlockKey]) -> dict[BlockKey, int]:
        """Drop records that are about to be deleted; they count as room taken until `left`."""
        dropped = self.forget(keys)
        self.leave(dropped)
        return dropped

    def leave(self, records: Mapping[BlockKey, int]) -> None:
        """Count records outside the index as room taken until they are deleted."""
        for key, size in records.items():
            self._leaving_bytes += size - self._leaving.get(key, 0)
            self._leaving[key] = size

    def left(self, keys: Iterable[BlockKey]) -> None:
        """The deletion of these is over, or they are listed again."""
        if self._leaving:
            for key in keys:
                self._leaving_bytes -= self._leaving.pop(key, 0)

    def doubt(self, key: BlockKey, now_s: float) -> None:
        """Stop offering a listed record for a while."""
        if key in self._known:
            self._doubted[key] = now_s + DOUBT_S

    def relist(self, key: BlockKey, record_bytes: int, now_s: float) -> None:
        """List a dropped record that is probably still there: first to be evicted, and doubted."""
        if key not in self._known:
            self.enter(key, record_bytes)
            self.doubt(key, now_s)
            self._known.move_to_end(key, last=False)

    def learn(self, key: BlockKey, guess_bytes: int, now_s: float) -> bool:
        """Enter a block the tier says it has, unless we know better. Whether it may be asked for now."""
        if key in self._writing or self.barred(key):
            return False
        if key not in self._known:
            self.enter(key, guess_bytes)
        return self.has(key, now_s)

    # Scans and purges.

    def begin_scan(self) -> int:
        """Note that a listing is made now; returns the generation it belongs to."""
        self._dropped_in_scan = set()
        self._entered_in_scan = set()
        return self.generation

    def learn_scanned(self, one: Stored, now_s: float) -> None:
        """Enter a listed record, behind everything used since; corrects the size of one known by a probe."""
        if one.key in self._known:
            if self.has(one.key, now_s):
                self.enter(one.key, one.record_bytes, self._known[one.key].dated_min)
            return
        if self._learn_listed(one):
            self._known.move_to_end(one.key, last=False)

    def learn_news(self, one: Stored, now_s: float) -> None:
        """Enter a record that another process has just written, as if we had."""
        if one.key in self._known:
            self.learn_scanned(one, now_s)
        else:
            self._learn_listed(one)

    def lost(self, key: BlockKey) -> bool:
        """Whether a listed record that a listing does not name is gone, and was not just written by us."""
        return key in self._known and key not in self._entered_in_scan

    def end_scan(self) -> None:
        self._dropped_in_scan = None
        self._entered_in_scan = set()

    def _learn_listed(self, one: Stored) -> bool:
        dropped = self._dropped_in_scan is not None and one.key in self._dropped_in_scan
        if dropped or one.key in self._writing or self.barred(one.key):
            return False
        self.enter(one.key, one.record_bytes, int(one.used_s // 60))
        return True

    def bar(self, tag: bytes | None) -> dict[BlockKey, int]:
        """Find nothing of a scope until `unbar`, and make older listings stale. Returns its records."""
        self._barred.append(tag)
        self.generation += 1
        return self.expel(self.keys_of(tag))

    def unbar(self, tag: bytes | None) -> None:
        self._barred.remove(tag)

    def barred(self, key: BlockKey) -> bool:
        """Whether a block's scope is being purged."""
        return any(tag is None or key.startswith(tag) for tag in self._barred)

    @property
    def purging(self) -> bool:
        """Whether any scope is barred."""
        return bool(self._barred)

    # Writes and the cap.

    def may_write(self, key: BlockKey) -> bool:
        """Whether a write of this block may begin: nothing else is done to it, its scope is not barred."""
        return key not in self._writing and key not in self._leaving and not self.barred(key)

    def reserve(self, sizes: Mapping[BlockKey, int], now_s: float) -> Room | None:
        """Make room for records about to be written and count them as used. None if they cannot fit."""
        # A record that replaces one of its own key takes over that one's bytes.
        replaced = self.forget(sizes)
        need_bytes = sum(sizes.values())
        evicted = self.make_room(need_bytes)
        if evicted is None:
            for key, size in replaced.items():
                self.relist(key, size, now_s)
            return None
        self.used_bytes += need_bytes
        self._writing.update(sizes)
        return Room(evicted, replaced)

    def unreserve(self, sizes: Mapping[BlockKey, int], room: Room, now_s: float) -> None:
        """Take back a reservation whose write was never begun."""
        self.used_bytes -= sum(sizes.values())
        for key, size in room.replaced.items():
            self.relist(key, size, now_s)

    def written(self, keys: Iterable[BlockKey]) -> None:
        """The write call of these keys is over, whatever became of it."""
        self._writing.difference_update(keys)

    def make_room(self, need_bytes: int) -> dict[BlockKey, Cell] | None:
        """Drop the coldest records until `need_bytes` more fit the cap. Returns them; None if in vain."""
        if self.cap_bytes is None:
            return {}
        must_free = self.used_bytes + self._leaving_bytes + need_bytes - self.cap_bytes
        if must_free <= 0:
            return {}
        wanted = must_free + int(self.cap_bytes * self.evict_ahead)
        chosen: dict[BlockKey, Cell] = {}
        freed = 0
        for key, cell in self._known.items():
            if freed >= wanted:
                break
            if not self._protected(key):
                chosen[key] = cell
                freed += cell.record_bytes
        if freed < must_free:
            return None
        self.evicted_blocks += len(chosen)
        self.expel(chosen)
        return chosen

    def spare(self, evicted: Mapping[BlockKey, Cell], dates: Iterable[float | None]) -> list[BlockKey]:
        """Take back those just evicted that another process has used since, and say which.

        `dates` (seconds) is what they carry in the place now. One in the future, of a clock that is wrong,
        spares nothing.
        """
        spared: list[BlockKey] = []
        for (key, cell), date_s in zip(evicted.items(), dates, strict=True):
            date_min = int(date_s // 60) if date_s is not None else 0
            used = cell.dated_min + _DATE_MIN < date_min <= self.now_min + 1
            if used and key not in self._writing and not self.barred(key):
                self.enter(key, cell.record_bytes, date_min)
                spared.append(key)
        self.evicted_blocks -= len(spared)
        return spared

    def _cell(self, record_bytes: int, dated_min: int) -> Cell:
        if len(self._cells) >= _CELLS_MAX:
            self._cells.clear()
        cell = Cell(record_bytes, dated_min)
        return self._cells.setdefault(cell, cell)
