"""The figures of `benchmarks.harm` as tables in docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.page import PAGE, between

BEGIN, END = "<!-- figures: made by benchmarks.harm -->", "<!-- end of do no harm -->"
BETTER_MAX, COMPUTE_MAX, PAY_MAX = 1.05, 1.1, 3


def write_page(results: Mapping[str, Any]) -> None:
    """Put the tables between the markers; the rest of the page is kept."""
    PAGE.write_text(between(PAGE.read_text(), BEGIN, END, table(results) + "\n"))


def table(results: Mapping[str, Any]) -> str:
    """A table per engine, what turning links cost, and where the figures come from."""
    parts = [part for name, found in results["engines"].items() for part in of_engine(name, found)]
    ran = results["machine"]
    parts.append(
        f"{ran['when']}, {ran['cpu']}, {ran['cores']} cores; load before: {ran['load_before']:.1f}. Medians "
        f"of {results['rounds']} requests (computing more than 1,024 tokens: of 3), in "
        f"{results['took_s'] / 60:.0f} minutes."
    )
    return "\n\n".join(parts)


def of_engine(name: str, found: Mapping[str, Any]) -> list[str]:
    rows = found["rows"]
    lines = [
        f"| {name}: TTFT, s | prompt tokens | always compute | always load | Tiercel | of the better "
        "| worst, of computing |",
        "|---" * 7 + "|",
    ]
    for one in rows:
        seconds = one["median_s"]
        load = f"{seconds['always load']:.2f}" if "always load" in seconds else "not tried"
        lines.append(
            f"| {one['link']} | {one['tokens']:,} | {seconds['always compute']:.2f} | {load} "
            f"| {seconds['tiercel']:.2f} | {one['of_the_better']:.2f}× | {one['worst_of_compute']:.2f}× |"
        )
    said = "\n".join(lines)
    turns = found["turning_of_compute"]
    slow, fast = (", ".join(f"{ratio:.2f}" for ratio in turns[way]) for way in ("slow", "fast"))
    better = met([one["of_the_better"] for one in rows], BETTER_MAX)
    compute = met([one["of_compute"] for one in rows], COMPUTE_MAX)
    parts = [
        said,
        f"{name}: {better} of the better or less, {compute} of computing or less. Requests one by one after "
        f"the tier turned slow, of computing: {slow}; {paying(turns['slow'])}. After it turned fast again "
        f"(tried again after 5 s): {fast}.",
    ]
    if found["shared"]:
        parts.append(of_shared(name, found["shared"]))
    return parts


def of_shared(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Fifty requests that share a long beginning."""
    lines = [
        f"| {name}: 50 at once, 6,000 tokens shared: slowest TTFT, s | no cache | Tiercel | of no cache "
        "| blocks read | more than once |",
        "|---" * 6 + "|",
    ]
    for one in rows:
        computed_s, ours_s = one["p99_s"]["always compute"], one["p99_s"]["tiercel"]
        read, again = one["read_blocks"], one["read_blocks"] - one["distinct"]
        ratio = f"{ours_s / computed_s:.2f}×"
        lines.append(f"| {one['link']} | {computed_s:.2f} | {ours_s:.2f} | {ratio} | {read} | {again} |")
    return "\n".join(lines)


def met(ratios: Sequence[float], goal: float) -> str:
    return f"{sum(ratio <= goal for ratio in ratios)} of {len(ratios)} medians are at {goal}×"


def paying(ratios: Sequence[float]) -> str:
    """How many requests paid before the tier was priced out."""
    count = sum(ratio > COMPUTE_MAX for ratio in ratios)
    return f"{count} paid more than {COMPUTE_MAX}× (goal: {PAY_MAX} at most)"
