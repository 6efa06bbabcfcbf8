"""All benchmarks in turn, each in its own process: figures to docs/benchmarks/, tables into the page.

make bench            (ARGS='--only core' for one of them)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.page import write_page, write_plot

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "benchmarks"
PARTS = ("core", "ttft")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument(
        "--dir", type=Path, default=ROOT / ".cache", help="a directory on the disk to measure"
    )
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    options.dir.mkdir(parents=True, exist_ok=True)
    for part in options.only or PARTS:
        print(f"{part} …", flush=True)
        target = FOLDER / f"{part}.json"
        call = [sys.executable, "-m", f"benchmarks.{part}", "--json", str(target), "--dir", str(options.dir)]
        subprocess.run(call, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        result = json.loads(target.read_text())
        target.write_text(json.dumps({"machine": machine(), **result}, indent=2) + "\n")
    results = {part: json.loads((FOLDER / f"{part}.json").read_text()) for part in PARTS}
    write_page(results)
    write_plot(results["ttft"], FOLDER / "ttft.png")


def machine() -> dict[str, Any]:
    """What it ran on and how busy that was: without it a figure says nothing."""
    return {
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "kernel": platform.release().split("-")[0],
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
