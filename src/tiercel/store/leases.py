"""The two ways an engine touches blocks: reading a prefix, and writing new blocks.

Both stream: a few blocks are handed out at a time and given back before the next, so a prefix far larger
than the arena passes through it. Neither raises for a fault of a tier; a lease simply ends early.
Leases belong to one thread. What they hold is given back on exit, whatever happened.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tiercel.blocks import TAG_BYTES, BlockKey, Chain, payload_of, seal
from tiercel.store.policy import Sight
from tiercel.store.ram import Entry, State

if TYPE_CHECKING:
    from tiercel.store.store import TieredStore

_WINDOW_BYTES = 64 << 20
_WINDOW_BLOCKS = (4, 64)
# Those who wait look up this often, for a tier that got stuck tells nobody.
_WAKE_S = 0.25


@dataclass(frozen=True, slots=True)
class LeasedBlock:
    """A verified block in an arena slot. `payload` must only be read, and only until it is given back."""

    index: int
    payload: memoryview
    source: str
    slot: int = -1


@dataclass(frozen=True, slots=True)
class NewBlock:
    """Room for a block in an arena slot. `payload` is the writer's until the next `take` or `commit`."""

    index: int
    payload: memoryview
    slot: int = -1


@dataclass(slots=True)
class _Wanted:
    source: str
    entry: Entry | None = None


