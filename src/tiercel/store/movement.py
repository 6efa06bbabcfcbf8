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
from collections.abc import Sequence

from tiercel.blocks import BlockKey, record_bytes
from tiercel.store.figures import StoreCounters
from tiercel.store.lane import Lane, WriteMode
from tiercel.store.ram import Entry, Ram, State
from tiercel.store.workers import Workers

_BATCH_BYTES = 8 << 20
# One probe asks for at most so many blocks: a long prefix is found in a few doubling steps.
_PROBE_BLOCKS_MAX = 256
_PROBE_QUEUE = 64
# Blocks waiting to be written hold their slots: they may hold at most this share of them.
_WAITING_SHARE = 0.5
_SCAN_RETRY_S = (1.0, 60.0)


class Traffic:
    """The transfers of one lane: its worker threads and the queue of blocks waiting to be written."""

    def __init__(self, lane: Lane, ram: Ram, lock: threading.Condition, counters: StoreCounters) -> None:
        self.lane = lane
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
        self._down: deque[tuple[Entry | None, Sequence[BlockKey]]] = deque()

    # Up.

    def load_locked(self, entries: list[Entry]) -> bool:
        """Queue the loading of LOADING entries; each keeps one hold until it is done. False: queue full."""
        accepted = self._readers.submit(lambda: self._load(entries))
        if not accepted:
            self.lane.counters.reads_refused += len(entries)
        return accepted

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

    def _load(self, entries: list[Entry]) -> None:
        """Runs on a reader thread. A staged or kept entry becomes READY, or GONE if no byte may be trusted."""
        arena = self._ram.arena
        keys = [entry.key for entry in entries]
        headers = self.lane.read(keys, [arena.view(entry.slot) for entry in entries])
        with self._lock:
            for entry, header in zip(entries, headers, strict=True):
                if header is None:
                    self._counters.loads_failed += 1
                    self._ram.remove(entry)
                elif entry.state is State.LOADING:
                    entry.payload_bytes = header.payload_bytes
                    entry.state = State.READY
                    self._counters.loaded[self.lane.name] = self._counters.loaded.get(self.lane.name, 0) + 1
                self._ram.release(entry)
            self._lock.notify_all()

    # Down.

    def write_locked(self, entry: Entry) -> bool:
        """Queue a READY entry to be written; holds its slot meanwhile. False (and counted): not taken."""
        if not self.lane.takes(time.monotonic()):
            # Down or stuck: what waits would only keep slots from blocks that can be used.
            self._drop_waiting_locked()
            self.lane.counters.writes_dropped += 1
            return False
        if self.lane.pending_writes >= self._waiting_max or not self._writers.submit(self._write_some):
            self.lane.counters.writes_dropped += 1
            return False
        entry.holds += 1
        self._down.append((entry, ()))
        self.lane.pending_writes += 1
        return True

    def _drop_waiting_locked(self) -> None:
        for entry, _ in self._down:
            if entry is not None:
                self._ram.release(entry)
                self.lane.pending_writes -= 1
                self.lane.counters.writes_dropped += 1
        self._down.clear()

    def touch_after_writes_locked(self, keys: Sequence[BlockKey]) -> None:
        """Date a chain as used once all its queued writes are done, so that parents end up the younger."""
        if self.lane.options.write is WriteMode.THROUGH and self._writers.submit(self._write_some):
            self._down.append((None, keys))

    def _write_some(self) -> None:
        """Runs on a writer thread: takes a batch off the queue, unless an earlier call already took it."""
        with self._lock:
            batch = self._take_batch_locked()
        if not batch:
            return
        arena = self._ram.arena
        live = [entry for entry in batch if entry.state is State.READY]
        records = [arena.view(entry.slot)[: record_bytes(entry.payload_bytes)] for entry in live]
        if live:
            self.lane.write([entry.key for entry in live], records)
        records.clear()
        with self._lock:
            # Cleared while the write was under way: it must not come back from the tier.
            cleared = self.lane.forget(entry.key for entry in live if entry.state is State.GONE)
            for entry in batch:
                self._ram.release(entry)
            self.lane.pending_writes -= len(batch)
            self._lock.notify_all()
        if cleared:
            self.lane.delete(cleared)

    def _take_batch_locked(self) -> list[Entry]:
        batch: list[Entry] = []
        while self._down and len(batch) < self._batch_blocks:
            entry, keys = self._down[0]
            if entry is None:
                if batch:
                    break
                self.lane.touch(keys)
            else:
                batch.append(entry)
            self._down.popleft()
        return batch

    def scan(self) -> None:
        """Index what the tier holds, on a thread of its own, trying again until it works; serves meanwhile."""
        threading.Thread(target=self._scan, name=f"tiercel-{self.lane.name}-scan", daemon=True).start()

    def _scan(self) -> None:
        pause_s, pause_max_s = _SCAN_RETRY_S
        self.lane.scan()
        while not self.lane.scanned and not self._closing.wait(pause_s):
            pause_s = min(pause_s * 2, pause_max_s)
            self.lane.scan()

    def close(self, deadline_s: float) -> None:
        """Stop the threads; one that is stuck in the tier is left behind."""
        self._closing.set()
        until_s = time.monotonic() + deadline_s
        for workers in (self._writers, self._readers, self._probers):
            workers.close()
        for workers in (self._writers, self._readers, self._probers):
            workers.join(until_s)
