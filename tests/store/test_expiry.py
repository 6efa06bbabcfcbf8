"""D50: what is kept for a time is kept until then and no longer, whatever the wall clock says."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import NoReturn

import pytest
from tests.store.support import assert_nothing_leaked, chain, make_store, put

from tiercel.blocks import BlockKey
from tiercel.store import TieredStore, pins
from tiercel.store.policy.hints import PIN_S_MAX

TTL_S = 300.0


class Clock:
    """The store's own clock, and a wall clock that is set back an hour all the while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self._wall_s = time.time()
        monkeypatch.setattr(pins, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(time, "time", self._wall)
        monkeypatch.setattr(time, "time_ns", lambda: int(self._wall() * 1e9))

    def _wall(self) -> float:
        self._wall_s -= 3600.0
        return self._wall_s


def flood(store: TieredStore, number: int) -> int:
    """Store more than RAM holds; returns how much of the pinned prompt is left."""
    for seed in range(10):
        put(store, chain(8, seed=number * 100 + seed))
    return sum(store.ram.get(key) is not None for key in chain(4).keys)


def test_a_pin_holds_until_its_time_is_over_and_then_gives_its_room_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    with make_store() as store:
        put(store, chain(4))
        assert flood(store, 1) == 0, "the control: without a pin it goes"
        put(store, chain(4))
        assert store.pin(chain(4), TTL_S) == 4
        clock.now_s += TTL_S - 1
        assert (flood(store, 2), store.stats().pins) == (4, 4)
        clock.now_s += 2
        assert (flood(store, 3), store.stats().pins) == (0, 0)
        assert put(store, chain(10, seed=999)) == 10, "all of RAM is free for others"
        assert_nothing_leaked(store)


def test_pinning_again_extends_and_a_shorter_time_does_not_shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with make_store() as store:
        put(store, chain(4))
        store.pin(chain(4), TTL_S)
        clock.now_s += TTL_S - 1
        store.pin(chain(4), TTL_S)
        store.pin(chain(4), 1.0)
        clock.now_s += TTL_S - 1
        assert flood(store, 1) == 4
        clock.now_s += 2
        assert flood(store, 2) == 0


def test_a_pin_without_end_ends_after_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with make_store() as store:
        put(store, chain(4))
        assert store.pin(chain(4), math.inf) == 4
        clock.now_s += PIN_S_MAX - 1
        assert (flood(store, 1), store.stats().pins) == (4, 4)
        clock.now_s += 2
        assert (flood(store, 2), store.stats().pins) == (0, 0)


def test_pins_are_counted_without_walking_through_them_until_one_may_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, kept = Clock(monkeypatch), pins.Pins(10)
    first, later = chain(2, seed=1).keys, chain(3, seed=2).keys
    assert (kept.add(later, 2 * TTL_S), kept.add(first, TTL_S)) == (3, 2)

    class Unwalked(dict[BlockKey, float]):
        def items(self) -> NoReturn:
            raise AssertionError("walked through")

    kept._until_s = Unwalked(kept._until_s)
    clock.now_s += TTL_S - 1
    assert (kept.count(), kept.add(first[:1], TTL_S)) == (5, 1)
    clock.now_s += 2
    with pytest.raises(AssertionError, match="walked through"):
        kept.count()
    kept._until_s = dict(zip(kept._until_s.keys(), kept._until_s.values(), strict=True))
    assert kept.count() == 4
    clock.now_s += 2 * TTL_S
    assert kept.count() == 0
