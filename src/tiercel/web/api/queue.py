"""The bounded queue, and the one loop behind it that answers up to so many requests together.

Ownership: jobs are made, stopped and read on the event loop; one worker thread takes them in order into the
engine's batch and steps that. `_lock` protects who waits, who runs and the counts; nothing slow happens under
it. A job that is stopped gives up its place in the queue at once; one that runs leaves before the next step,
one that is being read with its current block. A fault costs its own request; in a step of several, these. The
engine never waits for a client: what it says goes to the job's inbox, which is bounded by the answer's own
length.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tiercel.engines.transformers import Event, Request, Result
from tiercel.engines.transformers.answer import Stopped
from tiercel.errors import RequestError
from tiercel.service.logs import place_of
from tiercel.store.sessions import Sessions, tenant_of
from tiercel.web.api import faults
from tiercel.web.api.engine import Engine
from tiercel.web.api.faults import ApiError, too_busy
from tiercel.web.api.job import Job
from tiercel.web.api.metrics import Metrics

_log = logging.getLogger("tiercel.serve")
_RETRY_S_MAX = 60


class Seat:
    """A place in the queue, taken before the prompt's tokens are known."""

    def __init__(self, queue: GenerationQueue) -> None:
        self._queue, self.taken = queue, True

    def submit(self, job: Job) -> None:
        """Let `job` wait in this place. Raises ApiError when the server began to stop meanwhile."""
        self._queue.enqueue(job)
        self.taken = False


