"""Percentiles, and when a difference is one: the ratio of two sides with what chance alone makes of it.

    of a round   median of the base / median of the other side: above 1, the other is faster
    ratio        the geometric mean over the rounds
    interval     95 %, by Student's t over the rounds' logarithms; unpaired (runs of other plans) by Welch's
    verdict      faster or slower: the whole interval lies beyond the margin; same: it lies within the margin;
                 unclear: anything else; too few: fewer than 3 rounds

The round is the unit, not the request: what else a machine does changes within minutes and meets all requests
of a round alike, so a thousand requests of one round tell no more about it than ten.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

# Less is not worth a sentence, whatever the interval.
MARGIN: Final = 0.03
ROUNDS_MIN: Final = 3
# A percentile needs requests beyond it: the 99th of twenty would be their largest by another name.
_NEEDED = {0.5: 1, 0.9: 10, 0.99: 100}
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
# Student's t, 97.5 %, for 1, 2, … degrees of freedom.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip

# By round, then by request: what the same request of another side is found by.
Rounds = Mapping[int, Mapping[Hashable, float]]


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
    """How much faster the other side is than the base, with its interval; `base` and `other` are medians.

    `paired`: the same requests were compared, round by round. `margin` is what a difference must exceed.
    """

    base: float
    other: float
    ratio: float
    low: float | None
    high: float | None
    rounds: int
    paired: bool
    margin: float
    verdict: str


def compare(base: Rounds, other: Rounds, *, margin: float = MARGIN, paired: bool = True) -> Ratio | None:
    """Compare two sides. None if there is nothing to compare.

    Paired takes only the requests that both have, and the rounds with such. Values are above zero.
    """
    if paired:
        both = {
            number: [name for name in requests if name in other.get(number, {})]
            for number, requests in base.items()
        }
        base = {number: {name: base[number][name] for name in names} for number, names in both.items()}
        other = {number: {name: other[number][name] for name in names} for number, names in both.items()}
    one, two = _logarithms(base), _logarithms(other)
    if not one or not two:
        return None
    if paired:
        differences = [a - b for a, b in zip(one, two, strict=True)]
        middle, half = _mean(differences), _half(_error(differences), len(differences) - 1)
    else:
        middle, half = _mean(one) - _mean(two), _welch(one, two)
    rounds = min(len(one), len(two))
    known = rounds >= ROUNDS_MIN
    low, high = (math.exp(middle - half), math.exp(middle + half)) if known else (None, None)
    return Ratio(
        base=_median(base),
        other=_median(other),
        ratio=math.exp(middle),
        low=low,
        high=high,
        rounds=rounds,
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


def t_quantile(freedom: float) -> float:
    """The 97.5 % quantile of Student's t; between the degrees of the table the larger one."""
    if freedom < 1:
        return math.inf
    whole = math.floor(freedom)
    return _T[whole - 1] if whole <= len(_T) else 1.96 + 2.5 / whole


def _logarithms(rounds: Rounds) -> list[float]:
    """Of each round's median; rounds without requests are left out."""
    return [math.log(float(np.median(list(one.values())))) for one in rounds.values() if one]


def _median(rounds: Rounds) -> float:
    return float(np.median([value for one in rounds.values() for value in one.values()]))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _error(values: Sequence[float]) -> float:
    """The standard error of the mean; 0 for one value, which has no interval anyway."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _half(error: float, freedom: float) -> float:
    return t_quantile(freedom) * error if error else 0.0


def _welch(one: Sequence[float], two: Sequence[float]) -> float:
    """Half the interval of a difference of means, by Welch and Satterthwaite."""
    first, second = _error(one) ** 2, _error(two) ** 2
    if not first + second:
        return 0.0
    parts = first**2 / max(1, len(one) - 1) + second**2 / max(1, len(two) - 1)
    return _half(math.sqrt(first + second), (first + second) ** 2 / parts)
