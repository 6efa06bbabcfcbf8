"""Traffic that never repeats: what storing it costs, what it writes, and whether a repeat is still found.

    python -m benchmarks.no_reuse [--json FILE] [--dir DIR] [--prompts N] [--tokens N] [--page]

One engine answers the same unique prompts three ways, in rounds of a few prompts: without a cache, with a
store that keeps everything at once, with one that keeps what comes by twice. A round's time includes waiting
until the last byte is written, so that background writing is charged to the arm that caused it. One token is
answered: the whole cost of the store falls on the prefill. Throughput is compared by the ratio of the arms'
total times; its interval is a bootstrap over rounds. `processor` is the same of processor time, which a busy
machine changes less (with OMP_NUM_THREADS=1: nobody spins).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import PAGE, between
from benchmarks.run import FOLDER, machine
from benchmarks.timing import publish
from benchmarks.ttft import first_token
from tiercel.blocks import record_bytes
from tiercel.engines.transformers import TransformersEngine
from tiercel.memory import Arena
from tiercel.models import demo_model_dir
from tiercel.store import LaneOptions, SecondSight, TieredStore
from tiercel.tiers import FilesTier

NONE, AT_ONCE, SECOND_SIGHT = "no cache", "at-once", "second-sight"
GOAL = 0.98
ROUND, REPEATED = 20, 20
SLOTS, CAP_BYTES = 64, 2 << 30
RESAMPLES = 4000
BEGIN, END = "<!-- figures: made by benchmarks.no_reuse -->", "<!-- end of no reuse -->"


class Arms:
    """One engine with its store changed between rounds."""

    def __init__(self, folder: Path) -> None:
        self.engine = TransformersEngine(demo_model_dir(os.environ))
        slot_bytes = record_bytes(self.engine.layout.payload_bytes)
        arenas = [Arena(slot_bytes, SLOTS, reserved=8) for _ in range(2)]
        for arena in arenas:
            # A service that has run for a while has touched its memory; the first touch costs it once.
            arena.prefault()
        self.stores = {
            name: TieredStore(
                arena,
                [(FilesTier(folder / name), LaneOptions(cap_bytes=CAP_BYTES))],
                admission,
            )
            for arena, (name, admission) in zip(
                arenas, ((AT_ONCE, None), (SECOND_SIGHT, SecondSight())), strict=True
            )
        }

    def use(self, arm: str) -> TieredStore | None:
        store = self.stores.get(arm)
        if store is None:
            self.engine.prefix = None
        else:
            self.engine.attach(store)
        return store

    def seconds(self, arm: str, texts: Sequence[list[int]]) -> tuple[float, float]:
        """Seconds by the clock and of processor time for these prompts, all that they cause included."""
        store = self.use(arm)
        started, began_cpu_s = time.perf_counter(), time.process_time()
        for text in texts:
            assert not first_token(self.engine, text).reused_tokens
        assert store is None or store.flush(60)
        return time.perf_counter() - started, time.process_time() - began_cpu_s

    def repeated(self, arm: str, texts: Sequence[list[int]]) -> list[int]:
        """Of prompts that come again and again: how many find something the first, the second … time."""
        self.use(arm)
        return [sum(bool(first_token(self.engine, text).reused_tokens) for text in texts) for _ in range(2)]


def written_bytes(store: TieredStore) -> int:
    return store.stats().tiers[0].counters.written_bytes


def unique(tokens: int, number: int) -> list[int]:
    source = random.Random(str(number))  # as numbers, n and -n would be the same
    return [source.randrange(1000, 40000) for _ in range(tokens)]


def measure(folder: Path, prompts: int, tokens: int) -> dict[str, Any]:
    arms = Arms(folder)
    names = [NONE, AT_ONCE, SECOND_SIGHT]
    for name in names:
        arms.seconds(name, [unique(tokens, -1 - names.index(name))])
    begun = {name: written_bytes(store) for name, store in arms.stores.items()}
    times: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for number in range(0, prompts, ROUND):
        texts = [unique(tokens, at) for at in range(number, min(prompts, number + ROUND))]
        turn = number // ROUND % len(names)
        for name in names[turn:] + names[:turn]:
            seconds, cpu_seconds = arms.seconds(name, texts)
            times[name].append(seconds)
            cpu[name].append(cpu_seconds)
    blocks = prompts * (tokens // arms.engine.block_tokens)
    record = record_bytes(arms.engine.layout.payload_bytes)
    result: dict[str, Any] = {"prompts": prompts, "tokens": tokens, "rounds": len(times[NONE]), "arms": {}}
    for name, store in arms.stores.items():
        result["arms"][name] = {
            "throughput": interval(times[NONE], times[name]),
            "processor": interval(cpu[NONE], cpu[name]),
            "written_bytes": written_bytes(store) - begun[name],
            "admitted_bytes": blocks * record if name == AT_ONCE else 0,
            "kept_bytes": store.stats().tiers[0].used_bytes,
        }
    last = [unique(tokens, at) for at in range(prompts - min(prompts, REPEATED), prompts)]
    for name, store in arms.stores.items():
        result["arms"][name]["repeated"] = {"prompts": len(last), "found": arms.repeated(name, last)}
        assert store.close(60)
    result["prompts_per_s"] = prompts / sum(times[NONE])
    return result


def interval(base: Sequence[float], other: Sequence[float], resamples: int = RESAMPLES) -> dict[str, float]:
    """Throughput of `other` as a share of `base`'s, with the middle 95 % of resampled rounds."""
    pick = random.Random(0)
    rounds = range(len(base))
    seen = []
    for _ in range(resamples):
        chosen = pick.choices(rounds, k=len(base))
        seen.append(sum(base[at] for at in chosen) / sum(other[at] for at in chosen))
    seen.sort()
    low, high = seen[int(0.025 * resamples)], seen[int(0.975 * resamples)]
    return {"of_no_cache": sum(base) / sum(other), "low": low, "high": high}


def table(results: dict[str, Any]) -> str:
    """The arms as rows."""
    lines = [
        "| admission | throughput of no cache (95 %) | written | admitted | found when repeated, and again |",
        "|---|---|---|---|---|",
    ]
    for name, arm in results["arms"].items():
        speed, again = arm["throughput"], arm["repeated"]
        found = ", ".join(f"{count} of {again['prompts']}" for count in again["found"])
        lines.append(
            f"| `{name}` | {speed['of_no_cache']:.1%} ({speed['low']:.1%}–{speed['high']:.1%}) "
            f"| {arm['written_bytes'] / 1e9:.2f} GB | {arm['admitted_bytes'] / 1e9:.2f} GB | {found} |"
        )
    one = results["machine"]
    return "\n".join(lines) + (
        f"\n\n{results['prompts']:,} prompts of {results['tokens']} tokens, {results['prompts_per_s']:.1f} a "
        f"second without cache; goal: {GOAL:.0%}. {one['when']}, {one['cpu']}, {one['cores']} cores; "
        f"load before: {one['load_before']:.1f}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dir", type=Path, help="a directory on the disk to measure")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=264)
    parser.add_argument("--page", action="store_true", help="keep the figures, in docs/benchmarks")
    options = parser.parse_args()
    before = machine()
    with tempfile.TemporaryDirectory(prefix="no-reuse-", dir=options.dir) as folder:
        results = {"machine": before, **measure(Path(folder), options.prompts, options.tokens)}
    publish(results, options.json)
    if options.page:
        (FOLDER / "no_reuse.json").write_text(json.dumps(results, indent=2) + "\n")
        PAGE.write_text(between(PAGE.read_text(), BEGIN, END, table(results)))


if __name__ == "__main__":
    main()
