"""Which blocks follow which, as far as the traffic has shown: so that what prompts share is told apart.

The store itself needs no tree (see docs/architecture.md); only who wants to forget or put away one prompt
must know where others branch off. Keeps the latest parents, each with its latest children, and nothing else.

Locking: none here; the store's lock protects it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from tiercel.blocks import BlockKey

# About 300 bytes each.
_PARENTS_MAX = 1 << 16
_CHILDREN_MAX = 8


class Family:
    """Children by parent, of the latest `parents_max` parents."""

    def __init__(self, parents_max: int = _PARENTS_MAX) -> None:
        self._parents_max = parents_max
        self._children: OrderedDict[BlockKey, tuple[BlockKey, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._children)

    def note(self, keys: Sequence[BlockKey]) -> None:
        """Each of these blocks follows the one before it."""
        for at in range(1, len(keys)):
            parent, child = keys[at - 1], keys[at]
            known = self._children.pop(parent, ())
            if child not in known:
                known = (*known[1 - _CHILDREN_MAX :], child)
            self._children[parent] = known
        while len(self._children) > self._parents_max:
            self._children.popitem(last=False)

    def latest(self, limit: int) -> list[tuple[BlockKey, tuple[BlockKey, ...]]]:
        """At most `limit` parents with their children, the latest used first."""
        return list(islice(reversed(self._children.items()), limit))

    def own(self, keys: Sequence[BlockKey], cached: Callable[[BlockKey], bool]) -> list[BlockKey]:
        """The blocks of a chain that are nobody else's, in order, with the cached ones that go on from it.

        A block with two cached children, and all before it, are others' too. None are the chain's own if its
        end is such a block: it is then the beginning of several prompts.
        """
        line = list(keys)
        while line and len(following := self._cached_children(line[-1], cached)) == 1:
            line += following
        return line[self._own_from(line, len(line), cached) :]

    def own_and_after(self, keys: Sequence[BlockKey], cached: Callable[[BlockKey], bool]) -> list[BlockKey]:
        """The blocks of a chain that are no other chain's beginning, and every cached one that follows it."""
        found = list(keys[self._own_from(keys, len(keys) - 1, cached) :])
        at = len(found) - 1 if found else 0
        while at < len(found):
            found += self._cached_children(found[at], cached)
            at += 1
        return found

    def _own_from(self, line: Sequence[BlockKey], stop: int, cached: Callable[[BlockKey], bool]) -> int:
        """The block behind the last one before `stop` from which another chain branches off."""
        for at in range(stop - 1, -1, -1):
            if any(child not in line[at + 1 : at + 2] for child in self._cached_children(line[at], cached)):
                return at + 1
        return 0

    def _cached_children(self, key: BlockKey, cached: Callable[[BlockKey], bool]) -> list[BlockKey]:
        return [child for child in self._children.get(key, ()) if cached(child)]
