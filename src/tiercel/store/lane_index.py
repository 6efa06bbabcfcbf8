"""What a tier holds, as far as we know: keys, bytes, recency, the cap, and what must not be believed.

Pure bookkeeping for one lane: no call to a tier, no clock of its own, no lock. The store's lock protects it.

A record may be *doubted*: it is there and takes room, but a read or write of it failed, so it is not offered
until a while has passed or it is written again. A scope may be *barred* while it is being purged: nothing of
it may come or be found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tiercel.blocks import BlockKey
from tiercel.tiers import Stored

# Long enough that a bad spot on a disk costs a request a minute at most, short enough to get over an outage.
DOUBT_S = 60.0
# Eviction frees a little more than asked, so that a full tier is not one delete per write.
_EVICT_AHEAD = 1 / 64


@dataclass(frozen=True, slots=True)
class Room:
    """What left the index for a write, with bytes: other blocks, and older records of the keys written."""

    evicted: dict[BlockKey, int]
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
        self.generation = 0
        self._protected = protected
        self._changed = changed
        self._known: OrderedDict[BlockKey, int] = OrderedDict()
        self._doubted: dict[BlockKey, float] = {}
        self._barred: list[bytes | None] = []
        # Keys in a write call: the record may be there already, but only the end of the call decides.
        self._writing: set[BlockKey] = set()
        # Keys dropped while a scan runs: its listing may still name them.
        self._dropped_in_scan: set[BlockKey] | None = None

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
        for key in reversed(keys):
            if key in self._known:
                self._known.move_to_end(key)

    def enter(self, key: BlockKey, record_bytes: int) -> None:
        """List a record that is surely there."""
        if key not in self._known:
            self._changed(key, True)
        self.used_bytes += record_bytes - self._known.get(key, 0)
        self._known[key] = record_bytes
        self._doubted.pop(key, None)

    def forget(self, keys: Iterable[BlockKey]) -> dict[BlockKey, int]:
        """Drop keys from the index; returns those that were in it, with their bytes."""
        dropped: dict[BlockKey, int] = {}
        for key in keys:
            size = self._known.pop(key, None)
            if size is not None:
                dropped[key] = size
                self._changed(key, False)
                self.used_bytes -= size
                self._doubted.pop(key, None)
        if self._dropped_in_scan is not None:
            self._dropped_in_scan.update(dropped)
        return dropped

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
        return self.generation

    def learn_scanned(self, one: Stored, now_s: float) -> None:
        """Enter a listed record, behind everything used since; corrects the size of one known by a probe."""
        if one.key in self._known:
            if self.has(one.key, now_s):
                self.enter(one.key, one.record_bytes)
            return
        dropped = self._dropped_in_scan is not None and one.key in self._dropped_in_scan
        if not dropped and self.learn(one.key, one.record_bytes, now_s):
            self._known.move_to_end(one.key, last=False)

    def end_scan(self) -> None:
        self._dropped_in_scan = None

    def bar(self, tag: bytes | None) -> dict[BlockKey, int]:
        """Find nothing of a scope until `unbar`, and make older listings stale. Returns its records."""
        self._barred.append(tag)
        self.generation += 1
        return self.forget(self.keys_of(tag))

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
        """Whether a write of this block may begin: no other is under way, its scope is not barred."""
        return key not in self._writing and not self.barred(key)

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

    def make_room(self, need_bytes: int) -> dict[BlockKey, int] | None:
        """Drop the coldest records until `need_bytes` more fit the cap. Returns them; None if in vain."""
        if self.cap_bytes is None or self.used_bytes + need_bytes <= self.cap_bytes:
            return {}
        must_free = self.used_bytes + need_bytes - self.cap_bytes
        wanted = must_free + int(self.cap_bytes * _EVICT_AHEAD)
        chosen: list[BlockKey] = []
        freed = 0
        for key, size in self._known.items():
            if freed >= wanted:
                break
            if not self._protected(key):
                chosen.append(key)
                freed += size
        if freed < must_free:
            return None
        self.evicted_blocks += len(chosen)
        return self.forget(chosen)
