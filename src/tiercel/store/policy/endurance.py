"""How much may be written to a tier: a daily budget, so that a disk lasts as long as it is meant to.

A token bucket: it fills with the day's bytes evenly over the day and holds an hour's share at most. What one
block takes beyond what is there is owed, so the rate over any longer time is exact also for blocks larger
than an hour's share. Begins full whenever the store opens. The clock is the caller's.

Locking: the store's lock protects it.
"""

from __future__ import annotations

_DAY_S, _HOUR_S = 86400.0, 3600.0


class WriteBudget:
    """`day_bytes` of records may be written per day."""

    def __init__(self, day_bytes: int, now_s: float) -> None:
        self._per_s = day_bytes / _DAY_S
        self._most = self._per_s * _HOUR_S
        self._left = self._most
        self._at_s = now_s

    def affords(self, record_bytes: int, now_s: float) -> bool:
        """Whether a record may be written now."""
        self._left = min(self._most, self._left + max(0.0, now_s - self._at_s) * self._per_s)
        self._at_s = max(self._at_s, now_s)
        return self._left >= min(record_bytes, self._most)

    def spend(self, record_bytes: int) -> None:
        """A record goes on its way."""
        self._left -= record_bytes

    def give_back(self, record_bytes: int) -> None:
        """It was not written after all."""
        self._left = min(self._most, self._left + record_bytes)
