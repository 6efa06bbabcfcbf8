"""Every policy once more, as it would be told: for one row without padding, one head, one query, in plain
loops.

Shares nothing with the code it checks but the codec of landmarks, which has a reference of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Head:
    """One KV head of one row: keys [n, dim], values [n, dim], the prompt's queries [group, n, dim], its
    budget.
    """

    keys: Floats
    values: Floats
    prompt: Floats
    budget: int
    landmarks: Floats
    special: set[int]
    punctuation: set[int]

    @property
    def n(self) -> int:
        return len(self.keys)

    @cached_property
    def weights(self) -> Floats:
        """[group, n, n]: the prompt's causal attention."""
        found = np.zeros((len(self.prompt), self.n, self.n))
        for g, queries in enumerate(self.prompt):
            for i in range(self.n):
                found[g, i, : i + 1] = softmax([dot(queries[i], self.keys[j]) for j in range(i + 1)])
        return found


def dot(q: Floats, k: Floats) -> float:
    return float(q @ k) / math.sqrt(len(k))


def softmax(scores: list[float]) -> Floats:
    e = np.exp(np.array(scores) - max(scores))
    return np.asarray(e / e.sum())


def last(n: int, count: int) -> set[int]:
    return set(range(max(0, n - count), n))


def best(scores: dict[int, float], count: int) -> set[int]:
    return set(sorted(scores, key=lambda j: -scores[j])[:count])


def full(h: Head) -> set[int]:
    return set(range(h.n))


def window(h: Head) -> set[int]:
    return last(h.n, h.budget)


def streaming(h: Head) -> set[int]:
    return set(range(min(4, h.budget))) | last(h.n, max(0, h.budget - 4))


def h2o(h: Head) -> set[int]:
    recent = last(h.n, h.budget // 2)
    got = {j: float(h.weights[:, :, j].sum()) for j in range(h.n) if j not in recent}
    return recent | best(got, h.budget - h.budget // 2)


def scissorhands(h: Head) -> set[int]:
    recent_count = min(10, h.budget // 2)
    recent = last(h.n, recent_count)
    mean = h.weights.mean(0)
    below = dict.fromkeys(range(h.n), 0)
    for i in range(max(0, h.n - 400), h.n):
        for j in range(i + 1):
            below[j] += mean[i, j] < 1 / (i + 1)
    order = sorted((j for j in range(h.n) if j not in recent), key=lambda j: (below[j], -j))
    return recent | set(order[: h.budget - recent_count])


def snapkv(h: Head) -> set[int]:
    recent = last(h.n, min(32, h.budget))
    rows = range(max(0, h.n - 32), h.n)
    got = [0.0 if j in recent else float(h.weights[:, rows, j].sum()) for j in range(h.n)]
    pooled = {
        j: sum(got[i] for i in range(j - 2, j + 3) if 0 <= i < h.n) for j in range(h.n) if j not in recent
    }
    return recent | best(pooled, h.budget - len(recent))


def fastgen(h: Head) -> set[int]:
    mean = h.weights.mean(0)
    local = h.budget // 2
    special = {0} | h.special
    marks = special | h.punctuation
    got = {j: float(mean[:, j].sum()) for j in range(h.n) if j not in marks}
    heavy = marks | best(got, h.budget - local)

    def recovered(kept: set[int], near: int) -> float:
        return float(
            np.mean(
                [
                    sum(mean[i, j] for j in range(i + 1) if j in kept or i - j < near)
                    for i in range(h.n)
                ]
            )
        )  # fmt: skip

    for rule in (special, marks, heavy):
        if recovered(rule, 0) >= 0.95:
            return rule
    return heavy | last(h.n, local) if recovered(heavy, local) >= 0.95 else full(h)


FIXED = {
    "full": full, "window": window, "streaming": streaming, "streaming-rerotated": streaming, "h2o": h2o,
    "scissorhands": scissorhands, "snapkv": snapkv, "fastgen": fastgen,
}  # fmt: skip


def recent_of(h: Head) -> set[int]:
    return last(h.n, min(64, h.budget // 2))


def by_keys(h: Head, queries: Floats, keys: Floats) -> set[int]:
    """The recent tokens, and those with the largest share of attention in any query head [group, dim]."""
    shares = [softmax([dot(q, k) for k in keys]) for q in queries]
    recent = recent_of(h)
    score = {j: max(float(share[j]) for share in shares) for j in range(h.n) if j not in recent}
    return recent | best(score, h.budget - len(recent))


def oracle(h: Head, queries: Floats) -> set[int]:
    return by_keys(h, queries, h.keys)


def landmark(h: Head, queries: Floats) -> set[int]:
    return by_keys(h, queries, h.landmarks)


def quest(h: Head, queries: Floats) -> set[int]:
    pages = [list(range(at, min(at + 16, h.n))) for at in range(0, h.n, 16)]
    bounds = []
    for q in queries:
        each = []
        for page in pages:
            low, high = h.keys[page].min(0), h.keys[page].max(0)
            each.append(float(np.maximum(q * low, q * high).sum()))
        bounds.append(each)
    order = sorted(range(len(pages)), key=lambda p: -max(b[p] for b in bounds))
    chosen = recent_of(h)
    for page in order:
        for j in pages[page]:
            if len(chosen) < h.budget:
                chosen.add(j)
    return chosen


READING = {"oracle": oracle, "landmark": landmark, "landmark-4bit": landmark, "quest": quest}


def output(query: Floats, keys: Floats, values: Floats, allowed: set[int]) -> Floats:
    """One query's attention over the tokens it may see."""
    order = sorted(allowed)
    weights = softmax([dot(query, keys[j]) for j in order])
    return np.asarray(sum(w * values[j] for w, j in zip(weights, order, strict=True)))
