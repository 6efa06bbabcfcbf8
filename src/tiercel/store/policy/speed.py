"""How fast a tier brings blocks up, learned from its reads.

Two figures, both medians of the last few reads, so that one stall is no verdict and a lasting change is
believed after two or three: the time one read takes alone, and among as many as may be under way at once.
Either bounds the other: alone a read takes no longer than in company, and with n under way nothing comes more
than n times as fast. So whichever was seen last corrects the other, that may not have been seen for long. A
read that is still out counts for at least the time it has taken: a tier that hangs is slow now, not when it
answers. Knows no tier; the clock is the caller's.

Locking: the store's lock protects it.
"""

from __future__ import annotations

from collections import deque
from statistics import median

_LATEST = 5
# Until it was read once, a tier is believed to be a middling disk: one request finds out.
_READ_S_AT_FIRST = 0.005
# A read in so small a share of the usual time is no accident: the tier may have become fast.
_PROMISING_SHARE = 0.5


class TierSpeed:
    """Read times of one tier with `workers` reads at a time."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._alone_s: deque[float] = deque(maxlen=_LATEST)
        self._among_s: deque[float] = deque(maxlen=_LATEST)
        self._among_last = False
        self._last_s = 0.0
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
        self._among_last = company >= self._workers > 1
        (self._among_s if self._among_last else self._alone_s).append(each_s)
        self._last_s = each_s
        self.observed += 1
        self.observed_at_s = now_s

    def read_s(self, now_s: float) -> float:
        """Expected time of one read, alone."""
        return max(self._usual_alone_s(), self._hanging_s(now_s))

    def gap_s(self, now_s: float) -> float:
        """Expected time between two blocks when many are asked for."""
        return max(self._usual_gap_s(), self._hanging_s(now_s) / self._workers)

    def promising(self) -> bool:
        """Whether the last read was so much faster than what is usual that more should be tried."""
        return 0.0 < self._last_s < _PROMISING_SHARE * self._usual_alone_s()

    def seconds(self, blocks: int, queued: int, now_s: float) -> float:
        """Expected time until `blocks` blocks are up, with `queued` others asked for before them."""
        if blocks <= 0:
            return 0.0
        return self.read_s(now_s) + (queued + blocks - 1) * self.gap_s(now_s)

    def _usual_alone_s(self) -> float:
        if not self._alone_s:
            return min(self._among_s) if self._among_s else _READ_S_AT_FIRST
        usual_s = median(self._alone_s)
        if not self._among_last:
            return usual_s
        among_s = median(self._among_s)
        return min(max(usual_s, among_s / self._workers), among_s)

    def _usual_gap_s(self) -> float:
        if not self._among_s:
            # Never seen together: believe in no gain from asking for several at once.
            return self._usual_alone_s()
        gap_s = median(self._among_s) / self._workers
        if self._among_last or not self._alone_s:
            return gap_s
        alone_s = median(self._alone_s)
        return min(max(gap_s, alone_s / self._workers), alone_s)

    def _hanging_s(self, now_s: float) -> float:
        return max((now_s - began_s for began_s, _ in self._out.values()), default=0.0)
