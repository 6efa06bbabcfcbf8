"""Putting one prompt away, forgetting one, and whatever else people and agents ask for by name.

`demote` and `drop` act on a prompt's own blocks: from where no other prompt that is cached branches off any
more, and on to what followed it, such as its answer. Neither raises for a fault of a tier. Called by the
store without its lock; waits end at their deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tiercel.blocks import BlockKey, Chain
from tiercel.store.leases import WriteLease
from tiercel.store.ram import Entry, State

if TYPE_CHECKING:
    from tiercel.store.base import SessionTable
    from tiercel.store.store import TieredStore

ACTIONS = ("prefetch", "pin", "unpin", "demote", "drop")
_WAKE_S = 0.1
_GRACE_S = 5.0


def demote(store: TieredStore, chain: Chain, deadline_s: float) -> int:
    """Write down what tiers lack of a prompt's own blocks, then free its RAM. Returns how many left RAM.

    A block that no tier took stays in RAM: it is the only copy. So do pinned blocks and those in use.
    """
    until_s = time.monotonic() + deadline_s
    freed = 0
    with store.lock:
        left = store.family.own(chain.keys, lambda key: store.ram.get(key) is not None)
        left.reverse()
        while not store.closing:
            store.below.give_up_locked()
            waiting: list[BlockKey] = []
            for key in left:
                entry = store.ram.get(key)
                if entry is None or entry.staged or entry.state is State.LOADING:
                    continue
                if _busy_locked(store, entry):
                    waiting.append(key)
                elif not store.pinned_locked(key) and store.below.has_locked(key):
                    store.ram.remove(entry)
                    freed += 1
            left_s = until_s - time.monotonic()
            if not waiting or left_s <= 0:
                break
            left = waiting
            store.lock.wait(min(left_s, _WAKE_S))
        store.counters.demoted += freed
        store.lock.notify_all()
    return freed


def _busy_locked(store: TieredStore, entry: Entry) -> bool:
    """Whether a block is being filled, written down or read, and may be free later."""
    if entry.state is State.WRITING:
        return True
    return store.below.spill_locked(entry) or entry.holds > 0


def drop(store: TieredStore, chain: Chain, deadline_s: float) -> int:
    """Forget a prompt's own blocks and all that begins with them, everywhere. Returns how many there were.

    What follows it is known from the traffic of this process; of older records, which nothing finds without
    those before them, the bytes stay until the tier evicts them.

    Whatever is being loaded, written or handed out of them now is not found after this either. A tier that
    does not finish deleting within the deadline goes on in the background.
    """
    until_s = time.monotonic() + deadline_s
    with store.lock:
        doomed = store.family.own_and_after(chain.keys, store.there_locked)
        gone = [key for key in doomed if store.there_locked(key)]
        for lease in store.leases:
            if isinstance(lease, WriteLease):
                lease.drop_locked(frozenset(doomed))
        store.unpin_locked(doomed)
        store.counters.ram_dropped += sum(store.ram.get(key) is not None for key in doomed)
        store.below.count_dropped_locked(doomed)
        for key in reversed(doomed):
            entry = store.ram.get(key)
            if entry is not None:
                store.ram.remove(entry)
        store.counters.dropped += len(gone)
        store.lock.notify_all()
    if doomed:
        for done in store.below.forget(doomed):
            done.wait(max(0.0, until_s - time.monotonic()))
    return len(gone)


@dataclass(frozen=True, slots=True)
class Steered:
    """What was done to a session: of its `blocks`, how many were `done`."""

    blocks: int
    done: int


class Steerable(Protocol):
    """What of a store is needed to steer it; see `TieredStore`."""

    @property
    def sessions(self) -> SessionTable: ...

    def prefetch(self, chain: Chain, deadline_s: float = 10.0) -> Future[int]: ...

    def pin(self, chain: Chain, ttl_s: float) -> int: ...

    def unpin(self, chain: Chain) -> None: ...

    def demote(self, chain: Chain, deadline_s: float = 10.0) -> int: ...

    def drop(self, chain: Chain, deadline_s: float = 10.0) -> int: ...


def steer(
    store: Steerable, action: str, chain: Chain, *, ttl_s: float = 600.0, deadline_s: float = 10.0
) -> int:
    """Prefetch, pin, unpin, demote or drop (`ACTIONS`) a prompt in any store: with how many blocks it did so.

    Waits for it, up to the deadline. Raises CancelledError when too many prefetches wait already.
    """
    calls: dict[str, Callable[[], int]] = {
        "prefetch": lambda: _prefetched(store, chain, deadline_s),
        "pin": lambda: store.pin(chain, ttl_s),
        "unpin": lambda: _unpinned(store, chain),
        "demote": lambda: store.demote(chain, deadline_s),
        "drop": lambda: store.drop(chain, deadline_s),
    }
    return calls[action]()


def steer_session(
    store: Steerable,
    action: str,
    tenant: bytes,
    session: str,
    *,
    ttl_s: float = 600.0,
    deadline_s: float = 10.0,
) -> Steered | None:
    """`steer` what a tenant's session left; prefetches beyond those that may wait are left out.

    None for a session that is not known, or not for this tenant. Waits for what it does, up to the deadline
    for each part of a model that is split over ranks.
    """
    chains = store.sessions.chains(tenant, session)
    if not chains:
        return None
    done = 0
    for chain in chains:
        with suppress(CancelledError):
            done += steer(store, action, chain, ttl_s=ttl_s, deadline_s=deadline_s)
    if action == "drop":
        store.sessions.note(tenant, session, ())
    return Steered(sum(len(chain) for chain in chains), done)


def _prefetched(store: Steerable, chain: Chain, deadline_s: float) -> int:
    try:
        return store.prefetch(chain, deadline_s).result(deadline_s + _GRACE_S)
    except TimeoutError:
        return 0


def _unpinned(store: Steerable, chain: Chain) -> int:
    store.unpin(chain)
    return len(chain)
