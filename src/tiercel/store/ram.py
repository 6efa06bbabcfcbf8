"""The RAM tier's index: which block lies in which arena slot, who holds it, and which one goes next.

Recency is prefix-aware by construction. Every touch of a chain dates its blocks `base - depth`, so a
parent is always younger than its children and plain least-recently-used order evicts leaves before
parents. A scope that has no more than its share keeps what it used of late (`policy.fairness`). Nothing held,
loading or being written is ever a victim. Knows no tier, thread or clock.

Locking: none here; the store's lock protects all of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from tiercel.blocks import TAG_BYTES, BlockKey
from tiercel.memory import Arena
from tiercel.store.figures import RAM
from tiercel.store.journal import Journal
from tiercel.store.policy.fairness import KEPT_TURNS, Shares

# What is of low priority is dated so many uses earlier as the place holds blocks, times this: among the
# coldest of its scope, and not so old that the scope would lose its share by it.
_SUNK_TURNS = KEPT_TURNS // 2


class State(Enum):
    """WRITING and LOADING hold unfinished bytes; only READY ones can be hit; GONE are on the way out."""

    WRITING = 1
    LOADING = 2
    READY = 3
    GONE = 4


class Entry:
    """One block in one slot. `holds` counts leases and transfers; the slot is free only after the last."""

    __slots__ = (
        "holds", "key", "low", "offered", "payload_bytes", "queued", "slot", "staged", "state", "tick",
        "turned_away",
    )  # fmt: skip

    def __init__(self, key: BlockKey, slot: int, state: State, tick: int, staged: bool) -> None:
        self.key = key
        self.slot = slot
        self.state = state
        self.tick = tick
        self.staged = staged
        self.holds = 1
        self.low = False
        # Which tiers (a bit each) were asked to take it; asking twice would keep an unwanted block for ever.
        self.offered = 0
        # Which tiers it waits to be written to, or is being written to.
        self.queued = 0
        # Which tiers had no budget for it; each counts it once.
        self.turned_away = 0
        self.payload_bytes = 0


class Ram:
    """Entries by key over an arena. `spare(entry)` may refuse a victim (a pin, an unwritten block)."""

    def __init__(self, arena: Arena, spare: Callable[[Entry], bool], journal: Journal) -> None:
        self.arena = arena
        self.evictions = 0
        self._spare = spare
        self._journal = journal
        self._entries: dict[BlockKey, Entry] = {}
        # A heap for each scope, by tag; ticks in it may be older than the entries' own.
        self._order: dict[bytes, list[tuple[int, int, Entry]]] = {}
        self._shares = Shares()
        self._serial = 0
        self._now = 0
        self._sunk = _SUNK_TURNS * arena.slots

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: BlockKey) -> Entry | None:
        return self._entries.get(key)

    def entries(self) -> list[Entry]:
        """All entries, in no order."""
        return list(self._entries.values())

    @property
    def scope_count(self) -> int:
        """How many scopes have blocks here."""
        return len(self._shares)

    def scopes(self, limit: int) -> list[tuple[bytes, int]]:
        """The tags of at most `limit` scopes, the latest used first, each with its blocks."""
        return self._shares.latest(limit)

    def touch(self, keys: Sequence[BlockKey], *, rises: bool = True, sunk: bool = False) -> int:
        """Date a chain as used now. Returns its base: block `d` of this use has the tick `base - d`.

        Blocks of low priority are like others from now on if the chain `rises`; else `sunk` dates them early.
        """
        self._now += len(keys) + 1
        for depth, key in enumerate(keys):
            entry = self._entries.get(key)
            if entry is None:
                continue
            if entry.low and rises:
                entry.low, entry.offered = False, 0
            early = self._sunk if sunk and entry.low else 0
            entry.tick = max(entry.tick, self._now - depth - early)
        if keys:
            self._shares.touch(keys[0][:TAG_BYTES])
        return self._now

    def sink(self, keys: Sequence[BlockKey], base: int) -> None:
        """A prompt of low priority is stored: its blocks not used since `base` are the first to go."""
        for depth, key in enumerate(keys):
            entry = self._entries.get(key)
            if entry is not None and entry.low and entry.tick == base - depth:
                entry.tick -= self._sunk
                self._push(entry)

    def insert(
        self, key: BlockKey, slot: int, state: State, tick: int, *, staged: bool = False, low: bool = False
    ) -> Entry:
        """Add an entry with one hold. Staged ones leave the index with it; `low` ones are for RAM alone."""
        assert key not in self._entries
        entry = Entry(key, slot, state, tick, staged)
        if low:
            entry.low, entry.offered = True, ~0
        self._entries[key] = entry
        if not staged:
            self._shares.add(key[:TAG_BYTES], 1)
            self._push(entry)
        return entry

    def make_ready(self, entry: Entry) -> None:
        """An entry's bytes are complete and verified: from now on it can be hit."""
        entry.state = State.READY
        if not entry.staged:
            self._journal.note(entry.key, RAM, stored=True)

    def take(self, fence: int, tag: bytes, *, own: bool = False) -> int | None:
        """A slot for keeping a block of scope `tag`, evicting one used before tick `fence` if need be.

        Blocks younger than the fence belong to the caller's own chain. With `own`, the leaf of that
        chain may go instead, once nobody holds it: a chain larger than RAM then passes through,
        keeping its head.
        """
        slot = self.arena.allocate()
        if slot is None and self._evict(fence, tag, own):
            slot = self.arena.allocate()
        return slot

    def remove(self, entry: Entry) -> None:
        """Take an entry out of the index at once; its slot is freed when nobody holds it."""
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            if not entry.staged:
                self._left(entry.key[:TAG_BYTES])
            if entry.state is State.READY and not entry.staged:
                self._journal.note(entry.key, RAM, stored=False)
        entry.state = State.GONE
        if entry.holds == 0:
            self._free(entry)

    def release(self, entry: Entry) -> None:
        """Drop one hold."""
        entry.holds -= 1
        assert entry.holds >= 0, "released more often than held"
        if entry.holds == 0 and (entry.staged or entry.state is State.GONE):
            self.remove(entry)

    def coldest(self, count: int) -> Iterable[Entry]:
        """The `count` READY entries that would go next, about in that order (for spilling ahead of need)."""
        ready = (entry for entry in self._entries.values() if entry.state is State.READY and not entry.staged)
        if len(self._order) < 2:
            return heapq.nsmallest(count, ready, key=lambda entry: entry.tick)
        late, room = self._late(), self.arena.slots - self.arena.reserved
        safe = {tag for tag in self._order if not self._shares.above(tag, room - room // 8, {})}
        return heapq.nsmallest(
            count,
            ready,
            key=lambda entry: (entry.tick > late and entry.key[:TAG_BYTES] in safe, entry.tick),
        )

    def _evict(self, fence: int, tag: bytes, own: bool) -> bool:
        losers = self._losers(fence, tag)
        # With nothing of others to be had, it replaces its own.
        if tag in self._order:
            losers.append((tag, fence))
        for at, (loser, until) in enumerate(losers, 1):
            victim = self._victim(loser, until, own=own and loser == tag and at == len(losers))
            if victim is not None:
                self.evictions += 1
                self.remove(victim)
                return True
        return False

    def _losers(self, fence: int, tag: bytes) -> list[tuple[bytes, int]]:
        """Scopes that may lose a block to scope `tag`, coldest block first, and up to which tick."""
        if len(self._order) < 2 and tag in self._order:
            return []
        late, room = self._late(), self.arena.slots - self.arena.reserved
        losers: list[tuple[int, bytes, int]] = []
        asking = {tag: 1}
        for one in self._shares.compared(asking):
            head = self._head(one)
            above = self._shares.above(one, room, asking)
            if above or head <= late:
                losers.append((head, one, fence if above else min(fence, late)))
        return [(one, until) for _, one, until in sorted(losers)]

    def _head(self, tag: bytes) -> int:
        """The tick of a scope's coldest entry."""
        order = self._order[tag]
        while order:
            tick, _, entry = order[0]
            if entry.state is State.GONE:
                heapq.heappop(order)
            elif entry.tick != tick:
                heapq.heapreplace(order, (entry.tick, self._next_serial(), entry))
            else:
                return tick
        return self._now

    def _late(self) -> int:
        """What was used since this tick was used of late."""
        return self._now - KEPT_TURNS * self.arena.slots

    def _victim(self, tag: bytes, fence: int, *, own: bool) -> Entry | None:
        """The coldest entry of a scope that may go."""
        order = self._order[tag]
        passed: list[Entry] = []
        victim: Entry | None = None
        while order:
            tick, _, entry = heapq.heappop(order)
            if entry.state is State.GONE:
                continue
            if entry.tick != tick:
                self._push(entry)
                continue
            mine = tick > fence
            free_to_go = entry.holds == 0 and entry.state is State.READY and not self._spare(entry)
            if free_to_go and (own or not mine):
                victim = entry
                break
            passed.append(entry)
            if mine:
                break
        for entry in passed:
            self._push(entry)
        return victim

    def _push(self, entry: Entry) -> None:
        tag = entry.key[:TAG_BYTES]
        order = self._order.setdefault(tag, [])
        heapq.heappush(order, (entry.tick, self._next_serial(), entry))
        # Entries that left without being evicted stay in the heap until popped, and those that sank are in it
        # twice: keep that bounded.
        if len(order) > 2 * self._shares.held(tag) + 64:
            there = dict.fromkeys(item[2] for item in order if item[2].state is not State.GONE)
            order[:] = [(one.tick, self._next_serial(), one) for one in there]
            heapq.heapify(order)

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def _left(self, tag: bytes) -> None:
        self._shares.add(tag, -1)
        if self._shares.held(tag) == 0:
            self._shares.forget(tag)
            del self._order[tag]

    def _free(self, entry: Entry) -> None:
        if entry.slot >= 0:
            self.arena.free(entry.slot)
            entry.slot = -1
