"""What the plots show: series, axes and units, taken from a report. Drawing is `svg` and `png`'s job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.plan.simulate.policies import POLICIES
from tiercel.plan.simulate.text import interval_text
from tiercel.report.charts import BarChart, Chart, LineChart, Series, cumulative, line_style

Json = Mapping[str, Any]


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
            *line_style(number),
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
    samples = {name: values for name, values in ttft_s.items() if len(values)}
    if not samples:
        return None
    series = tuple(cumulative(name, values, number) for number, (name, values) in enumerate(samples.items()))
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
