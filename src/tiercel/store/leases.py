"""The two ways an engine touches blocks: reading a prefix block by block, and writing new blocks.

Both stream: one block is handed out at a time and given back when the next is asked for, so a prefix far
larger than the arena passes through it. Neither raises for a fault of a tier; a lease simply ends early.
Leases belong to one thread. What they hold is given back on exit, whatever happened.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tiercel.blocks import Chain, payload_of, seal
from tiercel.store.ram import Entry, State

if TYPE_CHECKING:
    from tiercel.store.store import TieredStore

_WINDOW_BYTES = 64 << 20
_WINDOW_BLOCKS = (4, 64)
# Those who wait look up this often, for a tier that got stuck tells nobody.
_WAKE_S = 0.25


@dataclass(frozen=True, slots=True)
class LeasedBlock:
    """A verified block. `payload` must only be read, and only until the next one is asked for."""

    index: int
    payload: memoryview
    source: str


@dataclass(frozen=True, slots=True)
class NewBlock:
    """Room for a block. `payload` is the writer's until the next one is asked for or `commit`."""

    index: int
    payload: memoryview


@dataclass(slots=True)
class _Wanted:
    source: str
    entry: Entry | None = None


class ReadLease:
    """Blocks 0, 1, 2, … of a chain, as far as they can be had before the deadline.

    Blocks in RAM are held from the start; the others are loaded ahead of the reader, a bounded window at a
    time, each physically once however many leases want it.
    """

    def __init__(self, store: TieredStore, chain: Chain, deadline_s: float) -> None:
        self._store = store
        self._chain = chain
        self._until_s = time.monotonic() + deadline_s
        slot_bytes = store.arena.slot_bytes
        self._window = max(_WINDOW_BLOCKS[0], min(_WINDOW_BLOCKS[1], _WINDOW_BYTES // slot_bytes))
        self._at = 0
        self._asked = 0
        self._open = True
        with store.lock:
            self._base = store.ram.touch(chain.keys)
            self._wanted = [_Wanted(source) for source in store.walk_locked(chain.keys)]
            store.leases.add(self)
            store.touch_tiers_locked(chain.keys[: len(self._wanted)])
            for want, key in zip(self._wanted, chain.keys, strict=False):
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
        while self._at < len(self._wanted):
            payload = self._await(self._at)
            if payload is None:
                return
            try:
                yield LeasedBlock(self._at, payload, self._wanted[self._at].source)
            finally:
                self._advance()

    def release(self) -> None:
        """Give everything back; loads under way go on and end up in RAM. Idempotent."""
        store = self._store
        with store.lock:
            if not self._open:
                return
            self._open = False
            store.leases.discard(self)
            for index in range(self._at, len(self._wanted)):
                self._drop_locked(index)
            store.lock.notify_all()

    def _advance(self) -> None:
        with self._store.lock:
            if self._open:
                self._drop_locked(self._at)
                self._at += 1
                self._store.lock.notify_all()

    def _await(self, index: int) -> memoryview | None:
        store = self._store
        with store.lock:
            while self._open and not store.closing:
                store.give_up_locked()
                self._pump_locked()
                if index >= len(self._wanted):
                    return None
                entry = self._wanted[index].entry
                if entry is not None and entry.state is State.READY:
                    return payload_of(store.arena.view(entry.slot), entry.payload_bytes)
                if entry is not None and entry.state is State.GONE:
                    if not self._again_locked(index):
                        return None
                    continue
                left_s = self._until_s - time.monotonic()
                if left_s <= 0 or store.stuck_locked(self._wanted[index].source):
                    store.counters.loads_timed_out += 1
                    return None
                store.lock.wait(min(left_s, _WAKE_S))
        return None

    def _again_locked(self, index: int) -> bool:
        """A load failed: the next tier that has the block gets its turn (the failed one forgot it)."""
        want = self._wanted[index]
        assert want.entry is not None
        self._store.ram.release(want.entry)
        want.entry = None
        self._store.want_locked(self._chain.keys[index])
        self._asked = min(self._asked, index)
        return self._store.where_locked(self._chain.keys[index]) is not None

    def _pump_locked(self) -> None:
        """Start loads ahead of the reader, as far as window and slots allow."""
        while self._asked < min(len(self._wanted), self._at + self._window):
            if self._wanted[self._asked].entry is None and not self._ask_locked(self._asked):
                return
            self._asked += 1

    def _ask_locked(self, index: int) -> bool:
        """Get hold of one block's entry. False: no slot now, or gone everywhere (the lease ends there)."""
        store, key, want = self._store, self._chain.keys[index], self._wanted[index]
        entry = store.ram.get(key)
        if entry is None or entry.state is State.WRITING:
            lane = store.lane_of_locked(key)
            if lane is None or entry is not None:
                self._cut_locked(index)
                return False
            tick = self._base - index
            entry = store.load_locked(key, lane, tick=tick, fence=self._base - len(self._chain) - 1)
            if entry is None:
                return False
            want.source = lane.lane.name
        entry.holds += 1
        want.entry = entry
        store.unwant_locked(key)
        return True

    def _cut_locked(self, index: int) -> None:
        """End the lease before block `index`."""
        for at in range(index, len(self._wanted)):
            self._drop_locked(at)
        del self._wanted[index:]

    def _drop_locked(self, index: int) -> None:
        want = self._wanted[index]
        if want.entry is None:
            self._store.unwant_locked(self._chain.keys[index])
        else:
            self._store.ram.release(want.entry)
            want.entry = None


class WriteLease:
    """Room for blocks `start..stop-1` of a chain that are not in RAM yet.

    A block is published (checksummed, visible, on its way to the tiers) when the next one is asked for;
    `commit` publishes the last. Leaving without `commit` aborts the block handed out last. When no slot
    comes free before the deadline the lease ends: what follows would be unreachable without its parent.
    """

    def __init__(
        self, store: TieredStore, chain: Chain, start: int, stop: int, payload_bytes: int, deadline_s: float
    ) -> None:
        self._store = store
        self._chain = chain
        self._start = start
        self._stop = stop
        self._payload_bytes = payload_bytes
        self._until_s = time.monotonic() + deadline_s
        self._current: tuple[int, Entry, memoryview] | None = None
        self._cleared = False
        self._stored = 0
        self._open = True
        with store.lock:
            self._base = store.ram.touch(chain.keys)
            self._fence = self._base - len(chain) - 1
            # Room for the new blocks must not be made by evicting their own parents.
            store.touch_tiers_locked(chain.keys)
            store.leases.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def __iter__(self) -> Iterator[NewBlock]:
        for index in range(self._start, self._stop):
            self._publish()
            room = self._room(index)
            if room is None:
                if self._skip(index):
                    continue
                return
            entry, record = room
            self._current = (index, entry, record)
            yield NewBlock(index, payload_of(record, self._payload_bytes))

    def clear_locked(self, tag: bytes | None) -> None:
        """A scope was cleared: if it is this lease's, it stores nothing more."""
        self._cleared |= tag is None or self._chain.root.startswith(tag)

    def commit(self) -> int:
        """Publish the block handed out last and end the lease. Returns how many blocks it published."""
        self._publish()
        self._close()
        return self._stored

    def abort(self) -> None:
        """Drop the block handed out last, if it was not committed, and end the lease. Idempotent."""
        if self._current is not None:
            _, entry, _ = self._current
            self._current = None
            with self._store.lock:
                self._store.counters.stores_aborted += 1
                self._store.ram.remove(entry)
                self._store.ram.release(entry)
                self._store.lock.notify_all()
        self._close()

    def _room(self, index: int) -> tuple[Entry, memoryview] | None:
        """A WRITING entry and its slot for block `index`; None if it is there already or none came free."""
        store, key = self._store, self._chain.keys[index]
        with store.lock:
            while self._open and not store.closing and not self._cleared and store.ram.get(key) is None:
                slot = store.ram.take(self._fence, own=True)
                if slot is not None:
                    entry = store.ram.insert(key, slot, State.WRITING, self._base - index)
                    # Taken under the lock: closing the arena leaves views that exist alone.
                    return entry, store.arena.view(slot)
                left_s = self._until_s - time.monotonic()
                if left_s <= 0:
                    return None
                store.give_up_locked()
                store.lock.wait(min(left_s, _WAKE_S))
        return None

    def _skip(self, index: int) -> bool:
        """Whether the lease may go on after not storing block `index`: yes if the block is there anyway."""
        store = self._store
        with store.lock:
            if store.ram.get(self._chain.keys[index]) is not None:
                return True
            store.counters.stores_skipped += self._stop - index
        return False

    def _publish(self) -> None:
        if self._current is None:
            return
        index, entry, record = self._current
        self._current = None
        store = self._store
        entry.payload_bytes = self._payload_bytes
        seal(record, self._chain, index, self._payload_bytes, time.time_ns())
        with store.lock:
            if entry.state is State.WRITING:
                entry.state = State.READY
                store.counters.stored += 1
                self._stored += 1
                store.write_down_locked(entry, self._chain.keys[: index + 1])
            store.ram.release(entry)
            store.lock.notify_all()

    def _close(self) -> None:
        if not self._open:
            return
        self._open = False
        with self._store.lock:
            self._store.leases.discard(self)
