"""Chunks on their way between rows of vLLM's CPU tier and slots of our store, on threads.

Every job ends and is reported exactly once, whatever the store does. While a job is under way its rows are
the job's: vLLM neither evicts nor reads them. A row is reported as loaded only when the store has verified
the chunk and it is there as a whole.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.tiering.base import JobResult

from tiercel.engines.vllm.jobs import NOBODY
from tiercel.engines.vllm.naming import Names
from tiercel.engines.vllm.secondary.lookups import Noted
from tiercel.engines.vllm.secondary.prefixes import Run
from tiercel.engines.vllm.stats import Tally
from tiercel.engines.vllm.threads import Desk
from tiercel.service import RemoteStore
from tiercel.store.policy import Hints

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey
    from vllm.v1.kv_offload.tiering.base import TransferJob

Bytes = npt.NDArray[np.uint8]

# One for stores: a prompt's chunks are stored in order, each behind its parent.
_LOAD_THREADS, _STORE_THREADS = 2, 1
_WAITING_MAX = 1024
_STORE_DEADLINE_S = 5.0
# Chunks per question to the store: few enough to start copying early, enough to keep questions rare.
_BATCH_BYTES = 32 << 20
# Stores hold rows that vLLM cannot evict until they end; at most this share of them.
_HELD_SHARE = 0.5
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that is over, and the chunks that were to be loaded and were not."""

    job: TransferJob
    result: JobResult
    lost: Collection[OffloadKey]


