"""Make the figures and tables of docs/simulate.md from Mooncake's conversation trace.

python scripts/simulate_figures.py path/to/conversation_trace.jsonl
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiercel.plan.simulate import Fleet, Request, TierSpec, read_trace, simulate
from tiercel.plan.simulate.machine import machine_of
from tiercel.plan.simulate.png import write_png

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
RAM = TierSpec("ram", 500 * 10**9, 100e9)
SSD = TierSpec("ssd", 2 * 10**12, 25e9, 0.2e-3)
SHARED = TierSpec("pool", 8 * 10**12, 10e9, 2e-3, shared=True)
DRIVE_RATING_BYTES = 14_000 * 10**12


def row(name: str, arm: dict[str, Any]) -> str:
    """One line of the table: hits, latencies, saving, load."""
    hits = " + ".join(f"{share:.1%}" for share in arm["block_hit_ratio_by_tier"].values()) or "–"
    ttft = " / ".join(f"{arm['ttft_s'][p]:.2f}" for p in ("p50", "p90", "p99"))
    writes = ", ".join(
        f"{t['written_bytes_per_hour_per_place'] / 1e12:.1f} TB/h, {t['drive_writes_per_day']:.0f} DWPD"
        for t in list(arm["tiers"].values())[1:]
    )
    saved, busy = arm["gpu_saved_share"], arm["engine_utilisation"]
    return f"| {name} | {hits} | {ttft} | {saved:.1%} | {busy:.0%} | {writes} |"


def main() -> None:
    trace = read_trace(sys.argv[1])
    machine = machine_of(trace.block_tokens, model="llama-3.1-70b", gpu="h100", tp=8)
    assert machine.block_bytes is not None
    assert machine.prefill is not None
    four = Fleet(machine.block_bytes, (RAM, SSD), machine.prefill, hosts=4, gpus_per_engine=8)
    rating = {"ssd": DRIVE_RATING_BYTES}
    asked = Request(block_bytes=machine.block_bytes, fleet=four, endurance_bytes=rating)
    report = simulate(trace, asked)
    IMAGES.mkdir(exist_ok=True)
    for key in ("miss-ratio", "ttft", "reuse", "writes"):
        write_png(IMAGES / f"simulate-{key}.png", report.data, report.ttft_s, only=key)
    lines = [row(f"4 hosts, {name}", arm) for name, arm in report.data["arms"].items()]
    big_ram = replace(RAM, capacity_bytes=2 * 10**12)
    big_ssd = replace(SSD, capacity_bytes=8 * 10**12)
    others = {
        "4 hosts, random router": replace(four, router="random"),
        "4 hosts, random router, shared 8 TB": replace(four, router="random", tiers=(RAM, SHARED)),
        "4 hosts, prefix router, shared 8 TB": replace(four, tiers=(RAM, SHARED)),
        "4 hosts, written on eviction": replace(four, write="evict"),
        "8 hosts": replace(four, hosts=8),
        "1 host of 2 TB RAM, 8 TB SSD": replace(four, hosts=1, tiers=(big_ram, big_ssd)),
    }
    for name, fleet in others.items():
        arms = simulate(trace, Request(policies=(), block_bytes=machine.block_bytes, fleet=fleet)).data[
            "arms"
        ]
        lines.append(row(name, arms["admit all"]))
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
