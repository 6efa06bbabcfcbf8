"""A worker's side: copies blocks between vLLM's KV cache and the store on threads of its own.

Every job ends and is reported exactly once, with what it achieved, whatever the store does: a load that gets
less than it was promised reports the rest as not loaded, a save that finds no room is dropped. Bytes reach
an engine block only after the store has verified them, whole blocks at a time. vLLM's thread never waits here
but for a moment in steps that compute nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from tiercel.blocks import Identity
from tiercel.engines.vllm.jobs import NULL_BLOCK, Done, LoadJob, SaveJob, Shard, Step, Table
from tiercel.engines.vllm.layout import Copies, Layout
from tiercel.engines.vllm.mover import Mark, Mover
from tiercel.engines.vllm.naming import Names, names_of_shards
from tiercel.engines.vllm.stats import Tally
from tiercel.engines.vllm.threads import Desk
from tiercel.store import Store

_LOAD_THREADS, _SAVE_THREADS = 2, 1
_LOADS_MAX, _SAVES_MAX = 4096, 1024
# Blocks per question to the store: few enough to start copying early, enough to keep questions rare.
_BATCH_BYTES = 32 << 20
_SAVE_DEADLINE_S = 5.0
# A busy host keeps a thread waiting for so long without a tier being slow.
_PATIENCE_MIN_S = 0.1
# In a step without tokens the engine would only spin; this long a job may end instead.
_IDLE_WAIT_S = 0.002
_WAITING_WAIT_S = 0.0005


@dataclass(frozen=True, slots=True)
class Results:
    """What ended since the last time: requests whose load is over, the incomplete ones, lost blocks."""

    loaded: set[str]
    failed: set[str]
    lost_blocks: set[int]


class WorkerSide:
    """One rank's transfers. `submit` and `results` belong to vLLM's thread."""

    def __init__(
        self, store: Store, layout: Layout, shard: Shard, mover: Mover, tally: Tally, load_deadline_s: float
    ) -> None:
        self._store = store
        self._layout = layout
        self._shard = shard
        self._mover = mover
        self._tally = tally
        self._load_deadline_s = load_deadline_s
        self._names: Names | None = None
        self._identity: Identity | None = None
        self._ended = threading.Condition()
        self._unfinished = 0
        self._results = Results(set(), set(), set())
        self._done = Done()
        # Blocks that any load brought so far; what two threads count at once need not be exact.
        self._arrived = 0
        self._closing = False
        self._loads = Desk("load", _LOAD_THREADS, _LOADS_MAX)
        self._saves = Desk("save", _SAVE_THREADS, _SAVES_MAX)

    def load(self, step: Step) -> None:
        """Start a step's loads. Called once per step, after its compute was queued."""
        if not step.loads:
            return
        names, mark = self._named(step), self._mover.mark()
        until_s = time.monotonic() + self._load_deadline_s
        for job in step.loads:
            with self._ended:
                self._unfinished += 1
            if not self._loads.submit(partial(self._load, job, names, mark, until_s)):
                self._loaded(job, job.start, 0, names.identity.block_tokens, 0.0)

    def save(self, step: Step) -> None:
        """Start a step's saves. Called once per step, after its compute was queued."""
        if not step.saves:
            return
        names = self._named(step)
        mark = self._mover.mark() if self._shard.writes else None
        until_s = time.monotonic() + _SAVE_DEADLINE_S
        for job in step.saves:
            with self._ended:
                self._unfinished += 1
            keep = partial(self._save, job, names, mark, until_s)
            if not (self._shard.writes and self._saves.submit(keep)):
                self._saved(job, skipped=self._shard.writes)

    def pause(self, waiting: bool) -> None:
        """In a step without tokens: give a job or a lookup that is about to end the moment it needs."""
        with self._ended:
            if (self._unfinished or waiting) and not self._results.loaded and not self._done.saves:
                self._ended.wait(_IDLE_WAIT_S if not waiting else _WAITING_WAIT_S)

    def results(self) -> Results:
        """Loads that are over since the last time."""
        with self._ended:
            results, self._results = self._results, Results(set(), set(), set())
        return results

    def done(self) -> Done | None:
        """What the scheduler's side has to be told since the last time."""
        with self._ended:
            if not self._done.saves and not self._done.failed:
                return None
            done, self._done = self._done, Done()
        return done

    def close(self, wait_s: float = 2.0) -> None:
        """End the threads. Nothing more is copied: the engine's memory may be gone next."""
        self._closing = True
        until_s = time.monotonic() + wait_s
        self._loads.close(wait_s)
        self._saves.close(max(0.0, until_s - time.monotonic()))

    def _named(self, step: Step) -> Names:
        """This rank's names under the step's identity."""
        assert step.identity is not None
        if self._names is None or step.identity != self._identity:
            self._identity = step.identity
            self._names = names_of_shards(step.identity, {self._shard.number: self._shard})[0]
        return self._names

    # On the transfer threads.

    def _load(self, job: LoadJob, names: Names, mark: Mark, until_s: float) -> None:
        started_s = time.monotonic()
        at, nbytes, waiting = job.start, 0, True
        try:
            while waiting:
                others = self._arrived - at
                end_s = min(until_s, time.monotonic() + max(job.patience_s, _PATIENCE_MIN_S))
                for blocks, size in self._arriving(job, names, mark, at, end_s):
                    at += blocks
                    nbytes += size
                    self._arrived += blocks
                now_s = time.monotonic()
                # Where others get theirs, a load takes its turn; else it has to be worth it by itself.
                faster = self._arrived - at > others or job.worth_waiting(at, now_s - started_s)
                waiting = at < job.stop and end_s <= now_s < until_s and faster
        finally:
            self._loaded(job, at, nbytes, names.identity.block_tokens, time.monotonic() - started_s)

    def _arriving(
        self, job: LoadJob, names: Names, mark: Mark, at: int, until_s: float
    ) -> Iterator[tuple[int, int]]:
        """Copy blocks `at` and on in as they come, until `until_s`; yields how many, and their bytes."""
        chain, tokens = names.chain(job.request, job.hashes, job.owner), names.identity.block_tokens
        plan = _Plan(self._layout, tokens, job.tables, job.start, job.skip_tokens)
        payload_bytes = self._layout.unit_bytes(tokens)
        batch = max(1, _BATCH_BYTES // payload_bytes)
        with self._store.acquire(chain, max(0.0, until_s - time.monotonic()), at) as lease:
            while at < job.stop and (ready := lease.ready(min(batch, job.stop - at))):
                if self._closing or any(block.payload.nbytes != payload_bytes for block in ready):
                    return
                blocks = [(block.payload, plan.copies(block.index)) for block in ready]
                self._mover.load(mark, blocks)
                lease.advance(len(ready))
                at += len(ready)
                yield len(ready), sum(sum(copies.sizes) for _, copies in blocks)

    def _save(self, job: SaveJob, names: Names, mark: Mark, until_s: float) -> None:
        started_s = time.monotonic()
        stored = 0
        try:
            if started_s < until_s:
                stored = self._write(job, names, mark, until_s - started_s)
        finally:
            # Counted before it is reported: figures leave with the report.
            block_bytes = self._layout.unit_bytes(names.identity.block_tokens)
            self._tally.add("saved_blocks", stored)
            self._tally.add("saved_bytes", stored * block_bytes)
            self._tally.add("save_seconds", time.monotonic() - started_s)
            self._saved(job, skipped=started_s >= until_s)

    def _write(self, job: SaveJob, names: Names, mark: Mark, deadline_s: float) -> int:
        chain = names.chain(job.request, job.hashes, job.owner)
        plan = _Plan(self._layout, names.identity.block_tokens, job.tables, job.start)
        payload_bytes = self._layout.unit_bytes(names.identity.block_tokens)
        batch = max(1, _BATCH_BYTES // payload_bytes)
        with self._store.begin_store(
            chain, job.start, job.stop, payload_bytes, deadline_s, job.sight
        ) as lease:
            while rooms := lease.take(batch):
                if self._closing:
                    return 0
                self._mover.save(mark, [(room.payload, plan.copies(room.index)) for room in rooms])
            stored = lease.commit()
        if job.pin_s:
            self._store.pin(chain, job.pin_s)
        return stored

    # Ends of jobs.

    def _loaded(self, job: LoadJob, at: int, nbytes: int, tokens: int, duration_s: float) -> None:
        whole = at >= job.stop
        skipped = job.skip_tokens if at > job.start else 0
        self._tally.add("loads", 1)
        self._tally.add("loads_failed", not whole)
        self._tally.add("loaded_tokens", (at - job.start) * tokens - skipped)
        self._tally.add("loaded_bytes", nbytes)
        self._tally.add("load_seconds", duration_s)
        with self._ended:
            self._unfinished -= 1
            self._results.loaded.add(job.request)
            if not whole:
                self._results.failed.add(job.request)
                plan = _Plan(self._layout, tokens, job.tables, job.start, job.skip_tokens)
                self._results.lost_blocks.update(plan.engine_blocks(at))
                self._done.failed.add(job.request)
            self._ended.notify_all()

    def _saved(self, job: SaveJob, *, skipped: bool) -> None:
        self._tally.add("saves_skipped", skipped)
        with self._ended:
            self._unfinished -= 1
            self._done.saves[job.number] = 1
            self._ended.notify_all()


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which engine blocks a job's blocks are made of."""

    layout: Layout
    block_tokens: int
    tables: tuple[Table, ...]
    start: int
    skip_tokens: int = 0

    def copies(self, block: int) -> Copies:
        """The runs of one block of the job."""
        first = self.skip_tokens if block == self.start else 0
        before = (block - self.start) * self.block_tokens + first - self.skip_tokens
        cut = [
            table[before // group.block_tokens : (before + self.block_tokens - first) // group.block_tokens]
            for table, group in zip(self.tables, self.layout.groups, strict=True)
        ]
        return self.layout.copies(cut, first, self.block_tokens)

    def engine_blocks(self, block: int) -> Iterator[int]:
        """The engine blocks from block `block` of the job to its end."""
        before = max(0, (block - self.start) * self.block_tokens - self.skip_tokens)
        for table, group in zip(self.tables, self.layout.groups, strict=True):
            yield from (one for one in table[before // group.block_tokens :] if one != NULL_BLOCK)
