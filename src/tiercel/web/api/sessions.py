"""Which blocks the last request of a session left, so that they can be steered by the session's name.

Keeps names of blocks, never tokens or texts. Bounded by number, by blocks and by age; the session not used
for longest goes first. A session belongs to the salt it was used with and is not found under another.

Locking: one lock, for the table only.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from tiercel.blocks import Chain

_SESSIONS_MAX = 1024
# About 100 bytes each.
_BLOCKS_MAX = 1 << 17
_AGE_S_MAX = 86400.0


class Sessions:
    """Chains by salt and session. `clock` gives seconds that only grow."""

    def __init__(
        self,
        sessions_max: int = _SESSIONS_MAX,
        blocks_max: int = _BLOCKS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sessions_max, self._blocks_max, self._clock = sessions_max, blocks_max, clock
        self._lock = threading.Lock()
        self._table: OrderedDict[tuple[str | None, str], tuple[Chain, float]] = OrderedDict()
        self._blocks = 0

    def __len__(self) -> int:
        return len(self._table)

    def note(self, salt: str | None, session: str, chain: Chain) -> None:
        """A session's latest prompt, with its answer as far as it is known, has these blocks."""
        now_s = self._clock()
        with self._lock:
            self._forget_locked((salt, session))
            self._table[salt, session] = (chain, now_s)
            self._blocks += len(chain)
            while self._table and self._over_locked(now_s):
                self._forget_locked(next(iter(self._table)))

    def chain(self, salt: str | None, session: str) -> Chain | None:
        """What a session left; None if it is not known, or no more."""
        now_s = self._clock()
        with self._lock:
            known = self._table.get((salt, session))
            if known is None or now_s - known[1] > _AGE_S_MAX:
                return None
            self._table.move_to_end((salt, session))
            self._table[salt, session] = (known[0], now_s)
            return known[0]

    def forget(self, salt: str | None, session: str) -> None:
        """A session was dropped."""
        with self._lock:
            self._forget_locked((salt, session))

    def _over_locked(self, now_s: float) -> bool:
        _, used_s = next(iter(self._table.values()))
        too_many = len(self._table) > self._sessions_max or self._blocks > self._blocks_max
        return too_many or now_s - used_s > _AGE_S_MAX

    def _forget_locked(self, name: tuple[str | None, str]) -> None:
        chain, _ = self._table.pop(name, (None, 0.0))
        self._blocks -= 0 if chain is None else len(chain)
