"""From samples to figures, tables and the plot. Ratios are medians over rounds, never ratios of medians."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import PAGE, between
from benchmarks.vllm.measure import LENGTHS, TOGETHER, Samples

BEGIN, END = "<!-- figures: made by make bench-vllm -->", "<!-- end of vLLM figures -->"
LABELS = {
    "none cold": "recompute (no connector)",
    "none own": "vLLM's own prefix cache (the floor)",
    "example hit": "vLLM's example connector (files in page cache)",
    "lmcache hit": "LMCache, from shared memory",
    "tiercel hit": "**Tiercel, from RAM**",
    "tiercel restart": "**Tiercel, RAM, after an engine restart**",
    "lmcache-files hit": "LMCache, from files",
    "tiercel-files hit": "**Tiercel, from disk**",
}
NAMES = {
    "none": "no connector",
    "example": "vLLM's example connector",
    "lmcache": "LMCache, shared memory",
    "tiercel": "Tiercel, RAM",
    "lmcache-files": "LMCache, with files",
    "tiercel-files": "Tiercel, with a files tier",
}
COLOURS = {"none": "#9aa3ad", "example": "#c9b458", "lmcache": "#c2714f", "tiercel": "#1a9a6c"}


def shown(times: Sequence[float]) -> dict[str, Any]:
    return {
        "median_s": statistics.median(times),
        "min_s": min(times),
        "max_s": max(times),
        "samples": len(times),
    }


def single(samples: Samples, lengths: Sequence[int]) -> dict[str, Any]:
    """Per prompt length and arm: times, and against recompute and vLLM's own hit of the same round."""
    found: dict[str, Any] = {}
    for length in lengths:
        cold = by_round(samples, length, "none", "cold")
        own = by_round(samples, length, "none", "own")
        arms: dict[str, Any] = {}
        for (tokens, arm, kind), times in samples.times.items():
            if tokens != length:
                continue
            entry = shown(times)
            mine = by_round(samples, length, arm, kind)
            if len(mine) == len(cold) == len(own):
                entry["recompute_over_this"] = ratio(cold, mine)
                entry["this_over_own_hit"] = ratio(mine, own)
            arms[f"{arm} {kind}"] = entry
        found[str(length)] = arms
    return found


def by_round(samples: Samples, length: int, arm: str, kind: str) -> list[float]:
    """One time a round: the mean of what was measured in it."""
    times = samples.times.get((length, arm, kind), [])
    # An arm that ended early has fewer samples than rounds.
    per_round = 1 if kind in ("cold", "restart") else max(1, repeats(samples, length, arm, kind))
    return [statistics.mean(times[start : start + per_round]) for start in range(0, len(times), per_round)]


def repeats(samples: Samples, length: int, arm: str, kind: str) -> int:
    rounds = len(samples.times.get((length, "none", "cold"), []))
    return len(samples.times.get((length, arm, kind), [])) // max(rounds, 1)


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(one / two for one, two in zip(above, below, strict=True))


def together(found: Mapping[str, Mapping[str, list[dict[str, Any]]]]) -> dict[str, Any]:
    return {
        f"{arm} {kind}": {
            "first_token": shown([time for answer in answers for time in answer["first_s"]]),
            "all_s": shown([answer["seconds"] for answer in answers]),
            "reused_tokens": statistics.mean(sum(answer["reused"]) for answer in answers),
        }
        for arm, kinds in found.items()
        for kind, answers in kinds.items()
        if answers
    }


def no_reuse(rates: Mapping[str, list[float]], but: str = "") -> dict[str, Any]:
    base = rates["none"]
    return {
        arm: {
            "tokens_per_s": statistics.median(own),
            "of_no_connector": ratio(own, base),
            "lowest_pair": min(one / two for one, two in zip(own, base, strict=True)),
            "highest_pair": max(one / two for one, two in zip(own, base, strict=True)),
            "pairs": len(own),
        }
        for arm, own in rates.items()
        if arm != but and len(own) == len(base)
    }


def agreement(*sittings: Samples) -> dict[str, dict[str, int]]:
    """How many first tokens equal that of vLLM's own prefix hit on the same prompt."""
    found: dict[str, dict[str, int]] = {}
    for samples in sittings:
        for answers in samples.first_tokens.values():
            if "none own" not in answers:
                continue
            for arm, token in answers.items():
                row = found.setdefault(arm, {"equal": 0, "of": 0})
                row["equal"] += token == answers["none own"]
                row["of"] += 1
    return found


def write_page(results: dict[str, Any]) -> None:
    picture = "![vLLM, time to first token](benchmarks/vllm.png)"
    PAGE.write_text(between(PAGE.read_text(), BEGIN, END, f"{picture}\n\n{tables(results)}"))


