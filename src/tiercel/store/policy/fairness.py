"""Whose blocks go when a place is full and several scopes share it: quotas that nobody has to set.

A scope is a model as one tenant (salt) and adapter sees it. The least recently used block goes, whosever it
is; but a scope that holds no more than an equal share keeps what it has used of late. So a scope that floods
replaces its own blocks, what one leaves of its share others may use, and what lies idle has no share. A lone
scope is alone with its own least recently used blocks; among very many, as when each user has a salt, an
equal share would be less than a prompt and recency alone decides. Knows sizes only, no key, clock or lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice

# Of late: until as many blocks as the place holds, times this, were used. A block that is stored counts about
# three times: found missing, asked for, written.
KEPT_TURNS = 8
# Beyond so many scopes there are no shares, and only those used least recently are looked at.
_COMPARED = 64


class Shares:
    """What each scope (by tag) holds of a place, in any unit, the least recently used scope first."""

    def __init__(self) -> None:
        self._held: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def held(self, tag: bytes) -> int:
        """What a scope holds."""
        return self._held.get(tag, 0)

    def latest(self, limit: int) -> list[tuple[bytes, int]]:
        """At most `limit` scopes with what they hold, the latest used first."""
        return list(islice(reversed(self._held.items()), limit))

    def add(self, tag: bytes, amount: int) -> None:
        """A scope holds so much more, or less."""
        self._held[tag] = self.held(tag) + amount

    def forget(self, tag: bytes) -> None:
        """A scope holds nothing any more."""
        self._held.pop(tag, None)

    def touch(self, tag: bytes) -> None:
        """A scope is used."""
        if tag in self._held:
            self._held.move_to_end(tag)

    def compared(self, asking: Mapping[bytes, int]) -> list[bytes]:
        """The scopes whose blocks to compare when some are `asking` for room."""
        tags = dict.fromkeys(islice(self._held, _COMPARED))
        tags.update(dict.fromkeys(tag for tag in asking if tag in self._held))
        return list(tags)

    def above(self, tag: bytes, room: int, asking: Mapping[bytes, int], lost: int = 0) -> bool:
        """Whether a scope holds more than an equal share of `room`, but for what it has `lost` by now.

        What scopes are `asking` for counts as held.
        """
        scopes = len(self._held) + sum(one not in self._held for one in asking)
        return scopes > _COMPARED or (self.held(tag) + asking.get(tag, 0) - lost) * scopes > room
