"""`Watch`: reads a source once a second while somebody looks, every two seconds otherwise, and keeps an hour.

Ownership: one thread of its own reads and writes the history and `latest`; everybody else only reads them. A
read that hangs holds up this thread and nobody else; a fault in it is logged by kind and place.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tiercel.service.logs import place_of
from tiercel.web.api.faults import too_busy
from tiercel.web.watch.history import EVERY_S, History, Sample
from tiercel.web.watch.sample import grew, sample_of
from tiercel.web.watch.sources import Source

_log = logging.getLogger("tiercel")
TICK_S = 1.0
LISTENERS_MAX = 16
# Many who look at once are answered from one read, which holds up the store's own work.
FRESH_S = 0.25
_QUIET_S = 60.0
_END_S = 2.0


class Watch:
    """A source and what is known of it. `start` begins to read, `close` ends it and all streams."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.history = History()
        self.latest: tuple[int, bytes] = (0, b"")
        self._listeners = 0
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._stop = threading.Event()
        self._told, self._told_s = (False, b""), -FRESH_S
        self._last = self._known = Sample(0.0, 0)
        self._complained_s = -_QUIET_S
        self._pool = ThreadPoolExecutor(1, "tiercel-watch")
        self._thread = threading.Thread(target=self._run, name="tiercel-watch-clock", daemon=True)

    @property
    def closing(self) -> bool:
        """Whether streams are to end."""
        return self._stop.is_set()

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def end_streams(self) -> None:
        """Stop sampling and have the streams end soon. Never waits."""
        self._stop.set()

    def close(self) -> None:
        """The same, and wait a moment for a read that is under way, not for ever."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_END_S)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def overview(self) -> tuple[bool, bytes]:
        """Whether the source is up, and what a person looks at as JSON, read just now. Blocks."""
        with self._reading:
            if time.monotonic() - self._told_s >= FRESH_S:
                self._tell()
            return self._told

    def outdated(self) -> None:
        """Something was done to the source: the next overview is to show it."""
        with self._reading:
            self._told_s = -FRESH_S

    def admit(self) -> None:
        """Raises ApiError when there are as many listeners as may be."""
        if self._listeners >= LISTENERS_MAX:
            what = f"{LISTENERS_MAX} streams are open, no more are; close one, or ask /v1/overview"
            raise too_busy(what, "too_many_streams", retry_s=5)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Be one of those for whom the source is read every second."""
        with self._lock:
            self._listeners += 1
        try:
            yield
        finally:
            with self._lock:
                self._listeners -= 1

    def publish(self) -> None:
        """Read now, for the streams. Blocks."""
        with self._reading:
            self._tell()
            body = self._told[1]
        self.latest = (self.latest[0] + 1, body)

    def _tell(self) -> None:
        told = self._read(full=True)
        body = json.dumps(told, separators=(",", ":"), allow_nan=False).encode()
        self._told, self._told_s = (bool(told["source"]["up"]), body), time.monotonic()

    def _run(self) -> None:
        sampled_s = -EVERY_S
        pending: Future[None] | None = None
        while not self._stop.wait(TICK_S):
            if pending is not None and not pending.done():
                continue  # a daemon that hangs: its figures come when it answers
            if pending is not None and (fault := pending.exception()) is not None:
                self._complain(fault)
            due = time.monotonic() - sampled_s >= EVERY_S - TICK_S / 2
            if self._listeners or due:
                sampled_s = time.monotonic() if due else sampled_s
                pending = self._pool.submit(self._tick, due)

    def _tick(self, due: bool) -> None:
        if self._listeners:
            self.publish()
        else:
            with self._reading:
                self._read(full=False)
        if due:
            self.history.add(self._last)

    def _read(self, *, full: bool) -> dict[str, Any]:
        told = self.source.read(full=full)
        sample = sample_of(told, time.time(), self._last.epoch)
        if sample.totals:
            if not grew(self._known, sample):
                sample = Sample(sample.at_s, sample.epoch + 1, sample.totals, sample.places)
            self._known = sample
        self._last = sample
        told["source"]["epoch"] = sample.epoch
        told["at_s"] = sample.at_s
        told["sample"] = {
            "at_s": sample.at_s, "epoch": sample.epoch, "totals": sample.totals, "places": sample.places
        }  # fmt: skip
        return told

    def _complain(self, fault: BaseException) -> None:
        if time.monotonic() - self._complained_s >= _QUIET_S:
            self._complained_s = time.monotonic()
            _log.error("the dashboard could not read its figures: %s", place_of(fault))