def tables(results: dict[str, Any]) -> str:
    parts = [first_tokens(results), many(results), price(results), memory(results), notes(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def row_of(results: dict[str, Any], length: str, label: str) -> dict[str, Any] | None:
    for sitting in ("from_ram", "from_disk"):
        entry: dict[str, Any] | None = results[sitting].get(length, {}).get(label)
        if entry:
            return entry
    return None


def first_tokens(results: dict[str, Any]) -> str:
    lengths = list(results["from_ram"])
    head = "| TTFT, s: median (min–max) | " + " | ".join(f"{int(one):,} tokens" for one in lengths)
    last = lengths[-1]
    lines = [
        f"{head} | faster than recompute at {int(last):,} | × vLLM's own hit |",
        "|---" * (len(lengths) + 3) + "|",
    ]
    for label, text in LABELS.items():
        cells = [row_of(results, length, label) for length in lengths]
        if not any(cells):
            continue
        times = [
            f"{one['median_s']:.3f} ({one['min_s']:.3f}–{one['max_s']:.3f})" if one else "–" for one in cells
        ]
        end = cells[-1] or {}
        faster = f"{end['recompute_over_this']:.1f}×" if "recompute_over_this" in end else "–"
        floor = f"{end['this_over_own_hit']:.2f}" if "this_over_own_hit" in end else "–"
        lines.append(f"| {text} | {' | '.join(times)} | {faster} | {floor} |")
    return "\n".join(lines)


def many(results: dict[str, Any]) -> str:
    lines = [
        f"| {TOGETHER} requests of {LENGTHS[0]:,} tokens at once, s "
        "| median TTFT | last TTFT | tokens reused |",
        "|---|---|---|---|",
    ]
    for label, one in results["concurrent"].items():
        text = LABELS.get(label) or f"{NAMES[label.split()[0]]}, cold"
        lines.append(
            f"| {text} | {one['first_token']['median_s']:.2f} | {one['all_s']['median_s']:.2f} "
            f"| {one['reused_tokens']:,.0f} |"
        )
    return "\n".join(lines)


def price(results: dict[str, Any]) -> str:
    lines = [
        "| prompts never seen again | tokens/s | of no connector (lowest–highest pair) |",
        "|---|---|---|",
    ]
    for arm, one in results["no_reuse"].items():
        lines.append(
            f"| {NAMES[arm]} | {one['tokens_per_s']:,.0f} | {one['of_no_connector']:.1%} "
            f"({one['lowest_pair']:.1%}–{one['highest_pair']:.1%}, {one['pairs']} pairs) |"
        )
    return "\n".join(lines)


def memory(results: dict[str, Any]) -> str:
    lines = ["| memory at the end, GiB | engine | cache server |", "|---|---|---|"]
    for arm, one in results["memory"].items():
        server = f"{one['server_bytes'] / 2**30:.2f}" if one["server_bytes"] else "–"
        lines.append(f"| {NAMES[arm]} | {one['engine_bytes'] / 2**30:.2f} | {server} |")
    return "\n".join(lines)


def notes(results: dict[str, Any]) -> str:
    on, versions = results["machine"], results["versions"]
    same = results["same_first_token"].values()
    lines = [
        f"{on['when']}, {on['cpu']}, {on['cores']} cores; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f"; load before: {on['load_before']:.1f}; {results['rounds']} rounds. "
        "First tokens equal to those of vLLM's own hit: "
        f"{sum(one['equal'] for one in same)} of {sum(one['of'] for one in same)}."
    ]
    for what, count in results["short_hits"].items():
        lines.append(f"Not the whole prefix reused: {what}, {count} times.")
    for arm, why in results["failed"].items():
        lines.append(f"Left out: {NAMES[arm]}: {why}.")
    return "\n\n".join(lines)


def write_plot(results: dict[str, Any], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    length = list(results["from_ram"])[-1]
    bars = [(label, row_of(results, length, label)) for label in LABELS]
    there = [(label, one) for label, one in bars if one]
    there.sort(key=lambda pair: -float(pair[1]["median_s"]))
    figure, axes = pyplot.subplots(figsize=(7, 0.38 * len(there) + 0.8), dpi=150)
    for place, (label, one) in enumerate(there):
        spread = [[one["median_s"] - one["min_s"]], [one["max_s"] - one["median_s"]]]
        colour = "#d0d4d9" if label == "none own" else COLOURS[label.split()[0].removesuffix("-files")]
        axes.barh(
            place, one["median_s"], color=colour, xerr=spread, error_kw={"ecolor": "#444", "capsize": 3}
        )
        axes.text(one["max_s"] * 1.08, place, f"{one['median_s']:.3f} s", va="center", fontsize=8)
    names = [LABELS[label].strip("*") for label, _ in there]
    axes.set_yticks(range(len(there)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlim(min(float(one["min_s"]) for _, one in there) / 2, there[0][1]["max_s"] * 2.5)
    axes.set_xlabel(
        f"time to first token, s (log), {int(length):,} prompt tokens (median, min–max)", fontsize=8
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(target)
    pyplot.close(figure)
