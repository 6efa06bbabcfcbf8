"""The table and the plot of the replayed trace in docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import PAGE, between

BEGIN, END = "<!-- figures: made by benchmarks.replay -->", "<!-- end of replay -->"
ROWS = {
    "opt": "offline optimum (Belady): knows the future",
    "half": "*half-way from LRU to it: wanted at the small sizes, not reached without being told*",
    "store": "**Tiercel, RAM**",
    "tiers": "**Tiercel, a quarter in RAM over a files tier**",
    "tiercel": "simulator: Tiercel's policy",
    "lru": "simulator: LRU",
    "s3-fifo": "simulator: S3-FIFO",
    "fifo": "simulator: FIFO",
}
LINES = {
    "opt": ("offline optimum", "#444", "--"),
    "tiers": ("Tiercel, RAM + files", "#2f6fb2", "-"),
    "store": ("Tiercel, RAM", "#1a9a6c", "-"),
    "lru": ("LRU", "#c2714f", ":"),
    "s3-fifo": ("S3-FIFO", "#c9b458", "-"),
    "fifo": ("FIFO", "#9aa3ad", "-"),
}


def write_replay(results: dict[str, Any]) -> None:
    PAGE.write_text(between(PAGE.read_text(), BEGIN, END, table(results)))


def table(results: dict[str, Any]) -> str:
    """Hit ratios by room, and how far from LRU to the optimum the store comes."""
    hits, references = results["hits"], results["references"]
    half = [(lru + opt) / 2 for lru, opt in zip(hits["lru"], hits["opt"], strict=True)]
    hits = {**hits, "half": half}
    heads = [
        f"{share:.0%} = {room:,}"
        for share, room in zip(results["shares"], results["capacities"], strict=True)
    ]
    lines = [f"| block hit ratio with room for | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    for key, name in ROWS.items():
        lines.append(row(name, hits[key], references))
    for share, counts in results["told"].items():
        lines.append(
            row(f"Tiercel, RAM, told of {share} of the conversations when they are over", counts, references)
        )
    lines += [
        "",
        f"{results['requests']:,} requests, {references:,} block references, {results['blocks']:,} different "
        f"blocks; {results['when']}.",
        "",
        f"| RAM for {results['shares'][0]:.0%} over a files tier for {results['shares'][-1]:.0%}: told of "
        "conversations that are over | in RAM | in the files tier |",
        "|---|---|---|",
        *(row(share, counts, references) for share, counts in results["demoted"].items()),
        "",
        f"| RAM for {results['shares'][0]:.0%}, cut into tenants | block hit ratio |",
        "|---|---|",
        *(f"| {name} | {count / references:.2%} |" for name, count in results["tenants"].items()),
        "",
    ]
    return "\n".join(lines)


def row(name: str, counts: Sequence[float], references: int) -> str:
    return f"| {name} | {' | '.join(f'{count / references:.2%}' for count in counts)} |"


def write_replay_plot(results: dict[str, Any], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3), dpi=150)
    places = [f"{share:.0%}" for share in results["shares"]]
    for key, (name, colour, style) in LINES.items():
        ratios = [count / results["references"] * 100 for count in results["hits"][key]]
        # Equal ones lie on each other: the first is wider.
        wide = 5.0 if key == "tiers" else 1.6
        axes.plot(
            places, ratios, style, linewidth=wide, marker="o", markersize=2 + wide, color=colour, label=name
        )
    axes.set_ylim(0)
    axes.set_xlabel("room, share of the trace's different blocks", fontsize=9)
    axes.set_ylabel("block hits, %", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(target)
    pyplot.close(figure)
