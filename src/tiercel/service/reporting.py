"""What an engine reports, on its way to the daemon: queued, sent by a thread of its own, a few at once.

Whoever reports never waits and never sees a fault: what finds the queue full or the daemon away is lost, and
the daemon is told how many were.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import msgspec

from tiercel.store import Decision
from tiercel.store.workers import Workers

_WAITING_MAX = 256
_AT_ONCE = 64
# What is reported just before the end gets this long to be sent.
_LAST_S = 0.5

Send = Callable[[tuple[Decision, ...], int], bool]


class Reporting:
    """Hands decisions to `send(decisions, lost)`, which says whether they arrived."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._waiting: deque[Decision] = deque()
        self._lost = 0
        self._sending = False
        self._sender = Workers("report", 1, 1)

    def add(self, decision: Decision) -> Decision:
        """Queue one. Returns it, dated now."""
        decision = replace(decision, at_s=time.time())
        with self._lock:
            if len(self._waiting) >= _WAITING_MAX or not _can_be_sent(decision):
                self._lost += 1
            else:
                self._waiting.append(decision)
        # Refused while an earlier task waits, which then takes this one along.
        self._sender.submit(self._run)
        return decision

    def close(self) -> None:
        """Send what waits, if that is quick."""
        until_s = time.monotonic() + _LAST_S
        while (self._waiting or self._sending) and time.monotonic() < until_s:
            time.sleep(0.005)
        self._sender.close()

    def _run(self) -> None:
        while True:
            with self._lock:
                batch = tuple(self._waiting.popleft() for _ in range(min(len(self._waiting), _AT_ONCE)))
                lost, self._lost = self._lost, 0
                self._sending = bool(batch or lost)
            if not self._sending:
                return
            if not self._send(batch, lost):
                with self._lock:
                    self._lost += lost + len(batch)
                    self._sending = False
                return


def _can_be_sent(decision: Decision) -> bool:
    """Whether it is made of what a message is made of; whoever made it otherwise must not hear of it."""
    try:
        msgspec.msgpack.encode(decision)
    except (TypeError, ValueError, OverflowError):
        return False
    return True
