"""The bounded queue and the one generation loop behind it.

Ownership: jobs are made, stopped and read on the event loop; one worker thread takes them in order and runs
the engine. `_lock` protects the list of waiting jobs, the running one and the counts; nothing slow happens
under it. A job that is stopped gives up its place at once; the running one ends with its next token, and its
generator is closed by the thread that runs it. The engine never waits for a client: what it says goes to the
job's inbox, which is bounded by the answer's own length.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from typing import cast

from tiercel.engines.transformers import Delta, Event, Request, Result
from tiercel.errors import RequestError
from tiercel.service.logs import place_of
from tiercel.store.sessions import Sessions, tenant_of
from tiercel.web.api import faults
from tiercel.web.api.engine import Engine
from tiercel.web.api.faults import ApiError, too_busy
from tiercel.web.api.metrics import Metrics

_log = logging.getLogger("tiercel.serve")
_RETRY_S_MAX = 60


class Job:
    """One request in the queue or in the engine. Made on the event loop that reads its `inbox`.

    The inbox gets the answer's tokens and ends with the one that has a finish reason, or with an `ApiError`.
    `ended` is set once the engine has done with the request altogether, blocks stored and all.
    """

    def __init__(self, request: Request, arrived_s: float) -> None:
        self.request = request
        self.arrived_s = arrived_s
        self.begun_s: float | None = None
        self.first_token_s: float | None = None
        self.stopped: ApiError | None = None
        self.failed: ApiError | None = None
        self.over = False
        self.inbox: asyncio.Queue[Delta | ApiError] = asyncio.Queue()
        self.ended = asyncio.Event()
        # The engine's thread logs for this request, so it works in its context.
        self.context = copy_context()
        self._loop = asyncio.get_running_loop()

    async def deltas(self) -> AsyncGenerator[Delta]:
        """The answer's tokens as they come; the last one has a finish reason. Raises ApiError."""
        while not self.over:
            item = await self.inbox.get()
            if isinstance(item, ApiError):
                self.over = True
                self.failed = item
                raise item
            self.over = item.finish_reason is not None
            yield item

    def post(self, item: Delta | ApiError) -> None:
        """Put `item` into the inbox, from any thread; dropped when nobody listens any more."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self.inbox.put_nowait, item)

    def end(self) -> None:
        """The engine has done with it; from any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.ended.set)


class Seat:
    """A place in the queue, taken before the prompt's tokens are known."""

    def __init__(self, queue: GenerationQueue) -> None:
        self._queue, self.taken = queue, True

    def submit(self, job: Job) -> None:
        """Let `job` wait in this place. Raises ApiError when the server began to stop meanwhile."""
        self._queue.enqueue(job)
        self.taken = False


