"""What a tier holds, as far as we know: keys, bytes, recency, the cap, and what must not be believed.

Pure bookkeeping for one lane: no call to a tier, no clock of its own, no lock. The store's lock protects it.
A scope that has no more than its share keeps what it used of late (`policy.fairness`).

In a place that others use too, what a record is listed with includes the date it carries there, to the
minute and as far as we know. So a use of ours is dated there once in a while only (`due`), and a younger date
found there is the use of another process.

A record may be *doubted*: it is there and takes room, but a read or write of it failed, so it is not offered
until a while has passed or it is written again. A scope may be *barred* while it is being purged: nothing of
it may come or be found.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiercel.blocks import TAG_BYTES, BlockKey
from tiercel.store.policy.fairness import KEPT_TURNS, Shares
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
# A scope that a scan finds, and that was not used for so long before others in the place were, has no share.
_LEFT_S = 24 * 3600.0
# When a record was used is known to a sixteenth of the time in which as many are used as there are.
_EPOCHS_A_TURN = 16
_LONG_AGO = -(1 << 60)
# Pairs of size and date that records share in memory; more are forgotten, and then kept once per record.
_CELLS_MAX = 4096


class Cell(NamedTuple):
    """What a record is listed with: its bytes, the minute (of the epoch) its date there shows, its last use.

    Uses are counted in epochs of our own. Many records share a cell.
    """

    record_bytes: int
    dated_min: int
    used: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """What left the index for a write: other blocks, and older records of the keys written (with bytes)."""

    evicted: dict[BlockKey, Cell]
    replaced: dict[BlockKey, int]


class LaneIndex:
    """Record bytes by key; of each scope, least recently used first.

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
        # By the scope's tag, then by key.
        self._known: dict[bytes, OrderedDict[BlockKey, Cell]] = {}
        self._count = 0
        self._shares = Shares()
        self._epoch = 0
        self._epoch_left = 1
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
        self._newest_s = 0.0

    def __len__(self) -> int:
        return self._count

    # What is there.

    def has(self, key: BlockKey, now_s: float) -> bool:
        """Whether the tier holds a block worth asking for."""
        known = self._known.get(key[:TAG_BYTES])
        return (
            known is not None and key in known and (not self._doubted or self._doubted.get(key, 0.0) <= now_s)
        )

    def bytes_of(self, key: BlockKey) -> int | None:
        """How large a record is, doubted ones too; None for one that is not listed."""
        cell = self._cell_of(key)
        return None if cell is None else cell.record_bytes

    @property
    def scope_count(self) -> int:
        """How many scopes have records here."""
        return len(self._known)

    def scopes(self, limit: int) -> list[tuple[bytes, int, int]]:
        """The tags of at most `limit` scopes, the latest used first, with their records and bytes."""
        latest = self._shares.latest(limit)
        return [(tag, len(self._known[tag]), held) for tag, held in latest if tag in self._known]

    def keys_of(self, tag: bytes | None) -> list[BlockKey]:
        """Every key of a scope, or of all scopes."""
        if tag is None:
            return [key for known in self._known.values() for key in known]
        return list(self._known.get(tag, ()))

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Mark a chain as used now, leaf first, so that its parents are the younger ones."""
        self._epoch_left -= len(keys)
        if self._epoch_left <= 0:
            self._epoch += 1
            self._epoch_left = max(1, self._count // _EPOCHS_A_TURN)
        known = self._known.get(keys[0][:TAG_BYTES]) if keys else None
        if known is None:
            return
        self._shares.touch(keys[0][:TAG_BYTES])
        fresh: dict[Cell, Cell] = {}
        for depth in range(len(keys) - 1, -1, -1):
            key = keys[depth]
            cell = known.get(key)
            if cell is None:
                continue
            known.move_to_end(key)
            if cell.used != self._epoch:
                if cell not in fresh:
                    fresh[cell] = self._cell(cell.record_bytes, cell.dated_min)
                cell = known[key] = fresh[cell]
            # Either way: a date from a clock that ran ahead must not keep a record for good.
            if abs(self.now_min - cell.dated_min) > _DATE_MIN and self.now_min and len(self.due) < _DUE_MAX:
                known[key] = self._cell(cell.record_bytes, self.now_min)
                self.due[key] = depth

    def enter(self, key: BlockKey, record_bytes: int, dated_min: int | None = None) -> None:
        """List a record that is surely there, dated now unless `dated_min` says when."""
        tag = key[:TAG_BYTES]
        known = self._known.setdefault(tag, OrderedDict())
        old = known.get(key)
        if old is None:
            self._count += 1
            self._changed(key, True)
            if self._dropped_in_scan is not None:
                self._entered_in_scan.add(key)
        more_bytes = record_bytes - (old.record_bytes if old else 0)
        self.used_bytes += more_bytes
        self._shares.add(tag, more_bytes)
        known[key] = self._cell(
            record_bytes, self.now_min if dated_min is None else dated_min, old.used if old else None
        )
        self._doubted.pop(key, None)
        self.left([key])
        if self.cap_bytes is None and self._count > KEYS_MAX:
            self.forget([next(iter(self._known[self._shares.compared({})[0]]))])

    def forget(self, keys: Iterable[BlockKey]) -> dict[BlockKey, int]:
        """Drop keys from the index; returns those that were in it, with their bytes."""
        dropped: dict[BlockKey, int] = {}
        for key in keys:
            tag = key[:TAG_BYTES]
            known = self._known.get(tag)
            cell = known.pop(key, None) if known is not None else None
            if cell is not None:
                dropped[key] = cell.record_bytes
                self._count -= 1
                self._changed(key, False)
                self.used_bytes -= cell.record_bytes
                self._shares.add(tag, -cell.record_bytes)
                self._doubted.pop(key, None)
                if not known:
                    self._shares.forget(tag)
                    del self._known[tag]
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
        if self._cell_of(key) is not None:
            self._doubted[key] = now_s + DOUBT_S

    def relist(self, key: BlockKey, record_bytes: int, now_s: float) -> None:
        """List a dropped record that is probably still there: first to be evicted, and doubted."""
        if self._cell_of(key) is None:
            self.enter(key, record_bytes)
            self.doubt(key, now_s)
            self._known[key[:TAG_BYTES]].move_to_end(key, last=False)

    def learn(self, key: BlockKey, guess_bytes: int, now_s: float) -> bool:
        """Enter a block the tier says it has, unless we know better. Whether it may be asked for now."""
        if key in self._writing or self.barred(key):
            return False
        if self._cell_of(key) is None:
            self.enter(key, guess_bytes)
        return self.has(key, now_s)

    # Scans and purges.

    def begin_scan(self) -> int:
        """Note that a listing is made now; returns the generation it belongs to."""
        self._dropped_in_scan = set()
        self._entered_in_scan = set()
        self._newest_s = 0.0
        return self.generation

    def learn_scanned(self, one: Stored, now_s: float) -> None:
        """Enter a listed record, behind everything used since; corrects the size of one known by a probe.

        Records come youngest first.
        """
        cell = self._cell_of(one.key)
        if cell is not None:
            if self.has(one.key, now_s):
                self.enter(one.key, one.record_bytes, cell.dated_min)
            return
        if self._learn_listed(one):
            known = self._known[one.key[:TAG_BYTES]]
            self._newest_s = max(self._newest_s, one.used_s)
            left = one.used_s < self._newest_s - _LEFT_S
            known[one.key] = self._cell(
                one.record_bytes, int(one.used_s // 60), _LONG_AGO if left else self._epoch - 1
            )
            known.move_to_end(one.key, last=False)

    def learn_news(self, one: Stored, now_s: float) -> None:
        """Enter a record that another process has just written, as if we had."""
        if self._cell_of(one.key) is not None:
            self.learn_scanned(one, now_s)
        else:
            self._learn_listed(one)

    def lost(self, key: BlockKey) -> bool:
        """Whether a listed record that a listing does not name is gone, and was not just written by us."""
        return self._cell_of(key) is not None and key not in self._entered_in_scan

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
        asking = Counter[bytes]()
        for key, size in sizes.items():
            asking[key[:TAG_BYTES]] += size
        evicted = self.make_room(need_bytes, asking)
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

    def make_room(
        self, need_bytes: int, asking: Mapping[bytes, int] | None = None
    ) -> dict[BlockKey, Cell] | None:
        """Drop the coldest records until `need_bytes` more fit the cap. Returns them; None if in vain.

        `asking` says which scopes (tags) need how many of these bytes.
        """
        if self.cap_bytes is None:
            return {}
        must_free = self.used_bytes + self._leaving_bytes + need_bytes - self.cap_bytes
        if must_free <= 0:
            return {}
        wanted = must_free + int(self.cap_bytes * self.evict_ahead)
        chosen: dict[BlockKey, Cell] = {}
        freed = 0
        for key, cell in self._going(asking or {}):
            if freed >= wanted:
                break
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
                self._shares.touch(key[:TAG_BYTES])
                spared.append(key)
        self.evicted_blocks -= len(spared)
        return spared

    def _going(self, asking: Mapping[bytes, int]) -> Iterator[tuple[BlockKey, Cell]]:
        """Records that may go, in the order in which they should: what was not used for longest."""
        late, room = self._epoch - KEPT_TURNS * _EPOCHS_A_TURN, self.cap_bytes or 0
        tags = self._shares.compared(asking)
        lost = Counter[bytes]()
        heads: list[tuple[int, int, int]] = []
        records = [self._unprotected(tag) for tag in tags]
        found = [next(one, None) for one in records]
        for at, one in enumerate(found):
            if one is not None:
                heapq.heappush(heads, (one[1].used, one[1].dated_min, at))
        own: list[int] = []
        while heads:
            used, _, at = heads[0]
            tag, one = tags[at], found[at]
            assert one is not None
            if used > late and not self._shares.above(tag, room, asking, lost[tag]) and len(tags) > 1:
                heapq.heappop(heads)
                own += [at] if tag in asking or not asking else []
                continue
            yield one
            lost[tag] += one[1].record_bytes
            found[at] = following = next(records[at], None)
            if following is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (following[1].used, following[1].dated_min, at))
        # With nothing of others to be had, who asks replaces his own.
        for at in own:
            yield from (one for one in (found[at],) if one is not None)
            yield from records[at]

    def _unprotected(self, tag: bytes) -> Iterator[tuple[BlockKey, Cell]]:
        return (one for one in self._known[tag].items() if not self._protected(one[0]))

    def _cell_of(self, key: BlockKey) -> Cell | None:
        known = self._known.get(key[:TAG_BYTES])
        return known.get(key) if known is not None else None

    def _cell(self, record_bytes: int, dated_min: int, used: int | None = None) -> Cell:
        if len(self._cells) >= _CELLS_MAX:
            self._cells.clear()
        cell = Cell(record_bytes, dated_min, self._epoch if used is None else used)
        return self._cells.setdefault(cell, cell)
