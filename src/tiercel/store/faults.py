"""Faults we survive on purpose: logged at most once a minute per kind, kept for who looks, counted elsewhere.

Noting and logging are apart, because faults are noted under the store's lock and a log may block.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from dataclasses import replace

from tiercel.store.figures import Fault

log = logging.getLogger("tiercel")
_QUIET_S = 60.0
_WAITING_MAX = 64
# There are about ten kinds for each tier.
_KINDS_MAX = 256
_TEXT_CHARS_MAX = 300


class FaultLog:
    """One warning per kind of fault per minute, with how many were held back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_s: dict[str, float] = {}
        self._held_back: dict[str, int] = {}
        self._waiting: deque[str] = deque(maxlen=_WAITING_MAX)
        self._seen: OrderedDict[str, Fault] = OrderedDict()

    def note(self, kind: str, text: str) -> None:
        """Put `text` up for logging unless a fault of this kind (`tier.what`) was within the last minute."""
        now_s = time.monotonic()
        with self._lock:
            self._keep(kind, text)
            if now_s - self._last_s.get(kind, -_QUIET_S) < _QUIET_S:
                self._held_back[kind] = self._held_back.get(kind, 0) + 1
                return
            self._last_s[kind] = now_s
            held_back = self._held_back.pop(kind, 0)
            more = f" ({held_back} more of this kind before)" if held_back else ""
            self._waiting.append(text + more)

    def latest(self) -> tuple[Fault, ...]:
        """Every kind of fault that was seen, the latest first."""
        with self._lock:
            return tuple(reversed(self._seen.values()))

    def emit(self) -> None:
        """Log what was noted. Call it without holding a lock."""
        while self._waiting:
            try:
                log.warning("%s", self._waiting.popleft())
            except IndexError:
                return

    def _keep(self, kind: str, text: str) -> None:
        tier, _, what = kind.rpartition(".")
        before = self._seen.pop(kind, None) or Fault(what, tier, "", 0, 0.0)
        self._seen[kind] = replace(
            before, text=text[:_TEXT_CHARS_MAX], count=before.count + 1, at_s=time.time()
        )
        if len(self._seen) > _KINDS_MAX:
            self._seen.popitem(last=False)
