"""Whose blocks go when a place is full and several scopes share it: quotas that nobody has to set.

A scope is a model as one tenant (salt) and adapter sees it. First those lose that use the place no more, then
whoever holds most; nobody loses to a scope that would hold more than he does. So a scope that floods replaces
its own blocks once it has an equal share, and what one does not use of its share others may. A lone scope is
alone with its own least recently used blocks. Knows sizes and uses only, no key, clock or lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from math import inf

# A scope is in use until as many blocks as the place holds, times this, were used by others since. A block
# that is stored counts about three times: found missing, asked for, written.
ACTIVE_TURNS = 16
# Beyond so many scopes only those used least recently are compared, and the one that asks.
_COMPARED = 64
# A scope that holds at least this much of what the richest holds is soon to lose blocks, too.
_SOON_SHARE = 7 / 8


@dataclass(slots=True)
class _Holder:
    held: int = 0
    used: int = 0


class Shares:
    """What each scope (by tag) holds of a place, in any unit, and when it was last used, in uses."""

    def __init__(self) -> None:
        self._active: OrderedDict[bytes, _Holder] = OrderedDict()
        self._idle: OrderedDict[bytes, _Holder] = OrderedDict()

    def held(self, tag: bytes) -> int:
        """What a scope holds."""
        holder = self._active.get(tag) or self._idle.get(tag)
        return holder.held if holder else 0

    def add(self, tag: bytes, amount: int, now: int) -> None:
        """A scope holds so much more, or less. One that is new here counts as used now."""
        holder = self._active.get(tag) or self._idle.get(tag)
        if holder is None:
            holder = self._active[tag] = _Holder(used=now)
        holder.held += amount

    def forget(self, tag: bytes) -> None:
        """A scope holds nothing any more."""
        self._active.pop(tag, None)
        self._idle.pop(tag, None)

    def touch(self, tag: bytes, now: int) -> None:
        """A scope is used."""
        holder = self._active.get(tag)
        if holder is not None:
            holder.used = now
            self._active.move_to_end(tag)
        elif tag in self._idle:
            holder = self._active[tag] = self._idle.pop(tag)
            holder.used = now

    def rest(self, tag: bytes) -> None:
        """A scope is idle until it is used."""
        if tag in self._active:
            self._idle[tag] = self._active.pop(tag)

    def losers(self, asking: Mapping[bytes, int], idle_before: int) -> list[tuple[bytes, float]]:
        """Who may have to give way for what is `asking` for room, first to last, with what each holds.

        Scopes last used before `idle_before` come first and hold infinitely much. What is asked for counts
        as held already; those who would hold less than any who asks are left out.
        """
        while self._active and (first := next(iter(self._active.items())))[1].used < idle_before:
            self._active.popitem(last=False)
            self._idle[first[0]] = first[1]
        idle = [(tag, inf) for tag in islice(self._idle, _COMPARED)]
        compared = dict(islice(self._active.items(), _COMPARED))
        compared.update({tag: self._active[tag] for tag in asking if tag in self._active})
        levels = {tag: holder.held + asking.get(tag, 0) for tag, holder in compared.items()}
        floor = min((self.held(tag) + need for tag, need in asking.items()), default=0)
        ranked = sorted(levels.items(), key=lambda one: (-one[1], one[0] in asking))
        return idle + [(tag, level) for tag, level in ranked if level >= floor]

    def losing_soon(self, idle_before: int) -> set[bytes]:
        """Scopes of which blocks will go next, should anybody need room."""
        order = self.losers({}, idle_before)
        richest = max((level for _, level in order if level < inf), default=0.0)
        return {tag for tag, level in order if level >= _SOON_SHARE * richest}
