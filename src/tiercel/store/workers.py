"""A few daemon threads behind a bounded queue. Full means refused, never blocked; closing never hangs.

The standard library's pool has no bound and joins its threads at exit, so one stuck disk would hold the
whole process.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

Task = Callable[[], None]


class Workers:
    """`threads` threads, started on first use, that run up to `queue_max` waiting tasks in order."""

    def __init__(self, name: str, threads: int, queue_max: int) -> None:
        self._name = name
        self._threads_max = threads
        self._queue: queue.Queue[Task | None] = queue.Queue(queue_max)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, task: Task) -> bool:
        """Queue a task; False when the queue is full or closed. Never blocks."""
        if self._closed:
            return False
        try:
            self._queue.put_nowait(task)
        except queue.Full:
            return False
        if len(self._threads) < self._threads_max:
            self._start_one()
        return True

    def close(self) -> None:
        """Refuse new tasks and drop the queued ones; threads end after the task they are in. Never waits."""
        self._closed = True
        for _ in range(len(self._threads)):
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                return

    def join(self, until_s: float) -> None:
        """Wait until the monotonic time `until_s` for the threads to end after `close`."""
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _start_one(self) -> None:
        with self._lock:
            if len(self._threads) >= self._threads_max:
                return
            thread = threading.Thread(target=self._run, name=f"tiercel-{self._name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        while True:
            try:
                task = self._queue.get(timeout=1.0)
            except queue.Empty:
                if self._closed:
                    return
                continue
            if task is None or self._closed:
                return
            task()
