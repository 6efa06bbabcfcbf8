"""Which blocks are worth keeping at all: those that were asked to be stored before.

Most prompts of some traffic are never seen again. Storing them costs copies, RAM and wear of a disk, and
pushes out what would have been used. Second sight stores a block when its key comes by for the second time
within a window; the first costs 8 bytes and no I/O. What it remembers are fingerprints, never keys or tokens.

Locking: the store's lock protects it.
"""

from __future__ import annotations

from array import array
from enum import StrEnum

from tiercel.blocks import BlockKey

_KEYS = 1 << 18
# Ways of a set: with 16, less than one in a million of the latest quarter of all keys is forgotten early.
_WAYS = 16
_MARK_BYTES = 8


class Sight(StrEnum):
    """What a request to store blocks says of them.

    `NEW`: a request that comes by. `AGAIN`: the same request tries once more, which is no second sight.
    `SURE`: they will be used again, so they are stored at once. `LOW`: a request comes by that others come
    before: its blocks are kept in RAM alone, and go first there.
    """

    NEW = "new"
    AGAIN = "again"
    SURE = "sure"
    LOW = "low"


_COMES_BY = (Sight.NEW, Sight.LOW)


class SecondSight:
    """Remembers about the latest `keys` keys seen, in 8 bytes each: 2 MiB by default.

    A table of sets of 16 marks, the latest first; a mark is 63 bits of a key, and one bit that says whether
    it was admitted before. Which keys are forgotten first is a matter of chance from a quarter of `keys` on.
    """

    def __init__(self, keys: int = _KEYS) -> None:
        self._sets = max(1, keys // _WAYS)
        self._marks = array("Q", bytes(_MARK_BYTES * self._sets * _WAYS))

    @property
    def memory_bytes(self) -> int:
        """What it takes, whatever it has seen."""
        return self._marks.itemsize * len(self._marks)

    def admits(self, key: BlockKey, sight: Sight = Sight.NEW) -> bool:
        """Whether a block is to be stored; remembers that it was seen. About a microsecond."""
        # The first 8 bytes of a key are its scope's, the others a cryptographic hash.
        once = int.from_bytes(key[8:16], "little") & ~1
        start = int.from_bytes(key[16:20], "little") % self._sets * _WAYS
        marks = self._marks[start : start + _WAYS]
        known = next((mark for mark in (once | 1, once) if mark in marks), None)
        admitted = sight is Sight.SURE or known == once | 1 or (known == once and sight in _COMES_BY)
        if known is None:
            marks.pop()
        else:
            marks.remove(known)
        marks.insert(0, once | admitted)
        self._marks[start : start + _WAYS] = marks
        return admitted
