"""Tiers against the same client used bare, in one interleaved run: MB/s, their ratio, CPU seconds per GiB.

python -m benchmarks.bench_tiers [KIND ...] [--rounds N] [--sizes 1,4,16] [--threads N] [--json FILE]

A kind of tier is a module `benchmarks.tier_KIND` with `cases(folder)`, a context manager that starts what it
needs and yields `Case`s. The first bare client of a case is what the tier itself is built on.
"""

from __future__ import annotations

import argparse
import importlib
import mmap
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import publish
from tiercel.blocks import BlockKey
from tiercel.tiers import OK, Tier

# In the order they are measured; each needs what it measures installed.
KINDS = ("files", "valkey", "objects", "mooncake")
MIB = 1 << 20
ROUND_BYTES = 64 * MIB
GOAL = 0.85


@dataclass(frozen=True, slots=True)
class Client:
    """One record in and out without a tier. Called from several threads with `--threads`."""

    put: Callable[[str, memoryview], object]
    get: Callable[[str, memoryview], object]


@dataclass(frozen=True, slots=True)
class Case:
    """A tier, and the clients to compare it with by their names; the first is the yardstick."""

    name: str
    tier: Tier
    bare: Mapping[str, Client]


@dataclass(slots=True)
class Figures:
    """Wall and CPU seconds of one client in one direction, a value for each round."""

    wall_s: list[float]
    cpu_s: list[float]


def of_tier(tier: Tier) -> Client:
    """The tier called as the store calls it: one record at a time."""

    def put(name: str, record: memoryview) -> None:
        assert tier.write([BlockKey(bytes.fromhex(name))], [record]) == [OK]

    def get(name: str, record: memoryview) -> None:
        assert tier.read([BlockKey(bytes.fromhex(name))], [record]) == [OK]

    return Client(put, get)


def measure(case: Case, block_bytes: int, rounds: int, threads: int) -> dict[str, Any]:
    """Puts and gets of every client in turn; the first round is not counted, and all bytes are compared."""
    count = max(threads, ROUND_BYTES // block_bytes)
    data = [_filled(block_bytes, number) for number in range(count)]
    into = [memoryview(mmap.mmap(-1, block_bytes)) for _ in range(count)]
    clients = {"tier": of_tier(case.tier), **case.bare}
    names = {client: [os.urandom(32).hex() for _ in range(count)] for client in clients}
    puts = {client: Figures([], []) for client in clients}
    gets = {client: Figures([], []) for client in clients}
    with ThreadPoolExecutor(threads) if threads > 1 else nullcontext() as pool:
        for _ in range(rounds + 1):
            _round(pool, {client: calls.put for client, calls in clients.items()}, names, data, puts)
            _round(pool, {client: calls.get for client, calls in clients.items()}, names, into, gets)
    for client, calls in clients.items():
        for name, wanted, got in zip(names[client], data, into, strict=True):
            got[:64] = bytes(64)
            calls.get(name, got)
            assert got == wanted, f"{client}: other bytes"
    total = count * block_bytes
    case.tier.delete(
        [BlockKey(bytes.fromhex(name)) for name in (name for some in names.values() for name in some)]
    )
    yardstick = next(iter(case.bare))
    return {
        "case": case.name,
        "block_bytes": block_bytes,
        "threads": threads,
        "put": {client: _shown(figures, total) for client, figures in puts.items()},
        "get": {client: _shown(figures, total) for client, figures in gets.items()},
        "yardstick": yardstick,
        "put_ratio": _ratio(puts[yardstick], puts["tier"]),
        "get_ratio": _ratio(gets[yardstick], gets["tier"]),
        "put_best_ratio": _best_ratio(puts[yardstick], puts["tier"]),
        "get_best_ratio": _best_ratio(gets[yardstick], gets["tier"]),
    }


def _filled(block_bytes: int, seed: int) -> memoryview:
    record = memoryview(mmap.mmap(-1, block_bytes))
    np.frombuffer(record, np.uint64)[:] = np.random.default_rng(seed).integers(
        0, 2**63, block_bytes // 8, np.uint64
    )
    return record


def _round(
    pool: ThreadPoolExecutor | None,
    calls: Mapping[str, Callable[[str, memoryview], object]],
    names: Mapping[str, Sequence[str]],
    records: Sequence[memoryview],
    figures: Mapping[str, Figures],
) -> None:
    """Move every record with one client, then with the next. Taking turns record by record would not be fair:

    a client would find in the processor's cache what the one before it left there.
    """
    for client, call in calls.items():
        cpu_s, wall_s = _cpu_s(), time.perf_counter()
        list((pool.map if pool else map)(call, names[client], records))
        figures[client].wall_s.append(time.perf_counter() - wall_s)
        figures[client].cpu_s.append(_cpu_s() - cpu_s)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _shown(figures: Figures, total_bytes: int) -> dict[str, float]:
    """Rates in MB/s, and the client's CPU seconds per GiB moved."""
    rates = [total_bytes / 1e6 / wall_s for wall_s in figures.wall_s[1:]]
    return {
        "median_mb_s": round(statistics.median(rates), 1),
        "min_mb_s": round(min(rates), 1),
        "max_mb_s": round(max(rates), 1),
        "cpu_s_per_gib": round(statistics.median(figures.cpu_s[1:]) / total_bytes * (1 << 30), 3),
    }


def _ratio(bare: Figures, tier: Figures) -> float:
    """Median over the rounds of the tier's rate by the bare client's."""
    pairs = zip(bare.wall_s[1:], tier.wall_s[1:], strict=True)
    return round(statistics.median(one / two for one, two in pairs), 3)


def _best_ratio(bare: Figures, tier: Figures) -> float:
    """The tier's best round by the bare client's best: what counts on a machine that is not calm."""
    return round(min(bare.wall_s[1:]) / min(tier.wall_s[1:]), 3)


def _line(result: dict[str, Any]) -> str:
    parts = [f"{result['case']:<16} {result['block_bytes'] // MIB:>3} MiB"]
    for way in ("put", "get"):
        shown = "  ".join(
            f"{client} {figure['median_mb_s']:.0f} ({figure['cpu_s_per_gib']:.2f})"
            for client, figure in result[way].items()
        )
        ratio = result[f"{way}_ratio"]
        best = result[f"{way}_best_ratio"]
        below = "" if ratio >= GOAL else " BELOW THE GOAL"
        parts.append(f"{way}: {shown}  ratio {ratio:.2f}{below}, of the best rounds {best:.2f}")
    return "\n    ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"one of {', '.join(KINDS)}; default all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", default="1,4,16", help="MiB, with commas between")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dir", type=Path, help="where servers keep their files")
    options = parser.parse_args()
    results = []
    for kind in options.kinds or KINDS:
        module = importlib.import_module(f"benchmarks.tier_{kind}")
        with tempfile.TemporaryDirectory(dir=options.dir) as folder, module.cases(Path(folder)) as cases:
            for case in cases:
                for size in options.sizes.split(","):
                    result = measure(case, int(size) * MIB, options.rounds, options.threads)
                    print(_line(result), flush=True)
                    results.append(result)
    publish({"load_after": os.getloadavg()[0], "goal": GOAL, "tiers": results}, options.json)


if __name__ == "__main__":
    main()
