"""Which blocks the last request of a session left, so that they can be steered by the session's name.

Keeps names of blocks, never tokens or texts. Bounded by number, by blocks and by age; the session not used
for longest goes first. A session belongs to the tenant it was used for and is not found for another; tenants
are told apart by a digest of their salt, so that no salt is kept here or sent to a daemon.

Locking: one lock, for the table only.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b

from tiercel.blocks import Chain

_SESSIONS_MAX = 1024
# About 100 bytes each.
BLOCKS_MAX = 1 << 17
# Of one session: one for each model and rank it was used with of late.
_CHAINS_MAX = 64
_AGE_S_MAX = 86400.0


def tenant_of(salt: str | None) -> bytes:
    """The tenant that a cache salt stands for; empty for none."""
    if salt is None:
        return b""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16, person=b"tiercel-tenant").digest()


class Sessions:
    """Chains by tenant and session: one, or one for each part of a model that is split over ranks.

    `clock` gives seconds that only grow.
    """

    def __init__(
        self,
        sessions_max: int = _SESSIONS_MAX,
        blocks_max: int = BLOCKS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sessions_max, self._blocks_max, self._clock = sessions_max, blocks_max, clock
        self._lock = threading.Lock()
        self._table: OrderedDict[tuple[bytes, str], tuple[tuple[Chain, ...], float]] = OrderedDict()
        self._blocks = 0

    def __len__(self) -> int:
        return len(self._table)

    def note(self, tenant: bytes, session: str, chains: Sequence[Chain]) -> None:
        """What a session's latest prompt left, its answer too as far as it is known; nothing: forget it.

        What it left in other scopes, as with another model, stays.
        """
        now_s = self._clock()
        with self._lock:
            chains = self._with_others_locked((tenant, session), chains, now_s)
            self._forget_locked((tenant, session))
            if not chains:
                return
            self._table[tenant, session] = (tuple(chains), now_s)
            self._blocks += _blocks(chains)
            while self._table and self._over_locked(now_s):
                self._forget_locked(next(iter(self._table)))

    def chains(self, tenant: bytes, session: str) -> tuple[Chain, ...]:
        """What a session left; empty if it is not known, or no more."""
        now_s = self._clock()
        with self._lock:
            known = self._table.get((tenant, session))
            if known is None or now_s - known[1] > _AGE_S_MAX:
                return ()
            self._table.move_to_end((tenant, session))
            self._table[tenant, session] = (known[0], now_s)
            return known[0]

    def _with_others_locked(
        self, name: tuple[bytes, str], chains: Sequence[Chain], now_s: float
    ) -> Sequence[Chain]:
        known, used_s = self._table.get(name, ((), now_s))
        if not chains or now_s - used_s > _AGE_S_MAX:
            return chains
        roots, blocks, all_of_them = {chain.root for chain in chains}, _blocks(chains), list(chains)
        for other in known:
            blocks += len(other)
            if other.root not in roots and blocks <= self._blocks_max and len(all_of_them) < _CHAINS_MAX:
                all_of_them.append(other)
        return all_of_them

    def _over_locked(self, now_s: float) -> bool:
        _, used_s = next(iter(self._table.values()))
        too_many = len(self._table) > self._sessions_max or self._blocks > self._blocks_max
        return too_many or now_s - used_s > _AGE_S_MAX

    def _forget_locked(self, name: tuple[bytes, str]) -> None:
        chains, _ = self._table.pop(name, ((), 0.0))
        self._blocks -= _blocks(chains)


def _blocks(chains: Sequence[Chain]) -> int:
    return sum(len(chain) for chain in chains)
