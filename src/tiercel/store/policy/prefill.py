"""What computing a prompt costs on this engine, learned while it serves.

    seconds(n new tokens after c cached ones) = fixed + per_token * n + per_pair * n * (c + n / 2)

The linear term is the weights' work, the last one attention's: every new token looks at all before it.

The coefficients are fitted to recent observations (of each size the median of the latest few) by non-negative
least squares of the relative errors, reweighted so that an outlier (a suspended machine, a stall, a busy
neighbour) is worth next to nothing: towards least absolute errors first, then with Cauchy weights. A lasting
change of speed is believed for all sizes once all but one of the latest five requests say so. Knows no engine
and no clock.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

# Observations kept per size class (powers of two of new tokens and of context).
_PER_CLASS = 5
_CLASSES_MAX = 64
_ROUNDS, _SHARP_ROUNDS = 8, 4
# Rounds end when none of the times expected moves by more than this share.
_SETTLED = 1e-3
_ERROR_MIN = 0.02
# Relative error at which an observation counts half.
_HALF_WEIGHT_ERROR = 0.15
_SECONDS_MIN, _SECONDS_MAX = 1e-6, 3600.0
# Sets of terms to try (fixed, per token, per pair), simplest belief first: with few sizes seen several fit
# equally well, and a term more must earn its place.
_TERM_SETS = ([1], [1, 2], [0, 1], [0, 1, 2], [2], [0, 2], [0])
# What a term must explain to be believed in, and the share of it that the others must leave unexplained.
_GAIN_MIN, _ALIKE = 1e-9, 1e-10
# When all but one of the latest few, of whatever size, say that the engine is faster or slower, it is.
_LATEST, _LEVEL_NOISE = 5, 1.2


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Coefficients of the formula above: seconds; per new token; per new token and token it looks at."""

    fixed_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0

    def seconds(self, tokens: int, context: int = 0) -> float:
        """Expected time to compute `tokens` new tokens after `context` tokens that are there."""
        if tokens <= 0:
            return 0.0
        return self.fixed_s + tokens * (self.token_s + self.pair_s * (context + tokens / 2))

    def saved(self, tokens: int, context: int = 0) -> float:
        """Expected time that a longer prefill takes less for these `tokens` after `context` being there."""
        return max(0.0, self.seconds(tokens, context) - self.fixed_s)


