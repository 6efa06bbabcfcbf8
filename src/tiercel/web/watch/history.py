"""An hour of figures in a ring: one sample every two seconds, each a few dozen numbers.

Samples hold totals since the store opened, not rates, so that any of them can be left out: the difference of
two is exact whatever lies between. `epoch` changes when totals begin anew. None is what nobody knew.

Locking: one lock, for the ring only.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EVERY_S = 2.0
SAMPLES_MAX = 1800
TIERS_MAX = 9
Numbers = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of one moment (Unix time): of the whole store, and of each place by its name."""

    at_s: float
    epoch: int
    totals: Numbers = field(default_factory=dict)
    places: Mapping[str, Numbers] = field(default_factory=dict)


class History:
    """The latest samples. Thread-safe."""

    def __init__(self, samples_max: int = SAMPLES_MAX) -> None:
        self._lock = threading.Lock()
        self._ring: deque[Sample] = deque(maxlen=samples_max)

    def add(self, sample: Sample) -> None:
        """Keep a sample; the oldest goes when the ring is full."""
        with self._lock:
            self._ring.append(sample)

    def as_json(self, points: int = 360) -> dict[str, Any]:
        """At most `points` samples, evenly picked with the latest among them, by column."""
        with self._lock:
            kept = list(self._ring)
        step = max(1, -(-len(kept) // points))
        picked = kept[::-1][::step][::-1]
        names = _names(sample.totals for sample in picked)
        places = _names(sample.places for sample in picked)[:TIERS_MAX]
        columns = {place: _names(sample.places.get(place, {}) for sample in picked) for place in places}
        return {
            "object": "history",
            "every_s": EVERY_S,
            "at_s": [round(sample.at_s, 2) for sample in picked],
            "epoch": [sample.epoch for sample in picked],
            "totals": {name: [sample.totals.get(name) for sample in picked] for name in names},
            "places": {
                place: {name: [sample.places.get(place, {}).get(name) for sample in picked] for name in own}
                for place, own in columns.items()
            },
        }


def _names(tables: Any) -> list[str]:
    found: dict[str, None] = {}
    for table in tables:
        found.update(dict.fromkeys(table))
    return list(found)
