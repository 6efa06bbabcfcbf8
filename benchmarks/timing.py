"""Repeat, take the median, keep the spread: figures from noisy machines need all three."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def seconds(call: Callable[[], object]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def interleaved(repeats: int, **calls: Callable[[], object]) -> dict[str, list[float]]:
    """Time calls in turn, A B C A B C …, so that a machine's mood hits all alike; first round uncounted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            taken = seconds(call)
            if repeat:
                times[name].append(taken)
    return times


def shown(times: list[float]) -> dict[str, float]:
    """Median, smallest and largest, in seconds."""
    return {"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times)}


def ratio(base: list[float], other: list[float]) -> float:
    """Median over the rounds of base/other: above 1, `other` is the faster."""
    return statistics.median(one / two for one, two in zip(base, other, strict=True))


def publish(results: Mapping[str, Any], target: Path | None) -> None:
    """Print the figures as JSON, and write them to `target` if there is one."""
    text = json.dumps(results, indent=2)
    print(text)
    if target:
        target.write_text(text + "\n")