class PrefillEstimator:
    """Learns a `PrefillCost`. Thread-safe; `observe` is cheap, the fit is made when it is asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[tuple[int, int], deque[tuple[int, int, float]]] = {}
        self._latest: deque[tuple[int, int, float]] = deque(maxlen=_LATEST)
        self._cost: PrefillCost | None = None
        self._stale = False
        self.observed = 0

    def observe(self, tokens: int, context: int, seconds: float) -> None:
        """Note that computing `tokens` after `context` took `seconds`. What cannot be is ignored."""
        if tokens < 1 or context < 0 or not _SECONDS_MIN <= seconds <= _SECONDS_MAX:
            return
        size = (tokens.bit_length(), context.bit_length())
        with self._lock:
            # Lately seen sizes move to the end; the ones not seen for longest leave first.
            kept = self._seen.pop(size, None) or deque(maxlen=_PER_CLASS)
            kept.append((tokens, context, seconds))
            self._seen[size] = kept
            self._latest.append((tokens, context, seconds))
            if len(self._seen) > _CLASSES_MAX:
                del self._seen[next(iter(self._seen))]
            self._stale = True
            self.observed += 1

    def cost(self) -> PrefillCost | None:
        """What is believed now; None before anything was observed."""
        with self._lock:
            if self._stale:
                fitted = _fit([_usual(kept) for kept in self._seen.values()])
                self._cost = _levelled(fitted, self._latest)
                self._stale = False
            return self._cost


def _usual(kept: deque[tuple[int, int, float]]) -> tuple[int, int, float]:
    """Of the latest observations of one size, the middle one."""
    return sorted(kept, key=lambda one: one[2] / one[0])[(len(kept) - 1) // 2]


def _levelled(cost: PrefillCost, latest: deque[tuple[int, int, float]]) -> PrefillCost:
    """`cost` at the speed of the latest observations: an engine that turns slow does so at every size."""
    levels = sorted(
        seconds / max(_SECONDS_MIN, cost.seconds(tokens, context)) for tokens, context, seconds in latest
    )
    if len(levels) < _LATEST or (levels[1] <= _LEVEL_NOISE and levels[-2] >= 1 / _LEVEL_NOISE):
        return cost
    level = median(levels)
    return PrefillCost(cost.fixed_s * level, cost.token_s * level, cost.pair_s * level)


def _fit(seen: list[tuple[int, int, float]]) -> PrefillCost:
    tokens, context, seconds = (np.array(column, dtype=float) for column in zip(*seen, strict=True))
    terms = np.stack([np.ones_like(tokens), tokens, tokens * (context + tokens / 2)], axis=1)
    # To begin with: in proportion to the tokens, at the middle speed, which no outlier leads astray.
    answer = np.array([0.0, float(np.median(seconds / tokens)), 0.0])
    for sharp in (False, True):
        for _ in range(_SHARP_ROUNDS if sharp else _ROUNDS):
            expected = terms @ answer
            errors = np.abs(np.log(np.maximum(expected, _SECONDS_MIN) / seconds))
            if sharp:
                weights = 1.0 / (1.0 + (errors / _HALF_WEIGHT_ERROR) ** 2)
            else:
                weights = 1.0 / np.maximum(errors, _ERROR_MIN)
            # Relative to what is seen or expected, whichever is more: else a time far too short weighs most.
            against = np.maximum(seconds, expected)
            before, answer = expected, _non_negative(terms / against[:, None], seconds / against, weights)
            if (np.abs(terms @ answer - before) <= _SETTLED * before).all():
                break
    return PrefillCost(*(float(value) for value in answer))


def _non_negative(
    terms: NDArray[np.float64], wanted: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Weighted least squares of `terms @ x = wanted` with x >= 0: of all sets of active terms the best."""
    scale = np.abs(terms).max(axis=0)
    scale[scale == 0.0] = 1.0
    scaled = terms / scale
    weighted = scaled * weights[:, None]
    products: list[list[float]] = (scaled.T @ weighted).tolist()
    right: list[float] = (wanted @ weighted).tolist()
    best, gained = [0.0] * len(right), 0.0
    for columns in _TERM_SETS:
        part = _solved(
            [[products[row][at] for at in columns] for row in columns], [right[at] for at in columns]
        )
        if part is None or min(part) < 0:
            continue
        # By how much the sum of squares is smaller than without any term.
        gain = sum(value * right[at] for value, at in zip(part, columns, strict=True))
        if gain > gained + _GAIN_MIN:
            best, gained = [0.0] * len(right), gain
            for value, at in zip(part, columns, strict=True):
                best[at] = value
    answer: NDArray[np.float64] = np.array(best) / scale
    return answer


def _solved(products: list[list[float]], right: list[float]) -> list[float] | None:
    """The solution of a few normal equations, by elimination; None where terms cannot be told apart.

    Plain numbers: for three unknowns a library's call takes longer than the work, and a scheduler waits.
    """
    rows = [[*row, value] for row, value in zip(products, right, strict=True)]
    for at, row in enumerate(rows):
        if row[at] <= _ALIKE * products[at][at]:
            return None
        for below in rows[at + 1 :]:
            factor = below[at] / row[at]
            for column in range(at, len(row)):
                below[column] -= factor * row[column]
    solution: list[float] = []
    for at in range(len(rows) - 1, -1, -1):
        *known, value = rows[at][at + 1 :]
        value -= sum(one * found for one, found in zip(known, reversed(solution), strict=True))
        solution.append(value / rows[at][at])
    return solution[::-1]
