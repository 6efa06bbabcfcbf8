"""Percentiles, and when a difference is one: the ratio of two medians with what chance alone makes of it.

ratio      median of the base / median of the other: above 1, the other is faster
interval   95 % of the ratios of 2,000 resamples (percentile bootstrap), drawn by session, because requests
           of one session are not independent of each other; where both sides answered the same requests,
           both are resampled together
verdict    faster or slower: the whole interval lies beyond the margin; same: it lies within the margin;
           unclear: anything else; too few: fewer than 6 sessions
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

# Less is not worth a sentence, whatever the interval.
MARGIN: Final = 0.03
CLUSTERS_MIN: Final = 6
RESAMPLES: Final = 2000
# Resamples are drawn in batches of about 16 MiB.
_CELLS_MAX = 1 << 21
# A percentile needs requests beyond it: the 99th of twenty would be their largest by another name.
_NEEDED = {0.5: 1, 0.9: 10, 0.99: 100}
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

Values = Sequence[tuple[Hashable, float]]


class Spread(msgspec.Struct, frozen=True):
    """How values are spread, in their own unit. A percentile of too few values is None."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


def spread(values: Sequence[float]) -> Spread:
    """Median, 90th and 99th percentile (linear between neighbours), and the largest."""
    found = {
        name: float(np.quantile(values, share)) if len(values) >= _NEEDED[share] else None
        for name, share in PERCENTILES.items()
    }
    return Spread(len(values), found["p50"], found["p90"], found["p99"], max(values, default=None))


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """How much faster the other side is than the base; `low` and `high` bound 95 % of resamples.

    `paired`: both sides' same requests were compared. `margin` is what a difference must exceed.
    """

    base: float
    other: float
    ratio: float
    low: float | None
    high: float | None
    sessions: int
    count: int
    paired: bool
    margin: float
    verdict: str


def compare(base: Mapping[Hashable, tuple[Hashable, float]], other: Mapping[Hashable, tuple[Hashable, float]],
            *, margin: float = MARGIN, paired: bool = True, seed: int = 0) -> Ratio | None:  # fmt: skip
    """Compare two sides: values by request, each with its session. None if there is nothing to compare.

    Paired takes only the requests that both have. Values must be above zero for a ratio to mean something;
    requests with others are left out.
    """
    one = {name: value for name, value in base.items() if value[1] > 0}
    two = {name: value for name, value in other.items() if value[1] > 0}
    if paired:
        both = [name for name in one if name in two]
        one, two = {name: one[name] for name in both}, {name: two[name] for name in both}
    if not one or not two:
        return None
    first, second = list(one.values()), list(two.values())
    medians = float(np.median([v for _, v in first])), float(np.median([v for _, v in second]))
    sessions = min(len({c for c, _ in first}), len({c for c, _ in second}))
    low = high = None
    if sessions >= CLUSTERS_MIN:
        ratios = _resampled(first, second, paired, np.random.default_rng(seed))
        low, high = (float(edge) for edge in np.quantile(ratios, (0.025, 0.975)))
    return Ratio(
        base=medians[0],
        other=medians[1],
        ratio=medians[0] / medians[1],
        low=low,
        high=high,
        sessions=sessions,
        count=min(len(first), len(second)),
        paired=paired,
        margin=margin,
        verdict=verdict_of(low, high, margin),
    )


def verdict_of(low: float | None, high: float | None, margin: float) -> str:
    """The rule above. `margin` is a share: 0.03 lets 0.971 to 1.03 count as the same."""
    if low is None or high is None:
        return "too few"
    upper, lower = 1 + margin, 1 / (1 + margin)
    if low > upper:
        return "faster"
    if high < lower:
        return "slower"
    return "same" if lower <= low and high <= upper else "unclear"


def _resampled(
    first: Values, second: Values, paired: bool, random: np.random.Generator
) -> NDArray[np.float64]:
    """Ratios of medians of resampled sessions."""
    one, two = _Sorted(first), _Sorted(second)
    # Paired, both have the same sessions in the same order, and one draw serves both.
    ratios = np.empty(RESAMPLES)
    rows = max(1, _CELLS_MAX // max(len(first), len(second)))
    for at in range(0, RESAMPLES, rows):
        count = min(rows, RESAMPLES - at)
        drawn = _draw(one.sessions, count, random)
        again = drawn if paired else _draw(two.sessions, count, random)
        ratios[at : at + count] = one.medians(drawn) / two.medians(again)
    return ratios


def _draw(sessions: int, count: int, random: np.random.Generator) -> NDArray[np.int64]:
    """How often each session is drawn, in `count` resamples: (count, sessions)."""
    return random.multinomial(sessions, np.full(sessions, 1 / sessions), count)


class _Sorted:
    """Values in order, each with the number of its session, so that a resample is a matter of weights."""

    def __init__(self, values: Values) -> None:
        numbers: dict[Hashable, int] = {}
        of = np.array([numbers.setdefault(session, len(numbers)) for session, _ in values])
        plain = np.array([value for _, value in values])
        order = np.argsort(plain, kind="stable")
        self._values, self._of = plain[order], of[order]
        self.sessions = len(numbers)

    def medians(self, drawn: NDArray[np.int64]) -> NDArray[np.float64]:
        """The median of each resample, in which every value counts as often as its session was drawn."""
        reached = np.cumsum(drawn[:, self._of], axis=1)
        total = reached[:, -1:]
        low = (reached > (total - 1) // 2).argmax(axis=1)
        high = (reached > total // 2).argmax(axis=1)
        medians: NDArray[np.float64] = (self._values[low] + self._values[high]) / 2
        return medians
