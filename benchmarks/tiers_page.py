"""The figures of tiers as tables in docs/benchmarks.md, from whatever of the three JSON files is there.

python -m benchmarks.tiers_page
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from benchmarks.page import PAGE, between
from benchmarks.run import FOLDER

BEGIN, END = "<!-- figures: made by make bench-tiers -->", "<!-- end of tiers -->"
MIB = 1 << 20
LABELS = {
    "computed": "computed: nothing stored (the second engine, its prompts)",
    "own": "vLLM's own prefix cache (the floor)",
    "files": "from a directory",
    "valkey": "from Valkey, over TCP",
    "encrypted valkey": "from Valkey, encrypted",
    "objects": "from S3 (SeaweedFS)",
    "mooncake": "from Mooncake, over TCP",
}


def write_page() -> None:
    """Put every table there are figures for between the markers; the rest of the page is kept."""
    made: list[str] = []
    for name, table in PARTS.items():
        path = FOLDER / name
        made += [table(json.loads(path.read_text()))] if path.exists() else []
    PAGE.write_text(between(PAGE.read_text(), BEGIN, END, "\n\n".join(made) + "\n"))


def of_vllm(results: dict[str, Any]) -> str:
    """The second engine's first request, place by place."""
    ttft: dict[str, dict[str, Any]] = results["ttft"]
    lengths = list(ttft)
    last = ttft[lengths[-1]]
    heads = [f"{int(length):,} tokens" for length in lengths]
    long = heads[-1]
    lines = [
        f"| TTFT, s: median (min–max) | {' | '.join(heads)} | faster than computing, {long} "
        f"| MB read, {long} | CPU s, {long}: engine + daemon + servers |",
        "|---" * (len(lengths) + 4) + "|",
    ]
    for arm, end in last.items():
        cells = [
            f"{one['median_s']:.3f} ({one['min_s']:.3f}–{one['max_s']:.3f})"
            for one in (ttft[length][arm] for length in lengths)
        ]
        spent = " + ".join(f"{seconds:.2f}" for seconds in end["cpu_s"].values())
        faster = "–" if arm == "computed" else f"{end['faster_than_computing']:.1f}×"
        read = f"{end['read_bytes'] / 1e6:.0f}" if end["read_bytes"] else "–"
        lines.append(f"| {LABELS[arm]} | {' | '.join(cells)} | {faster} | {read} | {spent} |")
    short = f"; whole prefix not reused in {results['short_hits']}" if results["short_hits"] else ""
    lost = f"; writes lost: {results['writes_lost']}" if results["writes_lost"] else ""
    absent = "".join(f"; without {kind}: {why}" for kind, why in results["absent"].items())
    return "\n".join(lines) + (
        f"\n\n{_ran_on(results['machine'])}; {results['rounds']} prompts of each length. First tokens equal "
        f"to vLLM's own hit: {results['same_first_token']} of {results['hits']}{short}{lost}{absent}."
    )


def of_clients(results: dict[str, Any]) -> str:
    """Each tier against its own client used bare."""
    lines = [
        "| tier, one call at a time | block | put MB/s | of the bare client | get MB/s | of the bare client "
        "| CPU s per GiB, put / get (bare) |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in results["tiers"]:
        put, get, bare = one["put"], one["get"], one["yardstick"]
        cpu = " / ".join(
            f"{way['tier']['cpu_s_per_gib']:.2f} ({way[bare]['cpu_s_per_gib']:.2f})" for way in (put, get)
        )
        lines.append(
            f"| {one['case']}, against {bare} | {one['block_bytes'] // MIB} MiB "
            f"| {put['tier']['median_mb_s']:.0f} | {one['put_ratio']:.0%} "
            f"| {get['tier']['median_mb_s']:.0f} | {one['get_ratio']:.0%} | {cpu} |"
        )
    return "\n".join(lines) + f"\n\nGoal: {results['goal']:.0%}. Load after: {results['load_after']:.1f}."


def of_fio(results: dict[str, Any]) -> str:
    """The files tier against fio."""
    lines = [
        "| files tier against fio, direct I/O | calls at a time | write MB/s | of fio | read MB/s | of fio |",
        "|---|---|---|---|---|---|",
    ]
    for one in results["fio"]:
        lines.append(
            f"| {one['block_bytes'] // MIB} MiB | {one['depth']} | {one['tier write']['mb_s']:.0f} "
            f"| {one['write_ratio']:.0%} | {one['tier read']['mb_s']:.0f} | {one['read_ratio']:.0%} |"
        )
    return "\n".join(lines) + f"\n\nGoal: {results['goal']:.0%}. Load after: {results['load_after']:.1f}."


def _ran_on(machine: dict[str, Any]) -> str:
    return (
        f"{machine['when']}, {machine['cpu']}, {machine['cores']} cores; load before: "
        f"{machine['load_before']:.1f}"
    )


PARTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "vllm_tiers.json": of_vllm,
    "tiers.json": of_clients,
    "fio.json": of_fio,
}

if __name__ == "__main__":
    write_page()
