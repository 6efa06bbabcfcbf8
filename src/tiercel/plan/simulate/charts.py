"""What the plots show: series, axes and units, taken from a report. Drawing is `svg` and `png`'s job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiercel.plan.simulate.policies import POLICIES
from tiercel.plan.simulate.text import interval_text

Json = Mapping[str, Any]
CDF_POINTS = 120
# Okabe and Ito's palette: told apart with any kind of colour vision, on light and dark ground.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("", "7 4", "2 3", "9 3 2 3", "4 2", "1 2")


@dataclass(frozen=True, slots=True)
class Series:
    """A named line; `dash` is an SVG dash pattern, so that colour is not the only difference."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    color: str
    dash: str = ""


@dataclass(frozen=True, slots=True)
class LineChart:
    """Lines over a logarithmic x axis; `y` is a share from 0 to `y_max`."""

    key: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    y_max: float
    note: str


@dataclass(frozen=True, slots=True)
class BarChart:
    """Shares per category."""

    key: str
    title: str
    x_label: str
    y_label: str
    labels: tuple[str, ...]
    values: tuple[float, ...]
    note: str


Chart = LineChart | BarChart


def charts(data: Json, ttft_s: Mapping[str, Any]) -> list[Chart]:
    """The report's charts; those without data are left out."""
    found: list[Chart | None] = [
        hit_curves(data),
        reuse_bars(data),
        waiting_curves(data, ttft_s),
        write_bars(data),
    ]
    return [chart for chart in found if chart is not None]


def hit_curves(data: Json) -> LineChart | None:
    """Block miss ratio over capacity, per policy."""
    curves = data["curves"]
    if not curves or not next(iter(curves.values())):
        return None
    in_bytes = data["trace"]["block_bytes"] is not None
    scale, field = (1e12, "capacity_bytes") if in_bytes else (1e6, "capacity_tokens")
    series = tuple(
        Series(
            name,
            tuple(point[field] / scale for point in points),
            tuple(point["block_miss_ratio"] for point in points),
            *_style(number),
        )
        for number, (name, points) in enumerate(curves.items())
    )
    explained = "; ".join(f"{name}: {POLICIES[name][0]}" for name in curves)
    return LineChart(
        "miss-ratio",
        "How much cache is worth having",
        "capacity, TB" if in_bytes else "capacity, million tokens",
        "blocks missed",
        series,
        1.0,
        f"Share of block references that miss, by eviction policy. {explained}.",
    )


def reuse_bars(data: Json) -> BarChart | None:
    """Reuse intervals."""
    rows = list(data["reuse_intervals"])
    while rows and not rows[-1]["reuses"]:
        rows.pop()
    if not rows:
        return None
    return BarChart(
        "reuse",
        "How long until a block is used again",
        "time since its last use",
        "share of reuses",
        tuple(interval_text(row) for row in rows),
        tuple(row["share"] for row in rows),
        "Over all references to blocks that were used before. A block kept shorter than this is lost to it.",
    )


def waiting_curves(data: Json, ttft_s: Mapping[str, Any]) -> LineChart | None:
    """Time to first token: share of requests that have waited at most so long."""
    samples = {name: np.sort(values) for name, values in ttft_s.items() if len(values)}
    if not samples:
        return None
    shares = np.linspace(0.005, 1.0, CDF_POINTS)
    series = tuple(
        Series(
            name,
            tuple(float(x) for x in np.maximum(np.quantile(values, shares), 1e-4)),
            tuple(float(x) for x in shares),
            *_style(number),
        )
        for number, (name, values) in enumerate(samples.items())
    )
    return LineChart(
        "ttft",
        "Time to first token",
        "seconds",
        "requests answered by then",
        series,
        1.0,
        "From arrival to the end of prefill, with waiting for links and engines; decoding is not simulated.",
    )


def write_bars(data: Json) -> BarChart | None:
    """Bytes written per hour to each tier below the first, with and without the admission filter."""
    labels, values = [], []
    for arm_name, arm in data.get("arms", {}).items():
        for tier, traffic in list(arm["tiers"].items())[1:]:
            rate = traffic["written_bytes_per_hour_per_place"]
            if rate is not None:
                labels.append(f"{tier}: {arm_name}")
                values.append(rate / 1e12)
    if not labels:
        return None
    return BarChart(
        "writes",
        "What the slower tiers must write",
        "tier and admission",
        "TB per hour",
        tuple(labels),
        tuple(values),
        "Per host, or in all for a shared tier. 'seen twice' writes a block when it comes a second time.",
    )


def _style(number: int) -> tuple[str, str]:
    return PALETTE[number % len(PALETTE)], DASHES[number % len(DASHES)]


def log_ticks(low: float, high: float) -> Sequence[float]:
    """Powers of ten, with 2 and 5 between them where the range is short."""
    first, last = int(np.floor(np.log10(low))), int(np.ceil(np.log10(high)))
    steps = (1, 2, 5) if last - first <= 2 else (1, 3) if last - first <= 3 else (1,)
    ticks = [10.0**power * step for power in range(first, last + 1) for step in steps]
    # Rounding must not lose the tick at an end of the axis.
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
