"""What came to and left each place lately, for those who keep a picture of it (routers, engines).

A bounded ring with running numbers: a listener asks for what follows the number it was given last, and is
told when it was too slow, or when the number is one of another store's. Costs nothing until somebody listens.
Not a record of truth: a lookup is.

Locking: the store's lock protects it.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass
from itertools import islice

from tiercel.blocks import BlockKey

_EVENTS_MAX = 1 << 16
_ANSWER_MAX = 4096
_START_BITS = 48


@dataclass(frozen=True, slots=True)
class Event:
    """A block came to (`stored`) or left `place`, which is `ram` or a tier's name."""

    stored: bool
    key: BlockKey
    place: str


@dataclass(frozen=True, slots=True)
class Events:
    """What happened; ask again with `next`. `lost`: some events before these are not known any more."""

    next: int
    events: tuple[Event, ...] = ()
    lost: bool = False


class Journal:
    """The last events of one store."""

    def __init__(self) -> None:
        self._ring: deque[Event] = deque(maxlen=_EVENTS_MAX)
        # Anywhere, so that a number of the daemon before this one is not taken for one of ours.
        self._next = 1 + secrets.randbits(_START_BITS)
        self._listening = False

    def note(self, key: BlockKey, place: str, *, stored: bool) -> None:
        """Write down one change, if anybody ever asked."""
        if self._listening:
            self._ring.append(Event(stored, key, place))
            self._next += 1

    def since(self, after: int, tag: bytes) -> Events:
        """Events of one scope from number `after` on; 0 is for who has heard nothing yet.

        The first call ever begins the writing down.
        """
        self._listening = True
        first = self._next - len(self._ring)
        start = min(max(after, first), self._next)
        part = islice(self._ring, start - first, start - first + _ANSWER_MAX)
        seen = tuple(part)
        mine = tuple(event for event in seen if event.key.startswith(tag))
        return Events(start + len(seen), mine, lost=bool(after) and after != start)
