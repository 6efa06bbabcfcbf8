"""How fast a tier brings blocks up, learned from its reads.

Two figures, both medians of the last few reads, so that one stall is no verdict and a lasting change is
believed after two or three: the time one read takes, and the time between two blocks while several are under
way. A read that is still out counts for at least the time it has taken: a tier that hangs is slow now, not
when it answers. Knows no tier; the clock is the caller's.

Locking: the store's lock protects it.
"""

from __future__ import annotations

from collections import deque
from statistics import median

_LATEST = 5
# Until it was read once, a tier is believed to be a middling disk: one request finds out.
_READ_S_AT_FIRST = 0.005


class TierSpeed:
    """Read times of one tier with `workers` reads at a time."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._alone_s: deque[float] = deque(maxlen=_LATEST)
        self._among_s: deque[float] = deque(maxlen=_LATEST)
        self._out: dict[int, tuple[float, int]] = {}
        self._serial = 0
        self.observed = 0
        self.observed_at_s = 0.0

    def began(self, now_s: float) -> int:
        """A read begins; returns what `ended` is to be told."""
        self._serial += 1
        self._out[self._serial] = (now_s, len(self._out) + 1)
        return self._serial

    def ended(self, read: int, blocks: int, now_s: float) -> None:
        """A read of `blocks` blocks is over; 0 if it brought none, which says nothing of its speed."""
        began_s, company = self._out.pop(read)
        if not blocks or now_s < began_s:
            return
        each_s = (now_s - began_s) / blocks
        # With others under way it shared the tier with them, at the beginning or at the end.
        company = max(company, len(self._out) + 1)
        (self._among_s if company >= self._workers > 1 else self._alone_s).append(each_s)
        self.observed += 1
        self.observed_at_s = now_s

    def read_s(self, now_s: float) -> float:
        """Expected time of one read, alone."""
        usual_s = median(self._alone_s) if self._alone_s else self._least_among()
        return max(usual_s, self._hanging_s(now_s))

    def gap_s(self, now_s: float) -> float:
        """Expected time between two blocks when many are asked for."""
        if self._among_s:
            usual_s = median(self._among_s) / self._workers
        else:
            # Never seen together: believe in no gain from asking for several at once.
            usual_s = median(self._alone_s) if self._alone_s else self._least_among()
        return max(usual_s, self._hanging_s(now_s) / self._workers)

    def seconds(self, blocks: int, queued: int, now_s: float) -> float:
        """Expected time until `blocks` blocks are up, with `queued` others asked for before them."""
        if blocks <= 0:
            return 0.0
        return self.read_s(now_s) + (queued + blocks - 1) * self.gap_s(now_s)

    def _least_among(self) -> float:
        return min(self._among_s) if self._among_s else _READ_S_AT_FIRST

    def _hanging_s(self, now_s: float) -> float:
        return max((now_s - began_s for began_s, _ in self._out.values()), default=0.0)