class GenerationQueue:
    """Takes up to `waiting_max` requests beside those that are being answered."""

    def __init__(
        self, engine: Engine, waiting_max: int, metrics: Metrics, sessions: Sessions | None = None
    ) -> None:
        self._engine, self._waiting_max, self._metrics = engine, waiting_max, metrics
        self._sessions = Sessions() if sessions is None else sessions
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._seats = 0
        self._closing = False
        self._mean_s = 1.0
        self._idle = threading.Event()
        self._idle.set()
        self._thread = ThreadPoolExecutor(1, "generate")
        # The worker thread's own.
        self._batch = engine.batch()
        self._members: dict[Any, Job] = {}
        self._told: deque[tuple[Any, Event | Exception]] = deque()
        self._at: Job | None = None

    @contextmanager
    def reserve(self) -> Iterator[Seat]:
        """Hold a place in the queue until a job takes it. Raises ApiError: 429 if full, 503 if closing."""
        with self._lock:
            if self._closing:
                raise faults.shutting_down()
            ahead = self._seats + len(self._waiting) + len(self._running)
            if ahead >= self._waiting_max + self._batch.size:
                raise self._full(ahead)
            self._seats += 1
        seat = Seat(self)
        try:
            yield seat
        finally:
            if seat.taken:
                with self._lock:
                    self._seats -= 1

    def _full(self, ahead: int) -> ApiError:
        # A place is free when the next answer of those that are made together ends.
        retry_s = max(1, min(_RETRY_S_MAX, math.ceil(self._mean_s / self._batch.size)))
        what = f"{ahead} requests wait or are being answered, as many as this server takes"
        return too_busy(what, retry_s=retry_s)

    def enqueue(self, job: Job) -> None:
        """Make a seat's job wait. Raises ApiError when closing."""
        with self._lock:
            if self._closing:
                raise faults.shutting_down()
            self._seats -= 1
            self._waiting.append(job)
            self._count_locked()
            if self._idle.is_set():
                self._start_pump_locked()

    def stop(self, job: Job, why: ApiError, reason: str) -> None:
        """End a job that is not over: its client gets `why`, its generator is closed with its next token."""
        with self._lock:
            if job.over or job.stopped is not None:
                return
            job.stopped = why
            if job in self._waiting:
                self._waiting.remove(job)
                self._count_locked()
        self._metrics.cut.labels(reason).inc()
        job.post(why)

    def refuse_more(self) -> None:
        """Begin to close: no job is taken, those waiting are told so, those running go on."""
        with self._lock:
            self._closing = True
            waiting = list(self._waiting)
        for job in waiting:
            self.stop(job, faults.shutting_down(), "shutdown")

    def stop_running(self) -> None:
        """End the jobs that run."""
        with self._lock:
            running = list(self._running)
        for job in running:
            self.stop(job, faults.shutting_down(), "shutdown")

    def join(self, deadline_s: float) -> bool:
        """Wait until the engine is idle; False if the deadline came first. `refuse_more` comes before."""
        if not self._idle.wait(deadline_s):
            return False
        self._thread.shutdown(wait=False)
        return True

    @property
    def closing(self) -> bool:
        """Whether the server has been told to stop."""
        return self._closing

    @property
    def depth(self) -> tuple[int, int]:
        """How many requests wait, and how many are being answered."""
        with self._lock:
            return len(self._waiting) + self._seats, len(self._running)

    @property
    def settling(self) -> list[Job]:
        """Requests whose clients have their answers, while the engine still stores what came of them."""
        with self._lock:
            return [job for job in self._running if job.over]

    def _count_locked(self) -> None:
        self._metrics.waiting.set(len(self._waiting))
        self._metrics.running.set(len(self._running))

    # The worker thread's side.

    def _start_pump_locked(self) -> None:
        self._idle.clear()
        self._thread.submit(self._pump).add_done_callback(self._pump_ended)

    def _pump(self) -> None:
        """Step until nobody is left. What is raised belongs to the job at hand; without one, to all."""
        while self._more():
            if not self._told:
                self._told.extend(self._batch.step())
            while self._told:
                member, event = self._told.popleft()
                if (job := self._members.get(member)) is not None:
                    self._work(self._take, job, event)

    def _more(self) -> bool:
        """Let go of those that nobody waits for, take in one that waits; False once nobody is left."""
        for job in [one for one in self._running if one.broken or one.stopped is not None]:
            self._work(self._leave, job)
        with self._lock:
            room = not self._running or not self._batch.full
            waited = self._waiting.popleft() if self._waiting and room else None
            if waited is not None:
                self._running.append(waited)
            self._count_locked()
            if not self._running:
                self._idle.set()
                return False
        if waited is not None:
            self._work(self._admit, waited)
        return True

    def _work(self, call: Callable[..., None], job: Job, *args: object) -> None:
        """Do something for one job: in its context, and if it fails at its cost."""
        self._at = job
        job.context.run(call, job, *args)
        self._at = None

    def _admit(self, job: Job) -> None:
        job.begun_s = time.monotonic()
        self._metrics.queued.observe(job.begun_s - job.arrived_s)
        self._note_session(job.request, job.request.tokens)
        job.member = self._batch.admit(job.request, lambda: job.stopped is not None)
        self._members[job.member] = job

    def _take(self, job: Job, event: Event | Exception) -> None:
        if isinstance(event, Exception):
            if not isinstance(event, Stopped):
                self._fail(job, event)
            self._leave(job)
        elif isinstance(event, Result):
            if job.stopped is None:
                self._answered(job, event)
            self._leave(job)
        elif job.stopped is None:
            if job.first_token_s is None:
                job.first_token_s = time.monotonic()
            job.post(event)

    def _answered(self, job: Job, result: Result) -> None:
        assert job.begun_s is not None
        assert job.first_token_s is not None
        self._metrics.answered(result, job.first_token_s - job.arrived_s)
        self._note_session(job.request, [*job.request.tokens, *result.tokens])
        self._mean_s += 0.2 * (time.monotonic() - job.begun_s - self._mean_s)

    def _note_session(self, request: Request, tokens: Sequence[int]) -> None:
        session = request.hints.session
        chain = self._engine.chain(tokens, request.salt) if session is not None else None
        if session is not None and chain is not None:
            self._sessions.note(tenant_of(request.salt), session, (chain,))

    def _leave(self, job: Job) -> None:
        """End a job's part in the batch, which gives back what it holds, and give its place to another."""
        member, job.member = job.member, None
        self._members.pop(member, None)
        try:
            if member is not None:
                self._batch.drop(member)
        finally:
            with self._lock:
                self._running.remove(job)
                self._count_locked()
            job.end()

    def _pump_ended(self, pump: Future[None]) -> None:
        """Runs in the worker thread: a fault costs whom it belongs to, the pump goes on for all others."""
        fault = pump.exception()
        if fault is None:
            return
        at, self._at = self._at, None
        for job in list(self._running) if at is None else [at]:
            job.context.run(self._fail, job, fault)
        with self._lock:
            self._start_pump_locked()

    def _fail(self, job: Job, fault: BaseException) -> None:
        """Tell the client; the job leaves before the next step."""
        job.broken = True
        if isinstance(fault, RequestError):
            job.post(faults.bad(str(fault)))
            return
        self._metrics.faults.inc()
        _log.error("internal fault while answering: %s", place_of(fault), extra={"kind": place_of(fault)})
        job.post(faults.internal())
