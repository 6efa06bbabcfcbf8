"""Stories of a store over one remote tier that are the same whatever the place is."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from tests.store.support import chain, drop_ram, eventually, get, put

from tiercel.blocks import Chain
from tiercel.store import LaneOptions, TieredStore
from tiercel.store.figures import TierStats

BLOCKS = 4
DEADLINE_S = 0.5
OPTIONS = LaneOptions(deadline_s=DEADLINE_S)


def stats(store: TieredStore) -> TierStats:
    (tier,) = store.stats().tiers
    return tier


def written(store: TieredStore, of: Chain) -> bool:
    """Store a chain down to the tier and forget it in RAM."""
    put(store, of)
    done = eventually(lambda: stats(store).pending_writes == 0)
    drop_ram(store)
    return done


def hits(store: TieredStore, of: Chain) -> bool:
    """Whether all of a chain comes back from the tier, after being stored anew if that is what it takes."""
    drop_ram(store)
    if get(store, of) == [stats(store).name] * BLOCKS:
        return True
    written(store, of)
    return False


def assert_another_finds_by_asking(store: TieredStore, other: TieredStore) -> None:
    """What one store writes, another that runs already finds by asking the tier."""
    name = stats(store).name
    assert written(store, chain(BLOCKS))
    assert get(other, chain(BLOCKS)) == []
    assert other.lookup(chain(BLOCKS), deadline_s=5).sources == (name,) * BLOCKS
    assert get(other, chain(BLOCKS)) == [name] * BLOCKS
    assert other.lookup(chain(BLOCKS, seed=1), deadline_s=5).sources == ()


def assert_a_fault_costs_a_deadline(
    store: TieredStore, start: Callable[[], object], end: Callable[[], object]
) -> None:
    """From `start` to `end` the tier is of no use: requests go on, it is left alone, and then used again."""
    assert written(store, chain(BLOCKS))
    assert get(store, chain(BLOCKS)) == [stats(store).name] * BLOCKS
    drop_ram(store)
    start()
    try:
        started_s = time.monotonic()
        assert len(get(store, chain(BLOCKS), deadline_s=5)) < BLOCKS
        assert time.monotonic() - started_s < DEADLINE_S + 3
        assert eventually(lambda: stats(store).counters.failed > 0)
        seeds = itertools.count(1)

        def goes_on_until_it_is_left_alone() -> bool:
            """Requests that cannot hit go on, and so do their stores into RAM."""
            one = chain(1, seed=next(seeds))
            assert get(store, one, deadline_s=5) == []
            assert put(store, one) == 1
            assert get(store, one) == ["ram"]
            return stats(store).counters.breaker_opened > 0

        assert eventually(goes_on_until_it_is_left_alone)
    finally:
        end()
    assert eventually(lambda: hits(store, chain(BLOCKS, seed=10_000)), 40)
