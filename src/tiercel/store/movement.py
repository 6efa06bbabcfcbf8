"""Blocks on the move between arena and tiers: every load up and every write down runs through here.

Single flight by construction: a block being loaded is one LOADING entry, and whoever wants it holds that.
A transfer holds its slot until the tier's call returns, however long that takes; a deadline ends only the
wait of those who hold a lease.

Locking: methods named `*_locked` are called under the store's lock; the rest take it themselves and call
tiers without it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from itertools import compress
from operator import not_

from tiercel.blocks import BlockKey, Header, record_bytes
from tiercel.store.deletions import Deletions, until_it_works
from tiercel.store.figures import StoreCounters
from tiercel.store.lane import Lane
from tiercel.store.options import WriteMode
from tiercel.store.policy import WriteBudget
from tiercel.store.ram import Entry, Ram, State
from tiercel.store.workers import Workers

_BATCH_BYTES = 8 << 20
# One probe asks for at most so many blocks: a long prefix is found in a few doubling steps.
_PROBE_BLOCKS_MAX = 256
_PROBE_QUEUE = 64
# Blocks waiting to be written hold their slots: they may hold at most this share of them.
_WAITING_SHARE = 0.5
# A batch of stores gives way to waiting loads for so long: at least 80 MB/s are written under any load.
_LOADS_FIRST_S = 0.1


class Traffic:
    """The transfers of one lane: its worker threads and the queue of blocks waiting to be written."""

    def __init__(
        self, lane: Lane, ram: Ram, lock: threading.Condition, counters: StoreCounters, number: int
    ) -> None:
        self.lane = lane
        self._bit = 1 << number
        self._ram = ram
        self._lock = lock
        self._counters = counters
        options = lane.options
        self._batch_blocks = max(1, _BATCH_BYTES // ram.arena.slot_bytes)
        self._readers = Workers(f"{lane.name}-read", options.read_workers, options.read_queue)
        self._writers = Workers(f"{lane.name}-write", options.write_workers, options.write_queue)
        # Probes have a thread of their own: a lookup must not queue behind megabytes of reads.
        self._probers = Workers(f"{lane.name}-probe", 1, _PROBE_QUEUE)
        self._waiting_max = max(1, min(options.write_queue, int(ram.arena.slots * _WAITING_SHARE)))
        self._closing = threading.Event()
        self.deletions = Deletions(lane, lock, self._closing)
        self._up: deque[Entry] = deque()
        # Each block with its chain up to it, as far as known.
        self._down: deque[tuple[Entry, Sequence[BlockKey]]] = deque()
        self._write_tasks = 0
        day_bytes = options.write_per_day_bytes
        self._budget = None if day_bytes is None else WriteBudget(day_bytes, time.monotonic())

    # Up.

    def load_locked(self, entry: Entry) -> bool:
        """Queue the loading of a LOADING entry; it keeps one hold until it is done. False: queue full."""
        accepted = self._readers.submit(self._load_next)
        if accepted:
            self._up.append(entry)
        else:
            self.lane.counters.reads_refused += 1
        return accepted

    @property
    def queued_reads(self) -> int:
        """Blocks that wait to be loaded."""
        return len(self._up)

    def give_up_locked(self, now_s: float) -> None:
        """Drop what waits for a tier that is down or stuck: it would only keep slots from use."""
        if (self._up or self._down) and self.lane.gate.hopeless(now_s):
            self._drop_waiting_locked()

    def _drop_waiting_locked(self) -> None:
        for entry in self._up:
            self._settle_locked(entry, None)
        self._up.clear()
        for entry, _ in self._down:
            entry.offered &= ~self._bit
        self._drop_locked(self._down)
        self._down.clear()

    def _drop_locked(self, items: Collection[tuple[Entry, Sequence[BlockKey]]]) -> None:
        """Let go of blocks that waited to be written."""
        for entry, _ in items:
            self._refund_locked(entry)
            self._left_locked(entry)
        self.lane.counters.writes_dropped += len(items)
        self._lock.notify_all()

    def probe(self, keys: Sequence[BlockKey], deadline_s: float) -> int:
        """How many of `keys`, in a row, the tier holds without the index knowing; asks on a reader thread."""
        found = 0
        step = 1
        until_s = time.monotonic() + deadline_s
        while found < len(keys):
            asked = keys[found : found + step]
            more = self._probe_once(asked, until_s - time.monotonic())
            found += more
            if more < len(asked):
                break
            step = min(step * 2, _PROBE_BLOCKS_MAX)
        return found

    def _probe_once(self, keys: Sequence[BlockKey], wait_s: float) -> int:
        answer: list[int] = []
        done = threading.Event()

        def ask() -> None:
            answer.append(self.lane.probe(keys, self._ram.arena.slot_bytes))
            done.set()

        if wait_s <= 0 or not self._probers.submit(ask) or not done.wait(wait_s):
            return 0
        return answer[0]

    def _load_next(self) -> None:
        """Runs on a reader thread: loads what waits longest, unless it was given up."""
        with self._lock:
            if not self._up:
                return
            entry = self._up.popleft()
            record = self._ram.arena.view(entry.slot)
        header = self.lane.read([entry.key], [record])[0]
        with self._lock:
            self._settle_locked(entry, header)
            self._lock.notify_all()

    def _settle_locked(self, entry: Entry, header: Header | None) -> None:
        """A staged or kept entry becomes READY, or GONE if no byte may be trusted."""
        if header is None:
            self._counters.loads_failed += 1
            self._ram.remove(entry)
        elif entry.state is State.LOADING:
            entry.payload_bytes = header.payload_bytes
            self.has_locked(entry)
            self._ram.make_ready(entry)
            self._counters.loaded[self.lane.name] = self._counters.loaded.get(self.lane.name, 0) + 1
        self._ram.release(entry)

    # Down.

    def write_locked(self, entry: Entry, chain: Sequence[BlockKey] = ()) -> bool:
        """Queue a READY entry to be written; holds its slot meanwhile. False: not taken (see `spill_locked`).

        `chain` is the chain that ends with the entry, so that the tier dates parents younger than children.
        """
        if not self._takes_locked(entry):
            self.lane.counters.writes_dropped += 1
            return False
        if not (self.lane.index.may_write(entry.key) and self._affords_locked(entry, chain)):
            return False
        self._mend_locked(entry, chain)
        return self._queue_locked(entry, chain)

    def _mend_locked(self, entry: Entry, chain: Sequence[BlockKey]) -> None:
        """Queue again what the tier evicted of a chain and RAM kept: without it the entry is of no use there.

        All of it or nothing: if RAM has all up to a block that the tier has, the queue has room, the budget
        affords it, and the tier can hold the whole chain.
        """
        cap_bytes, size = self.lane.options.cap_bytes, record_bytes(entry.payload_bytes)
        if cap_bytes is not None and len(chain) * size > cap_bytes:
            return
        lost: list[tuple[Entry, Sequence[BlockKey]]] = []
        room = self._waiting_max - self.lane.pending_writes - 1
        for at in range(len(chain) - 2, -1, -1):
            key, parent = chain[at], self._ram.get(chain[at])
            waits = parent is not None and parent.queued & self._bit
            if waits or self.lane.index.bytes_of(key) is not None:
                break
            ready = parent is not None and parent.state is State.READY and self.lane.index.may_write(key)
            if parent is None or not ready or len(lost) >= room:
                return
            lost.append((parent, chain[: at + 1]))
        more_bytes = (len(lost) + 1) * size
        if lost and self._budget is not None and not self._budget.affords(more_bytes, time.monotonic()):
            return
        for parent, its_chain in reversed(lost):
            self._queue_locked(parent, its_chain)

    def has_locked(self, entry: Entry) -> None:
        """The tier has a block that has come to RAM; it is not to be written back should the tier evict it.

        It was the tier's coldest then: writing it back would push out others, its own parents first.
        """
        entry.offered |= self._bit

    def spill_locked(self, entry: Entry) -> bool:
        """See to it that a READY entry gets written, if it was not. True: RAM must keep it until it is.

        While the queue is full but moving that is so too: better no new block than a hole on disk. And while
        an earlier record of the same name is still being written or deleted, which soon ends.
        """
        if entry.offered & self._bit or self.lane.has(entry.key) or not self._takes_locked(entry):
            return False
        if not self.lane.index.may_write(entry.key):
            return True
        if not self._affords_locked(entry, ()):
            return False
        self._queue_locked(entry, ())
        return True

    def make_way_locked(self, fence: int) -> bool:
        """With a full queue, drop the oldest stores, so that RAM may evict them. True if any was dropped.

        That is the block that waits longest with all that follow it in a chain (without it they are of no
        use), else the coldest that could not even wait. Blocks younger than the tick `fence` are spared: they
        belong to the chain that needs the room.
        """
        if self.lane.pending_writes < self._waiting_max:
            return False
        first = next((item for item in self._down if item[0].tick <= fence), None)
        if first is None:
            owed = [entry for entry in self._ram.coldest(self._batch_blocks) if self.owes_locked(entry)]
            dropped = [entry for entry in owed if entry.tick <= fence and entry.holds == 0]
            for entry in dropped:
                entry.offered |= self._bit
            self.lane.counters.writes_dropped += len(dropped)
            return bool(dropped)
        depth, key = len(first[1]), first[0].key
        follows = [item is first or (depth > 0 and key in item[1][depth - 1 : depth]) for item in self._down]
        self._drop_locked(list(compress(self._down, follows)))
        self._down = deque(compress(self._down, map(not_, follows)))
        return True

    def owes_locked(self, entry: Entry) -> bool:
        """Whether the tier should have a block but was never asked to take it."""
        return (
            self.lane.options.write is not WriteMode.OFF
            and not entry.offered & self._bit
            and not self.lane.has(entry.key)
        )

    def _takes_locked(self, entry: Entry) -> bool:
        now_s = time.monotonic()
        self.give_up_locked(now_s)
        return self.lane.takes(now_s) and not self.lane.index.barred(entry.key)

    def _affords_locked(self, entry: Entry, chain: Sequence[BlockKey]) -> bool:
        """Whether the day's budget has room for a block; counts it once if not."""
        if self._budget is None:
            return True
        if self._budget.affords(record_bytes(entry.payload_bytes), time.monotonic()):
            parent = self._ram.get(chain[-2]) if len(chain) > 1 else None
            # Without its parent, which was turned away, it would be of no use there.
            if parent is None or not parent.turned_away & self._bit or self.lane.has(parent.key):
                return True
        if not entry.turned_away & self._bit:
            entry.turned_away |= self._bit
            self.lane.counters.over_budget += 1
        return False

    def _refund_locked(self, entry: Entry) -> None:
        if self._budget is not None:
            self._budget.give_back(record_bytes(entry.payload_bytes))

    def _queue_locked(self, entry: Entry, chain: Sequence[BlockKey]) -> bool:
        if self.lane.pending_writes >= self._waiting_max:
            return False
        # Tasks whose blocks were dropped are still on their way, and as good as new ones.
        if self._write_tasks <= len(self._down):
            if not self._writers.submit(self._write_some):
                return False
            self._write_tasks += 1
        if self._budget is not None:
            self._budget.spend(record_bytes(entry.payload_bytes))
        entry.offered |= self._bit
        entry.turned_away &= ~self._bit
        entry.queued |= self._bit
        entry.holds += 1
        self._down.append((entry, chain))
        self.lane.pending_writes += 1
        return True

    def _left_locked(self, entry: Entry) -> None:
        """A block waits no more and is not being written."""
        entry.queued &= ~self._bit
        self._ram.release(entry)
        self.lane.pending_writes -= 1

    def _write_some(self) -> None:
        """Runs on a writer thread: takes a batch off the queue, unless an earlier call already took it."""
        with self._lock:
            self._write_tasks -= 1
            # Somebody waits for a load, nobody for a store; but stores must not wait for ever.
            until_s = time.monotonic() + _LOADS_FIRST_S
            while self._up and not self._closing.is_set() and time.monotonic() < until_s:
                self._lock.wait(until_s - time.monotonic())
            batch = [self._down.popleft() for _ in range(min(len(self._down), self._batch_blocks))]
            live = [(entry, chain) for entry, chain in batch if entry.state is State.READY]
            for entry, _ in batch:
                if entry.state is not State.READY:
                    self._refund_locked(entry)
            records = [
                self._ram.arena.view(entry.slot)[: record_bytes(entry.payload_bytes)] for entry, _ in live
            ]
        if live:
            # An entry cleared while the write is under way must not come back from the tier.
            self.lane.write(
                [entry.key for entry, _ in live], records, lambda index: live[index][0].state is State.GONE
            )
        records.clear()
        with self._lock:
            # The last of a chain's blocks stands for those before it.
            for chain in {chain[0]: chain for _, chain in live if chain}.values():
                self.lane.index.touch(chain)
            for entry, _ in batch:
                self._left_locked(entry)
            # Cleared meanwhile, and the lane could not delete what it had just written.
            index = self.lane.index
            undead = [one.key for one, _ in live if one.state is State.GONE and index.bytes_of(one.key)]
            self._lock.notify_all()
        if undead:
            self.deletions.forget(undead)

    def scan(self) -> None:
        """Index what the tier holds, on a thread of its own, again until it works; then keep in step."""
        threading.Thread(target=self._scan, name=f"tiercel-{self.lane.name}-scan", daemon=True).start()

    def _scan(self) -> None:
        if until_it_works(self._scan_once, self._closing):
            while (pause_s := self.lane.keep_in_step()) is not None and not self._closing.wait(pause_s):
                pass

    def _scan_once(self) -> bool:
        self.lane.scan()
        return self.lane.scanned

    def stop(self) -> None:
        """Have the threads end soon: what is being deleted is tried once more. Never waits."""
        with self._lock:
            self._closing.set()
            self._drop_waiting_locked()
        for workers in (self._writers, self._readers, self._probers):
            workers.close()

    def join(self, until_s: float) -> bool:
        """Wait until the monotonic time `until_s` for the threads to end; one that is stuck is left behind.

        False if not all was deleted that should be.
        """
        for workers in (self._writers, self._readers, self._probers):
            workers.join(until_s)
        return self.deletions.join(until_s)
