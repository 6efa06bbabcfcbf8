"""How many requests an object store gets from us at once: fewer when it asks to slow down, more again later.

Knows nothing of requests: whoever makes one enters before and leaves after it, and says how it went.
"""

from __future__ import annotations

import threading
import time
from collections import deque


class Pace:
    """At most `most` at once. Each refusal halves that and lets nobody start for a while; each success
    gives a little back (one more after a full round of them). Turns are taken in the order of asking: who
    comes back at once would else be in again before those who wait have woken.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = float(most)
        self._running = 0
        self._resume_s = 0.0
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.slowed = 0

    @property
    def limit(self) -> int:
        """How many may be under way at once now."""
        return int(self._limit)

    def enter(self, until_s: float) -> bool:
        """Wait for a turn until the monotonic time `until_s`. False: there was none, or it is closed."""
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            try:
                return self._my_turn(turn, until_s)
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()

    def _my_turn(self, turn: object, until_s: float) -> bool:
        while not self._closed and (now_s := time.monotonic()) < until_s:
            resume_s = self._resume_s
            if now_s < resume_s:
                self._changed.wait(min(resume_s, until_s) - now_s)
            elif self._waiting[0] is turn and self._running < self.limit:
                self._running += 1
                return True
            else:
                self._changed.wait(until_s - now_s)
        return False

    def leave(self) -> None:
        """End a turn."""
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def went_well(self) -> None:
        """A request succeeded."""
        with self._changed:
            self._limit = min(self._most, self._limit + 1 / self._limit)

    def slow_down(self, pause_s: float) -> None:
        """The place said it is too much. What is refused in the same pause counts once."""
        with self._changed:
            now_s = time.monotonic()
            if now_s >= self._resume_s:
                self._limit = max(1.0, self._limit / 2)
                self._resume_s = now_s + pause_s
                self.slowed += 1

    def wait(self, pause_s: float) -> None:
        """Sleep, but not beyond the closing."""
        until_s = time.monotonic() + pause_s
        with self._changed:
            self._changed.wait_for(lambda: self._closed, max(0.0, until_s - time.monotonic()))

    def close(self) -> None:
        """Let nobody in any more, and wake all who wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