class Transfers:
    """Jobs in, results out. `load`, `store` and `ended` belong to the scheduler's thread."""

    def __init__(
        self, store: RemoteStore, view: memoryview, tally: Tally, load_deadline_s: float, noted: Noted | None
    ) -> None:
        assert view.shape is not None
        # From a view of our own: whoever releases vLLM's must not find it in use.
        self._rows: Bytes = np.frombuffer(view.cast("B"), np.uint8).reshape(view.shape)
        self._row_bytes = int(self._rows.shape[1])
        self._batch = max(1, _BATCH_BYTES // self._row_bytes)
        self._held_max = max(1, int(len(self._rows) * _HELD_SHARE))
        self._store = store
        self._tally = tally
        self._load_deadline_s = load_deadline_s
        self._noted = noted
        self._idle = threading.Condition()
        self._under_way = self._held = 0
        self._hurry = False
        self._ended: deque[Ended] = deque()
        self._loads = Desk("load", _LOAD_THREADS, _WAITING_MAX)
        self._stores = Desk("store", _STORE_THREADS, _WAITING_MAX)

    def load(self, job: TransferJob, runs: Sequence[Run], names: Names) -> None:
        """Fill a job's rows. Never blocks."""
        until_s = time.monotonic() + self._load_deadline_s
        self._begin(0)
        if not self._loads.submit(partial(self._load, job, runs, names, until_s)):
            self._loaded(job, (), time.monotonic())

    def store(self, job: TransferJob, runs: Sequence[Run], names: Names, hints: Hints) -> None:
        """Keep a job's rows; dropped when too much waits already. Never blocks."""
        until_s, rows = time.monotonic() + _STORE_DEADLINE_S, len(job.keys)
        fits = self._held == 0 or self._held + rows <= self._held_max
        self._begin(rows)
        keep = partial(self._keep, job, runs, names, hints, until_s)
        if not (fits and self._stores.submit(keep)):
            self._tally.add("stores_skipped", 1)
            self._stored(job, None, time.monotonic())

    def decline(self, job: TransferJob) -> None:
        """End a store that nobody wants, as done."""
        self._begin(len(job.keys))
        self._stored(job, 0, time.monotonic())

    def ended(self) -> list[Ended]:
        """Jobs that are over since the last time."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def drain(self) -> None:
        """Wait until no job is under way. What has not begun does not begin; deadlines bound the rest."""
        with self._idle:
            self._hurry = True
            self._idle.wait_for(lambda: not self._under_way)
            self._hurry = False

    def close(self) -> None:
        """End the threads; nothing is copied any more once they have: the rows may be gone next."""
        self._hurry = True
        ended = [desk.close(_CLOSE_S) for desk in (self._loads, self._stores)]
        if all(ended):
            self._rows = np.empty((0, self._row_bytes), np.uint8)

    # On the threads.

    def _load(self, job: TransferJob, runs: Sequence[Run], names: Names, until_s: float) -> None:
        started_s = time.monotonic()
        rows = _rows_of(job)
        loaded: list[OffloadKey] = []
        try:
            for run in runs:
                self._fill(run, names, rows, until_s, loaded)
        finally:
            self._loaded(job, loaded, started_s)

    def _fill(
        self, run: Run, names: Names, rows: Mapping[bytes, int], until_s: float, loaded: list[OffloadKey]
    ) -> None:
        chain = names.chain(_named(run), run.keys, NOBODY)
        left_s = until_s - time.monotonic()
        if left_s <= 0 or self._hurry:
            return
        with self._store.acquire(chain, left_s, run.start) as lease:
            while ready := lease.ready(self._batch):
                for block in ready:
                    if self._hurry or block.payload.nbytes != self._row_bytes:
                        return
                    key = run.key(block.index)
                    np.copyto(self._rows[rows[key]], np.frombuffer(block.payload, np.uint8))
                    loaded.append(key)  # type: ignore[arg-type]
                lease.advance(len(ready))

    def _keep(
        self, job: TransferJob, runs: Sequence[Run], names: Names, hints: Hints, until_s: float
    ) -> None:
        started_s = time.monotonic()
        stored: int | None = None
        try:
            if started_s >= until_s or self._hurry:
                self._tally.add("stores_skipped", 1)
            else:
                rows = _rows_of(job)
                counts = [self._write(run, names, rows, hints, until_s) for run in runs]
                stored = None if None in counts else sum(count or 0 for count in counts)
        finally:
            self._stored(job, stored, started_s)

    def _write(
        self, run: Run, names: Names, rows: Mapping[bytes, int], hints: Hints, until_s: float
    ) -> int | None:
        """How many chunks of a run were stored, the others being there or unwanted; None: it broke off."""
        chain = names.chain(_named(run), run.keys, NOBODY)
        left_s = max(0.0, until_s - time.monotonic())
        failures = self._store.failures
        with self._store.begin_store(
            chain, run.start, run.stop, self._row_bytes, left_s, hints.sight()
        ) as lease:
            while rooms := lease.take(self._batch):
                if self._hurry:
                    return None
                for room in rooms:
                    np.copyto(np.frombuffer(room.payload, np.uint8), self._rows[rows[run.key(room.index)]])
            stored = lease.commit()
        if hints.pin_s:
            self._store.pin(chain, hints.pin_s)
        if self._noted is not None:
            self._noted(chain, run)
        reached = self._store.up and self._store.failures == failures
        return stored if reached else None

    # Ends of jobs.

    def _begin(self, held: int) -> None:
        with self._idle:
            self._under_way += 1
            self._held += held

    def _loaded(self, job: TransferJob, loaded: Sequence[OffloadKey], started_s: float) -> None:
        there = set(loaded)
        lost = [key for key in job.keys if key not in there]
        self._tally.add("loads_failed", bool(lost))
        self._count("load", "loaded", len(loaded), started_s)
        self._end(job, lost, 0, not lost, started_s, tuple(loaded) if lost and loaded else None)

    def _stored(self, job: TransferJob, stored: int | None, started_s: float) -> None:
        self._count("store", "stored", stored or 0, started_s)
        self._end(job, (), len(job.keys), stored is not None, started_s)

    def _count(self, moving: str, moved: str, chunks: int, started_s: float) -> None:
        self._tally.add(f"{moved}_chunks", chunks)
        self._tally.add(f"{moved}_bytes", chunks * self._row_bytes)
        self._tally.add(f"{moving}_seconds", time.monotonic() - started_s)

    def _end(
        self,
        job: TransferJob,
        lost: Collection[OffloadKey],
        held: int,
        success: bool,
        started_s: float,
        kept: tuple[OffloadKey, ...] | None = None,
    ) -> None:
        # `transfer_bytes` is left to vLLM: its backpressure shall see what it handed us.
        result = JobResult(job.job_id, success, kept, transfer_time=time.monotonic() - started_s)
        with self._idle:
            self._ended.append(Ended(job, result, lost))
            self._under_way -= 1
            self._held -= held
            self._idle.notify_all()


def _named(run: Run) -> str:
    return f"{run.request}/{run.group.hex()}"


def _rows_of(job: TransferJob) -> dict[bytes, int]:
    return dict(zip(job.keys, job.chunk_ids.tolist(), strict=True))
