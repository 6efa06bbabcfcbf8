"""A tier whose place did not answer when it was to be opened: opens it when it can, and fails until then.

Has no thread and no clock of its own. Every use tries to open again, one at a time; the store's breaker
decides how often a failing tier is used at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from tiercel.blocks import BlockKey
from tiercel.errors import TierError
from tiercel.tiers.base import Fate, Outcome, Stored, Tier, Usage


class Reopening:
    """The `Tier` that `opening` returns, as soon as it does. `reason` is why it did not so far."""

    def __init__(self, name: str, opening: Callable[[], Tier], reason: str) -> None:
        self._name = name
        self._opening = opening
        self._reason = reason
        self._tier: Tier | None = None
        self._closed = False
        # Held while opening, which may take the tier's deadline; nobody waits for it but `close`.
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self._name

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        tier = self._opened()
        return tier.contains(keys) if tier else [False] * len(keys)

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        tier = self._opened()
        return tier.read(keys, records) if tier else self._failed(keys)

    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        tier = self._opened()
        return tier.write(keys, records) if tier else self._failed(keys)

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        tier = self._opened()
        return tier.delete(keys) if tier else self._failed(keys)

    def scan(self) -> Iterator[Stored]:
        tier = self._opened()
        if tier is None:
            raise OSError(self._reason)
        yield from tier.scan()

    def usage(self) -> Usage:
        return self._tier.usage() if self._tier else Usage()

    def close(self) -> None:
        """Close what was opened. Waits for an attempt under way, which ends within the tier's deadline."""
        self._closed = True
        with self._lock:
            self._reason = "closed"
            if self._tier is not None:
                self._tier.close()

    def _opened(self) -> Tier | None:
        if self._tier is not None:
            return self._tier
        if self._closed or not self._lock.acquire(blocking=False):
            return None
        try:
            if self._tier is None and not self._closed:
                self._tier = self._opening()
            return self._tier
        except TierError as fault:
            self._reason = str(fault)
            return None
        finally:
            self._lock.release()

    def _failed(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return [Outcome(Fate.FAILED, self._reason)] * len(keys)
