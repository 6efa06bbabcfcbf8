"""The files tier against fio: direct I/O in the same place, at the same block size and queue depth.

python -m benchmarks.bench_fio [--dir DIR] [--rounds N] [--sizes 1,4,16] [--depths 1,4] [--json FILE]

fio (psync, direct) has one large file for each of its jobs, the tier one file a block with its name, date and
rename; both have `depth` calls under way. A round is fio writing, the tier writing, fio reading, the tier
reading; rates are wall clock, fio's by its own account. Needs fio.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import publish
from tiercel.blocks import BlockKey
from tiercel.tiers import OK, FilesTier

MIB = 1 << 20
ROUND_BYTES = 256 * MIB
GOAL = 0.85


def fio(folder: Path, way: str, block_bytes: int, depth: int) -> dict[str, float]:
    """One run: MB/s, and CPU seconds per GiB."""
    done = subprocess.run(
        [
            "fio", "--name=bench", f"--directory={folder}", f"--rw={way}", f"--bs={block_bytes}",
            f"--size={ROUND_BYTES // depth}", f"--numjobs={depth}", "--ioengine=psync", "--direct=1",
            "--thread", "--group_reporting", "--output-format=json", "--fallocate=none", "--invalidate=1",
        ],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    job = json.loads(done.stdout)["jobs"][0]
    seconds = job["job_runtime"] / 1000  # summed over the jobs, as their CPU shares are
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds
    return {
        "mb_s": job[way]["bw_bytes"] / 1e6,
        "cpu_s_per_gib": cpu_s / (job[way]["io_bytes"] / (1 << 30)),
    }


def timed(run: Callable[[], object]) -> dict[str, float]:
    cpu_s, wall_s = _cpu_s(), time.perf_counter()
    run()
    wall_s, cpu_s = time.perf_counter() - wall_s, _cpu_s() - cpu_s
    return {"mb_s": ROUND_BYTES / 1e6 / wall_s, "cpu_s_per_gib": cpu_s / (ROUND_BYTES / (1 << 30))}


def measure(folder: Path, block_bytes: int, depth: int, rounds: int) -> dict[str, Any]:
    """Rounds of both; the first is not counted."""
    count = ROUND_BYTES // block_bytes
    tier = FilesTier(folder / "cache")
    record = memoryview(mmap.mmap(-1, block_bytes * depth))
    np.frombuffer(record, np.uint64)[:] = np.random.default_rng(0).integers(
        0, 2**63, len(record) // 8, np.uint64
    )
    slots = [record[at * block_bytes : (at + 1) * block_bytes] for at in range(depth)]

    def each(call: Callable[..., list[object]], keys: list[BlockKey]) -> None:
        def some(job: int) -> None:
            for key in keys[job::depth]:
                assert call([key], [slots[job]]) == [OK]

        list(pool.map(some, range(depth)))

    found: dict[str, list[dict[str, float]]] = {}
    with ThreadPoolExecutor(depth) as pool:
        for _ in range(rounds + 1):
            # Both write what is not there yet, and nothing is deleted: freeing space costs more than writing,
            # and for minutes ext4 searches long for an inode where many were freed.
            keys = _keys(count)
            jobs = folder / os.urandom(4).hex()
            jobs.mkdir()
            os.sync()
            for name, run in (
                ("fio write", lambda jobs=jobs: fio(jobs, "write", block_bytes, depth)),
                ("tier write", lambda keys=keys: timed(lambda: each(tier.write, keys))),
                ("fio read", lambda jobs=jobs: fio(jobs, "read", block_bytes, depth)),
                ("tier read", lambda keys=keys: timed(lambda: each(tier.read, keys))),
            ):
                found.setdefault(name, []).append(run())
    shown: dict[str, Any] = {
        name: {
            what: round(statistics.median(one[what] for one in some[1:]), 3)
            for what in ("mb_s", "cpu_s_per_gib")
        }
        for name, some in found.items()
    }
    for way in ("write", "read"):
        pairs = zip(found[f"tier {way}"][1:], found[f"fio {way}"][1:], strict=True)
        shown[f"{way}_ratio"] = round(statistics.median(ours["mb_s"] / its["mb_s"] for ours, its in pairs), 3)
    return {"block_bytes": block_bytes, "depth": depth, "direct": tier.direct, **shown}


def _line(result: dict[str, Any]) -> str:
    parts = []
    for way in ("write", "read"):
        rates = "  ".join(
            f"{who} {result[f'{who} {way}']['mb_s']:.0f} ({result[f'{who} {way}']['cpu_s_per_gib']:.3f})"
            for who in ("fio", "tier")
        )
        ratio = result[f"{way}_ratio"]
        parts.append(f"{way}: {rates}  ratio {ratio:.2f}{'' if ratio >= GOAL else ' BELOW THE GOAL'}")
    return "  ".join(parts)


def _keys(count: int) -> list[BlockKey]:
    """New keys, all of one scope, as the blocks of one model are."""
    return [BlockKey(bytes(8) + os.urandom(24)) for _ in range(count)]


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, help="where to read and write")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="1,4,16", help="MiB, with commas between")
    parser.add_argument("--depths", default="1,4", help="calls under way, with commas between")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if shutil.which("fio") is None:
        parser.error("fio is not installed")
    results = []
    cases = itertools.product(map(int, options.depths.split(",")), map(int, options.sizes.split(",")))
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        for depth, size in cases:
            result = measure(Path(folder), size * MIB, depth, options.rounds)
            results.append(result)
            print(f"{size:>3} MiB depth {depth}  {_line(result)}", flush=True)
    publish({"load_after": os.getloadavg()[0], "goal": GOAL, "fio": results}, options.json)


if __name__ == "__main__":
    main()
