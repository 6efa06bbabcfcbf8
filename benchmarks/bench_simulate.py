"""How fast `tiercel simulate` is: seconds per policy and memory, on a real and a synthetic trace, one thread.

python -m benchmarks.bench_simulate [--trace FILE] [--requests N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tiercel.plan.simulate import (
    POLICIES,
    Fleet,
    PrefillCost,
    Shape,
    TierSpec,
    join_runs,
    play,
    policy_hits,
    read_trace,
    write_trace,
)
from tiercel.plan.simulate.report import CURVE_POINTS

BLOCK_BYTES = 512 * 327_680  # Llama-3.1-70B in bf16
HOST_FLOPS = 8 * 989e12 * 0.5
PREFILL = PrefillCost(2 * 70.55e9 / HOST_FLOPS, 4 * 80 * 64 * 128 / HOST_FLOPS)
TIERS = (TierSpec("ram", 500 * 10**9, 100e9), TierSpec("ssd", 2 * 10**12, 25e9, 2e-4))


def measure(path: str, what: str) -> dict[str, Any]:
    """Time one thing in this process; `what` is a policy, `read` or `fleet`."""
    started = time.perf_counter()
    trace = read_trace(path)
    runs = join_runs(trace)
    read_s = time.perf_counter() - started
    started, worked = time.perf_counter(), time.process_time()
    if what in POLICIES:
        sizes = np.geomspace(max(1, trace.block_count / 1000), trace.block_count, CURVE_POINTS)
        policy_hits(what, trace, runs, [round(size) for size in sizes])
    elif what == "fleet":
        play(trace, Fleet(BLOCK_BYTES, TIERS, PREFILL, hosts=4, gpus_per_engine=8))
    return {
        "read_s": round(read_s, 2),
        "seconds": round(time.perf_counter() - started, 2),
        "cpu_seconds": round(time.process_time() - worked, 2),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "requests": trace.request_count,
        "block_references": len(trace.blocks),
    }


def bench(path: str) -> dict[str, Any]:
    """Measure everything on one trace, each in a process of its own."""
    rows = {}
    for what in (*POLICIES, "fleet"):
        args = [sys.executable, "-m", "benchmarks.bench_simulate", "--trace", path, "--only", what]
        rows[what] = json.loads(subprocess.run(args, check=True, capture_output=True, text=True).stdout)
        sys.stderr.write(f"{Path(path).name} {what}: {rows[what]}\n")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", help="a real trace to measure too")
    parser.add_argument("--requests", type=int, default=1_000_000, help="synthetic ones, 0 for none")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        sys.stdout.write(json.dumps(measure(options.trace, options.only)))
        return
    figures: dict[str, Any] = {}
    if options.trace:
        figures[Path(options.trace).name] = bench(options.trace)
    if options.requests:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"synthetic-{options.requests}.jsonl"
            with path.open("w") as stream:
                write_trace(stream, Shape(requests=options.requests))
            figures[path.name] = bench(str(path))
    text = json.dumps(figures, indent=1)
    sys.stdout.write(text + "\n")
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