class GenerationQueue:
    """Takes up to `waiting_max` requests beside the one that is being answered."""

    def __init__(
        self, engine: Engine, waiting_max: int, metrics: Metrics, sessions: Sessions | None = None
    ) -> None:
        self._engine, self._waiting_max, self._metrics = engine, waiting_max, metrics
        self._sessions = Sessions() if sessions is None else sessions
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._seats = 0
        self._pump_future: Future[None] | None = None
        self._closing = False
        self._mean_s = 1.0
        self._thread = ThreadPoolExecutor(1, "generate")

    @contextmanager
    def reserve(self) -> Iterator[Seat]:
        """Hold a place in the queue until a job takes it. Raises ApiError: 429 if full, 503 if closing."""
        with self._lock:
            if self._closing:
                raise faults.shutting_down()
            ahead = self._seats + len(self._waiting) + (self._running is not None)
            if ahead > self._waiting_max:
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
        retry_s = max(1, min(_RETRY_S_MAX, math.ceil(self._mean_s)))
        what = f"{ahead} requests wait or are being answered, as many as this server takes"
        return too_busy(what, retry_s=retry_s)

    def enqueue(self, job: Job) -> None:
        """Make a seat's job wait. Raises ApiError when closing."""
        with self._lock:
            if self._closing:
                raise faults.shutting_down()
            self._seats -= 1
            self._waiting.append(job)
            self._metrics.waiting.set(len(self._waiting))
            if self._pump_future is None:
                self._start_pump_locked()

    def stop(self, job: Job, why: ApiError, reason: str) -> None:
        """End a job that is not over: its client gets `why`, its generator is closed with its next token."""
        with self._lock:
            if job.over or job.stopped is not None:
                return
            job.stopped = why
            if job in self._waiting:
                self._waiting.remove(job)
                self._metrics.waiting.set(len(self._waiting))
        self._metrics.cut.labels(reason).inc()
        job.post(why)

    def refuse_more(self) -> None:
        """Begin to close: no job is taken, those waiting are told so, the running one goes on."""
        with self._lock:
            self._closing = True
            waiting = list(self._waiting)
        for job in waiting:
            self.stop(job, faults.shutting_down(), "shutdown")

    def stop_running(self) -> None:
        """End the running job, if there is one."""
        with self._lock:
            running = self._running
        if running is not None:
            self.stop(running, faults.shutting_down(), "shutdown")

    def join(self, deadline_s: float) -> bool:
        """Wait until the engine is idle; False if the deadline came first. `refuse_more` comes before."""
        with self._lock:
            pump = self._pump_future
        if pump is not None and wait([pump], deadline_s).not_done:
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
            return len(self._waiting) + self._seats, int(self._running is not None)

    @property
    def settling(self) -> Job | None:
        """The request whose client has its answer, while the engine still stores what came of it."""
        with self._lock:
            running = self._running
        return running if running is not None and running.over else None

    # The worker thread's side.

    def _start_pump_locked(self) -> None:
        self._pump_future = self._thread.submit(self._pump)
        self._pump_future.add_done_callback(self._pump_ended)

    def _pump(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.context.run(self._answer, job)
            finally:
                job.end()

    def _next(self) -> Job | None:
        with self._lock:
            self._running = self._waiting.popleft() if self._waiting else None
            self._metrics.waiting.set(len(self._waiting))
            self._metrics.running.set(int(self._running is not None))
            if self._running is None:
                self._pump_future = None
            return self._running

    def _answer(self, job: Job) -> None:
        started_s = job.begun_s = time.monotonic()
        self._metrics.queued.observe(started_s - job.arrived_s)
        self._note_session(job.request, job.request.tokens)
        # An engine's iterator is a generator: closing it gives back what it holds.
        answer = self._engine.generate(job.request, stop=lambda: job.stopped is not None)
        events = cast("Generator[Event, None, None]", answer)
        with contextlib.closing(events):
            for event in events:
                if job.stopped is not None:
                    return
                if isinstance(event, Result):
                    self._answered(job, event)
                    continue
                if job.first_token_s is None:
                    job.first_token_s = time.monotonic()
                job.post(event)
        self._mean_s += 0.2 * (time.monotonic() - started_s - self._mean_s)

    def _answered(self, job: Job, result: Result) -> None:
        assert job.first_token_s is not None
        ttft_s = job.first_token_s - job.arrived_s
        self._metrics.answered(result, ttft_s)
        self._note_session(job.request, [*job.request.tokens, *result.tokens])

    def _note_session(self, request: Request, tokens: Sequence[int]) -> None:
        session = request.hints.session
        chain = self._engine.chain(tokens, request.salt) if session is not None else None
        if session is not None and chain is not None:
            self._sessions.note(tenant_of(request.salt), session, (chain,))

    def _pump_ended(self, pump: Future[None]) -> None:
        """Runs in the worker thread: an engine that failed costs its own request, the next one goes on."""
        fault = pump.exception()
        if fault is None:
            return
        with self._lock:
            job, self._running = self._running, None
            self._metrics.running.set(0)
        if job is not None:
            job.post(job.context.run(self._told, fault))
        with self._lock:
            if self._waiting:
                self._start_pump_locked()
            else:
                self._pump_future = None

    def _told(self, fault: BaseException) -> ApiError:
        if isinstance(fault, RequestError):
            return faults.bad(str(fault))
        self._metrics.faults.inc()
        _log.error("internal fault while answering: %s", place_of(fault), extra={"kind": place_of(fault)})
        return faults.internal()
