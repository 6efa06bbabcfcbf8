"""Threads of ours inside vLLM."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable

Task = Callable[[], None]


def leave_pinned_core() -> None:
    """vLLM pins its threads to cores, and threads inherit that: ours may run wherever the process may."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


class Desk:
    """`threads` threads that work off a bounded queue in order.

    A fault of ours is shown by its thread's end; another takes its place, for others must not wait in vain.
    """

    def __init__(self, name: str, threads: int, waiting_max: int) -> None:
        self._name = name
        self._queue: queue.Queue[Task | None] = queue.Queue(waiting_max)
        self._busy_since_s: dict[int, float] = {}
        self._closed = False
        self._threads = [self._start(number) for number in range(threads)]

    @property
    def waiting(self) -> bool:
        """Whether a task waits for a thread."""
        return not self._queue.empty()

    @property
    def busy_s(self) -> float:
        """How long the task that is longest under way has been so."""
        return time.monotonic() - min(self._busy_since_s.copy().values(), default=math.inf)

    def submit(self, task: Task) -> bool:
        """Queue a task; False when the queue is full or closed. Never blocks."""
        try:
            if not self._closed:
                self._queue.put_nowait(task)
        except queue.Full:
            return False
        return not self._closed

    def close(self, wait_s: float) -> bool:
        """Take no more, work off what waits, end. Whether all threads ended within `wait_s`."""
        until_s = time.monotonic() + wait_s
        self._closed = True
        for _ in self._threads:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=max(0.0, until_s - time.monotonic()))
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _start(self, number: int) -> threading.Thread:
        thread = threading.Thread(target=self._run, args=(number,), name=f"tiercel-{self._name}", daemon=True)
        thread.start()
        return thread

    def _run(self, number: int) -> None:
        leave_pinned_core()
        ended = False
        try:
            while (task := self._queue.get()) is not None:
                self._busy_since_s[number] = time.monotonic()
                task()
                del self._busy_since_s[number]
            ended = True
        finally:
            if not ended:
                self._busy_since_s.pop(number, None)
                self._threads[number] = self._start(number)
