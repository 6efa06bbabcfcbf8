"""Keeps a lane in step with a place that other processes and hosts use too.

Every few seconds, on one background thread: date there what we used, list what changed there since the last
time, take in what others wrote, forget what they deleted, and evict should all together hold more than the
cap. Before anything is evicted its date there is read, so that what others used lately stays. Nobody needs
to be told of anybody and no lock is needed: whatever is missed meanwhile is found out by reading.

Only for tiers that offer `Shared`; never called under the store's lock.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tiercel.blocks import BlockKey
from tiercel.store.lane_index import Cell
from tiercel.tiers import Fate, Stored
from tiercel.tiers.extras import Part, Shared, age_s

if TYPE_CHECKING:
    from tiercel.store.lane import Lane

# Of its own: the process's random numbers may be seeded by whoever needs them to repeat.
_jitter = random.Random()
_PAUSE_S = 10.0
# Looking around takes at most this share of a thread's time, however slow the place is.
_TIME_SHARE = 0.05
_TOUCH_BATCH = 256
_LEARN_BATCH = 1024
# So often are others asked for in the place of those that turned out to be in use.
_SPARE_ROUNDS = 4


class Sharing:
    """A lane's dealings with the others who use its place. One thread calls `round`."""

    def __init__(self, lane: Lane, place: Shared, lock: threading.Condition) -> None:
        self._lane = lane
        self._place = place
        self._lock = lock
        self._afresh = False
        lane.index.now_min = _minute()

    def round(self) -> float:
        """Get in step once; returns after how many seconds to do it again."""
        started_s = time.monotonic()
        lane = self._lane
        with self._lock:
            lane.index.now_min = _minute()
            usable = lane.gate.available(started_s)
        if usable:
            self._date()
            self._look()
            lane.trim()
        took_s = time.monotonic() - started_s
        # Not all at once: whoever looks first evicts, and the others see it.
        return max(_PAUSE_S, took_s / _TIME_SHARE) * _jitter.uniform(0.75, 1.25)

    def listed(self) -> list[Stored]:
        """Every record of the place; what changes afterwards is what the next round looks for."""
        return [one for part in self._place.changes(True) for one in part.records]

    def unused(self, evicted: Mapping[BlockKey, Cell]) -> dict[BlockKey, int]:
        """Of blocks just evicted those that nobody else used lately, and others for the rest; with bytes."""
        lane = self._lane
        doomed: dict[BlockKey, int] = {}
        for _ in range(_SPARE_ROUNDS):
            dates = lane.dates(self._place.dates, list(evicted))
            doomed.update((key, cell.record_bytes) for key, cell in evicted.items())
            with self._lock:
                spared = lane.index.spare(evicted, dates)
                more = lane.index.make_room(0) if spared else {}
                if more is None:
                    # Nothing else may go, and the cap comes first.
                    lane.index.expel(spared)
                    return doomed
            for key in spared:
                del doomed[key]
            if not more:
                return doomed
            evicted = more
        doomed.update((key, cell.record_bytes) for key, cell in evicted.items())
        return doomed

    def _date(self) -> None:
        lane = self._lane
        with self._lock:
            due, lane.index.due = lane.index.due, {}
        keys = list(due)
        for start in range(0, len(keys), _TOUCH_BATCH):
            batch = keys[start : start + _TOUCH_BATCH]
            outcomes = lane.outcomes(self._place.touch, batch, [age_s(due[key]) for key in batch])
            gone = [key for key, one in zip(batch, outcomes, strict=True) if one.fate is Fate.MISSING]
            with self._lock:
                lane.index.forget(gone)

    def _look(self) -> None:
        lane = self._lane
        with self._lock:
            generation = lane.index.begin_scan()
        parts = lane.listing(lambda: self._place.changes(self._afresh), Part)
        self._afresh = parts is None
        if not parts:
            with self._lock:
                lane.index.end_scan()
            return
        known = self._known_by_prefix(parts)
        listed = (one for part in parts for one in part.records if isinstance(one, Stored))
        news = sorted(listed, key=lambda one: one.used_s)
        there = {one.key for one in news}
        for start in range(0, len(news), _LEARN_BATCH):
            with self._lock:
                now_s = time.monotonic()
                if generation == lane.index.generation:
                    for one in news[start : start + _LEARN_BATCH]:
                        lane.index.learn_news(one, now_s)
        with self._lock:
            if generation == lane.index.generation:
                lane.index.forget(
                    key
                    for keys in known.values()
                    for key in keys
                    if key not in there and lane.index.lost(key)
                )
            else:
                # A scope was cleared meanwhile, so the listing is stale: look again at all of it.
                self._afresh = True
            lane.index.end_scan()

    def _known_by_prefix(self, parts: list[Part]) -> dict[bytes, list[BlockKey]]:
        """What we list in the parts that changed."""
        prefixes = {part.prefix for part in parts}
        length = len(parts[0].prefix)
        with self._lock:
            keys = self._lane.index.keys_of(None)
        known: defaultdict[bytes, list[BlockKey]] = defaultdict(list)
        for key in keys:
            if key[:length] in prefixes:
                known[key[:length]].append(key)
        return known


def _minute() -> int:
    return int(time.time() // 60)
