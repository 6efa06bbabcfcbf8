"""Picture of a report for the docs: `python -m scripts.demo_report tiercel-demo.html`, or another's, `--out`.

Takes a report that `tiercel demo` or `tiercel bench` wrote and renders it with a headless Chromium. It never
runs them itself: the picture shows a run that somebody looked at.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.browser import FLAGS, NAMES, chromium

TARGET = Path(__file__).parents[1] / "docs" / "images" / "demo-report.png"
DEADLINE_S = 120.0


def picture(report: Path, target: Path, width: int, height: int) -> None:
    """Write a PNG of the top `height` CSS pixels of `report`. Exits with one line when that fails."""
    browser = chromium()
    if browser is None:
        sys.exit(f"no browser found; accepted: one of {', '.join(NAMES)} on the PATH, or $CHROMIUM")
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [
                browser,
                "--headless",
                "--hide-scrollbars",
                *FLAGS,
                f"--user-data-dir={profile}",
                f"--window-size={width},{height}",
                f"--screenshot={target.absolute()}",
                report.absolute().as_uri(),
            ],
            capture_output=True,
            timeout=DEADLINE_S,
            check=False,
        )
    if done.returncode != 0 or not target.exists():
        sys.exit(f"{browser} could not render {report} (exit code {done.returncode})")


def main() -> None:
    """Parse the command line and render."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--out", type=Path, default=TARGET)
    parser.add_argument("--width", type=int, default=1080)
    parser.add_argument("--height", type=int, default=1180)
    asked = parser.parse_args()
    if not asked.report.is_file():
        sys.exit(f"{asked.report} is not a file; run 'tiercel demo' or 'tiercel bench' first")
    picture(asked.report, asked.out, asked.width, asked.height)


if __name__ == "__main__":
    main()
