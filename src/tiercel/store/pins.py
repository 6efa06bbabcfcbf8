"""Which blocks are kept from eviction, and until when. A pin always ends by itself.

Locking: none here; the store's lock protects it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

from tiercel.blocks import BlockKey
from tiercel.store.policy.hints import PIN_S_MAX


class Pins:
    """At most `room` pinned blocks, each until a moment of the monotonic clock."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._until_s: dict[BlockKey, float] = {}
        # No pin ends before. Whoever asks for figures must not walk through all of them under the lock.
        self._none_ends_before_s = math.inf

    def __contains__(self, key: BlockKey) -> bool:
        until_s = self._until_s.get(key)
        return until_s is not None and time.monotonic() < until_s

    def count(self) -> int:
        """How many blocks are pinned now."""
        now_s = time.monotonic()
        if now_s >= self._none_ends_before_s:
            self._until_s = {key: until_s for key, until_s in self._until_s.items() if now_s < until_s}
            self._none_ends_before_s = min(self._until_s.values(), default=math.inf)
        return len(self._until_s)

    def add(self, keys: Sequence[BlockKey], ttl_s: float) -> int:
        """Pin blocks in order, as far as there is room, for a day at most. Returns how many."""
        self.count()
        until_s = time.monotonic() + min(PIN_S_MAX, ttl_s)
        self._none_ends_before_s = min(self._none_ends_before_s, until_s)
        for pinned, key in enumerate(keys):
            if key not in self._until_s and len(self._until_s) >= self._room:
                return pinned
            self._until_s[key] = max(until_s, self._until_s.get(key, 0.0))
        return len(keys)

    def end(self, keys: Iterable[BlockKey]) -> None:
        """End the pins of some blocks."""
        for key in keys:
            self._until_s.pop(key, None)

    def clear(self, tag: bytes | None) -> None:
        """End the pins of a scope, or all."""
        self._until_s = {
            key: until_s for key, until_s in self._until_s.items() if tag and not key.startswith(tag)
        }