class ReadLease:
    """Blocks `start`, `start + 1`, … of a chain, as far as they can be had before the deadline.

    Or, `backward`, from the chain's last block down to `start`.

    Blocks in RAM are held from the start; the others are loaded ahead of the reader, a bounded window at a
    time, each physically once however many leases want it.
    """

    def __init__(
        self, store: TieredStore, chain: Chain, deadline_s: float, start: int = 0, *, backward: bool = False
    ) -> None:
        self._store = store
        # Positions count in the order of reading: position p is block `first + step * p`.
        self._first, self._step = (len(chain) - 1, -1) if backward else (start, 1)
        self._keys = chain.keys[start:][::-1] if backward else chain.keys[start:]
        self._until_s = time.monotonic() + deadline_s
        slot_bytes = store.arena.slot_bytes
        self._window = max(_WINDOW_BLOCKS[0], min(_WINDOW_BLOCKS[1], _WINDOW_BYTES // slot_bytes))
        self._at = 0
        self._asked = 0
        self._open = True
        with store.lock:
            self._base = store.ram.touch(chain.keys)
            self._fence = self._base - len(chain) - 1
            store.family.note(chain.keys)
            store.scopes.note(chain)
            self._wanted = [_Wanted(source) for source in store.walk_locked(self._keys)]
            store.leases.add(self)
            found = len(chain) if backward else start + len(self._wanted)
            store.below.touch_locked(chain.keys[:found])
            for want, key in zip(self._wanted, self._keys, strict=False):
                entry = store.ram.get(key)
                if entry is not None and entry.state is State.READY:
                    entry.holds += 1
                    want.entry = entry
                else:
                    store.want_locked(key)
            self._pump_locked()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __iter__(self) -> Iterator[LeasedBlock]:
        while blocks := self.ready(1):
            try:
                yield blocks[0]
            finally:
                self.advance(1)

    def ready(self, limit: int) -> list[LeasedBlock]:
        """The next blocks in order, at most `limit`: waits for one, takes along those ready behind it.

        Asked again without `advance` it answers the same blocks, or more. Empty: there is no more.
        """
        store = self._store
        with store.lock:
            if not self._await_locked():
                return []
            blocks: list[LeasedBlock] = []
            for position in range(self._at, min(len(self._wanted), self._at + limit)):
                want = self._wanted[position]
                if want.entry is None or want.entry.state is not State.READY:
                    break
                payload = payload_of(store.arena.view(want.entry.slot), want.entry.payload_bytes)
                blocks.append(LeasedBlock(self._index(position), payload, want.source, want.entry.slot))
        return blocks

    def advance(self, count: int) -> None:
        """Give back the first `count` of the blocks that `ready` answered."""
        with self._store.lock:
            if not self._open:
                return
            for _ in range(count):
                self._drop_locked(self._at)
                self._at += 1
            self._store.lock.notify_all()

    def release(self) -> None:
        """Give everything back; loads under way go on and end up in RAM. Idempotent."""
        store = self._store
        with store.lock:
            if not self._open:
                return
            self._open = False
            store.leases.discard(self)
            for position in range(self._at, len(self._wanted)):
                self._drop_locked(position)
            store.lock.notify_all()

    def _await_locked(self) -> bool:
        """Wait until the next block is READY. False: it will not be, or not in time."""
        store = self._store
        while self._open and not store.closing:
            store.below.give_up_locked()
            self._pump_locked()
            if self._at >= len(self._wanted):
                return False
            want = self._wanted[self._at]
            if want.entry is not None and want.entry.state is State.READY:
                return True
            if want.entry is not None and want.entry.state is State.GONE:
                if not self._again_locked(self._at):
                    return False
                continue
            left_s = self._until_s - time.monotonic()
            if left_s <= 0 or store.below.stuck_locked(want.source):
                store.counters.loads_timed_out += 1
                return False
            store.lock.wait(min(left_s, _WAKE_S))
        return False

    def _again_locked(self, position: int) -> bool:
        """A load failed: the next tier that has the block gets its turn (the failed one forgot it)."""
        want = self._wanted[position]
        assert want.entry is not None
        self._store.ram.release(want.entry)
        want.entry = None
        self._store.want_locked(self._keys[position])
        self._asked = min(self._asked, position)
        return self._store.where_locked(self._keys[position]) is not None

    def _pump_locked(self) -> None:
        """Start loads ahead of the reader, as far as window and slots allow."""
        while self._asked < min(len(self._wanted), self._at + self._window):
            if self._wanted[self._asked].entry is None and not self._ask_locked(self._asked):
                return
            self._asked += 1

    def _ask_locked(self, position: int) -> bool:
        """Get hold of one block's entry. False: no slot now, or gone everywhere (the lease ends there)."""
        store, key, want = self._store, self._keys[position], self._wanted[position]
        entry = store.ram.get(key)
        if entry is None or entry.state is State.WRITING:
            lane = store.below.source_of_locked(key)
            if lane is None or entry is not None:
                self._cut_locked(position)
                return False
            entry = store.load_locked(key, lane, tick=self._base - self._index(position), fence=self._fence)
            if entry is None:
                return False
            want.source = lane.lane.name
        entry.holds += 1
        want.entry = entry
        store.unwant_locked(key)
        return True

    def _index(self, position: int) -> int:
        return self._first + self._step * position

    def _cut_locked(self, position: int) -> None:
        """End the lease before a block."""
        for at in range(position, len(self._wanted)):
            self._drop_locked(at)
        del self._wanted[position:]

    def _drop_locked(self, position: int) -> None:
        want = self._wanted[position]
        if want.entry is None:
            self._store.unwant_locked(self._keys[position])
        else:
            self._store.ram.release(want.entry)
            want.entry = None


class WriteLease:
    """Room for blocks `start..stop-1` of a chain that are not in RAM yet.

    Blocks are published (checksummed, visible, on their way to the tiers) when the next ones are asked for;
    `commit` publishes the last. Leaving without `commit` aborts those handed out last. When no slot comes
    free before the deadline the lease ends: what follows would be unreachable without its parent.
    """

    def __init__(
        self,
        store: TieredStore,
        chain: Chain,
        start: int,
        stop: int,
        payload_bytes: int,
        deadline_s: float,
        sight: Sight = Sight.NEW,
    ) -> None:
        self._store = store
        self._chain = chain
        self._next = start
        self._stop = stop
        self._payload_bytes = payload_bytes
        self._until_s = time.monotonic() + deadline_s
        self._out: list[tuple[int, Entry, memoryview]] = []
        self._low = sight is Sight.LOW
        self._cleared = False
        self._waited = False
        self._stored = 0
        self._open = True
        with store.lock:
            self._base = store.ram.touch(chain.keys, rises=not self._low)
            self._fence = self._base - len(chain) - 1
            # Room for the new blocks must not be made by evicting their own parents.
            store.below.touch_locked(chain.keys)
            store.family.note(chain.keys[max(0, start - 1) : stop])
            store.scopes.note(chain)
            store.leases.add(self)
            self._admit_locked(sight)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def __iter__(self) -> Iterator[NewBlock]:
        while blocks := self.take(1):
            yield blocks[0]

    def take(self, limit: int) -> list[NewBlock]:
        """Publish what was handed out before, then hand out at most `limit` blocks that are not there yet.

        Waits for the first slot only. Empty: nothing is left to store, or nothing can be.
        """
        self._publish()
        blocks: list[NewBlock] = []
        while self._next < self._stop and len(blocks) < limit:
            room = self._room(self._next, wait=not blocks)
            if room is not None:
                entry, record = room
                self._out.append((self._next, entry, record))
                blocks.append(NewBlock(self._next, payload_of(record, self._payload_bytes), entry.slot))
            elif not self._there(self._next):
                if not blocks:
                    self._give_up()
                break
            self._next += 1
        return blocks

    def clear_locked(self, tag: bytes | None) -> None:
        """A scope was cleared: if it is this lease's, it stores nothing more."""
        self._cleared |= tag is None or self._chain.root.startswith(tag)

    def drop_locked(self, doomed: frozenset[BlockKey]) -> None:
        """These blocks were dropped: if any was still to be stored here, nothing more is."""
        self._cleared |= not doomed.isdisjoint(self._chain.keys[self._next : self._stop])
        self._cleared |= any(entry.key in doomed for _, entry, _ in self._out)

    def commit(self) -> int:
        """Publish the blocks handed out last and end the lease. Returns how many blocks it published."""
        self._publish()
        self._close()
        return self._stored

    def abort(self) -> None:
        """Drop the blocks handed out last, if they were not committed, and end the lease. Idempotent."""
        dropped, self._out = self._out, []
        if dropped:
            with self._store.lock:
                for _, entry, _ in dropped:
                    self._store.counters.stores_aborted += 1
                    self._store.ram.remove(entry)
                    self._store.ram.release(entry)
                self._store.lock.notify_all()
        self._close()

    def _admit_locked(self, sight: Sight) -> None:
        """End before the first block that is not to be stored yet; remembers all of them as seen."""
        store, admission, keys = self._store, self._store.admission, self._chain.keys
        if admission is None:
            return
        # A block is of no use without its parent.
        orphan = sight is not Sight.SURE and self._next > 0 and not store.there_locked(keys[self._next - 1])
        end = self._next if orphan else self._stop
        for index in range(self._next, self._stop):
            there = store.there_locked(keys[index])
            if not admission.admits(keys[index], Sight.SURE if there else sight) and index < end:
                end = index
            # One that tries again was counted when it came by.
            store.counters.not_admitted += index >= end and not there and sight is not Sight.AGAIN
        self._stop = end

    def _room(self, index: int, *, wait: bool) -> tuple[Entry, memoryview] | None:
        """A WRITING entry and its slot for block `index`; None if it is there already or none came free."""
        store, key = self._store, self._chain.keys[index]
        with store.lock:
            pushed = not wait
            while self._open and not store.closing and not self._cleared and store.ram.get(key) is None:
                slot = store.ram.take(self._fence, key[:TAG_BYTES], own=True)
                if slot is not None:
                    entry = store.ram.insert(key, slot, State.WRITING, self._base - index, low=self._low)
                    # Taken under the lock: closing the arena leaves views that exist alone.
                    return entry, store.arena.view(slot)
                left_s = self._until_s - time.monotonic()
                if left_s <= 0 and not pushed and store.below.make_way_locked(self._fence):
                    pushed = True
                    continue
                if left_s <= 0 or not wait:
                    return None
                store.below.give_up_locked()
                self._wait_for_slot_locked(min(left_s, _WAKE_S))
        return None

    def _wait_for_slot_locked(self, longest_s: float) -> None:
        counters, began_s = self._store.counters, time.monotonic()
        self._store.lock.wait(longest_s)
        counters.slot_wait_s += time.monotonic() - began_s
        counters.slot_waits += not self._waited
        self._waited = True

    def _there(self, index: int) -> bool:
        """Whether a block need not be stored, for it is there or on its way."""
        with self._store.lock:
            return self._store.ram.get(self._chain.keys[index]) is not None

    def _give_up(self) -> None:
        with self._store.lock:
            self._store.counters.stores_skipped += self._stop - self._next
        self._next = self._stop

    def _publish(self) -> None:
        out, self._out = self._out, []
        if not out:
            return
        store = self._store
        for index, entry, record in out:
            entry.payload_bytes = self._payload_bytes
            seal(record, self._chain, index, self._payload_bytes, time.time_ns())
        with store.lock:
            for index, entry, _ in out:
                if entry.state is State.WRITING:
                    store.ram.make_ready(entry)
                    store.counters.stored += 1
                    self._stored += 1
                    if not entry.low:
                        store.write_down_locked(entry, self._chain.keys[: index + 1])
                store.ram.release(entry)
            store.lock.notify_all()

    def _close(self) -> None:
        if not self._open:
            return
        self._open = False
        with self._store.lock:
            self._store.leases.discard(self)
            if self._low:
                self._store.ram.sink(self._chain.keys, self._base)
