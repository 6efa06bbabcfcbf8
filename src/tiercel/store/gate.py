"""Whether a tier may be called now: not while it is broken, being probed, or stuck in an earlier call.

Locking: all but the two context managers is called under the store's lock, which those take themselves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tiercel.store.breaker import Breaker
from tiercel.store.faults import FaultLog

# Those who wait for a probe to end look up this often, for one that hangs tells nobody.
_WAKE_S = 0.25


class Gate:
    """The breaker of one tier and the calls that are out. A call of more than `deadline_s` is a stall."""

    def __init__(self, lock: threading.Condition, deadline_s: float, faults: FaultLog) -> None:
        self.breaker = Breaker()
        self.closed = False
        self._lock = lock
        self._deadline_s = deadline_s
        self._faults = faults
        self._running: dict[int, float] = {}

    def available(self, now_s: float) -> bool:
        """Whether a call may be made now: open, not broken nor being probed, not stuck in an earlier call."""
        return not self.closed and self.breaker.allows(now_s) and not self.stuck(now_s)

    def hopeless(self, now_s: float) -> bool:
        """Whether what waits to be moved waits in vain. While the tier is being probed it does not."""
        return not self.available(now_s) and not (self.breaker.probe_out and not self.stuck(now_s))

    def stuck(self, now_s: float) -> bool:
        """Whether some call is out for longer than the deadline."""
        return bool(self._running) and now_s - min(self._running.values()) >= self._deadline_s

    @contextmanager
    def permit(self, wait: bool = True) -> Iterator[bool]:
        """Whether a call may be made. While one probes the tier, others wait for what it shows."""
        with self._lock:
            while wait and self.breaker.probe_out and not self.closed:
                if self.stuck(time.monotonic()):
                    break
                self._lock.wait(_WAKE_S)
            now_s = time.monotonic()
            permitted = self.available(now_s)
            probe = permitted and self.breaker.begin(now_s)
        try:
            yield permitted
        finally:
            if probe:
                with self._lock:
                    self.breaker.ended()
                    self._lock.notify_all()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Note when a call began, so that one that hangs closes the gate; log what was noted meanwhile."""
        call = object()
        with self._lock:
            self._running[id(call)] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                del self._running[id(call)]
            self._faults.emit()
