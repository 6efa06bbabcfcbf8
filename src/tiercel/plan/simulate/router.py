"""Which host a request goes to: anywhere, or where its prefix is and the queue is short."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence

from tiercel.plan.simulate.costs import Fleet

Expect = Callable[[int, Sequence[int]], float]
"""(host, chain) → expected seconds until that host would have the first token."""

OWNERS_TRIED = 3
OTHERS_TRIED = 2


class Route:
    """Picks hosts; deterministic for a seed.

    The prefix-aware router remembers which host last served each run. It compares the hosts that last
    served the deepest known runs of the chain with two drawn at random (so that a hot prefix spreads when
    its host falls behind), and takes the one that expects the earliest first token.
    """

    def __init__(self, fleet: Fleet, run_count: int) -> None:
        self._hosts = fleet.hosts
        self._prefix_aware = fleet.router == "prefix" and fleet.hosts > 1
        self._random = random.Random(fleet.seed)
        self._owner = array("i", [-1]) * (run_count if self._prefix_aware else 0)

    def pick(self, chain: Sequence[int], expect: Expect) -> int:
        """Return the host for a request with this chain."""
        if self._hosts == 1:
            return 0
        if not self._prefix_aware:
            return self._random.randrange(self._hosts)
        candidates = self._owners(chain)
        for _ in range(OTHERS_TRIED):
            candidates.append(self._random.randrange(self._hosts))
        host = min(dict.fromkeys(candidates), key=lambda h: expect(h, chain))
        for run in chain:
            self._owner[run] = host
        return host

    def _owners(self, chain: Sequence[int]) -> list[int]:
        owners: list[int] = []
        for run in reversed(chain):
            owner = self._owner[run]
            if owner >= 0 and owner not in owners:
                owners.append(owner)
                if len(owners) == OWNERS_TRIED:
                    break
        return owners
