"""A circuit breaker: stop asking a tier that keeps failing, and probe it again later. Has no clock."""

from __future__ import annotations

from enum import Enum


class BreakerState(Enum):
    """CLOSED lets everything through, OPEN nothing, PROBING one call at a time until one has decided."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Breaker:
    """Opens after `failures_max` failures in a row; a failed probe doubles the pause up to `pause_max_s`."""

    def __init__(self, failures_max: int = 3, pause_s: float = 1.0, pause_max_s: float = 60.0) -> None:
        self._failures_max = failures_max
        self._first_pause_s = pause_s
        self._pause_max_s = pause_max_s
        self._pause_s = pause_s
        self._failures = 0
        self._open_until_s: float | None = None
        self._probe_out = False

    @property
    def probe_out(self) -> bool:
        """Whether a call is out that may decide."""
        return self._probe_out

    def state(self, now_s: float) -> BreakerState:
        """The state at `now_s`, a monotonic time in seconds."""
        if self._open_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._open_until_s else BreakerState.PROBING

    def allows(self, now_s: float) -> bool:
        """Whether a call may be made now."""
        state = self.state(now_s)
        return state is BreakerState.CLOSED or (state is BreakerState.PROBING and not self._probe_out)

    def begin(self, now_s: float) -> bool:
        """A call that `allows` allowed is made. True if it is a probe: `ended` must follow its outcome."""
        self._probe_out |= self.state(now_s) is BreakerState.PROBING
        return self._probe_out

    def ended(self) -> None:
        """The probe is over, whatever it showed."""
        self._probe_out = False

    def succeeded(self) -> None:
        """A call went well: closed again, counts forgotten."""
        self._failures = 0
        self._open_until_s = None
        self._pause_s = self._first_pause_s

    def answered(self, now_s: float) -> None:
        """A call did not do what it should, but the tier is there: a probe closes, on approval."""
        if self.state(now_s) is BreakerState.PROBING:
            self._open_until_s = None
            self._failures = self._failures_max - 1

    def failed(self, now_s: float) -> bool:
        """A call failed. Returns True when this opens the breaker (also again, after a failed probe)."""
        self._failures += 1
        if self.state(now_s) is BreakerState.OPEN or self._failures < self._failures_max:
            return False
        self._open_until_s = now_s + self._pause_s
        self._pause_s = min(self._pause_s * 2, self._pause_max_s)
        return True
