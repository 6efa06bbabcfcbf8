"""Known vulnerabilities of what Tiercel is installed with: `make audit`.

    python -m scripts.audit PIP_AUDIT [FILE ...]     the pinned files, or the image's and the tests' own

pip-audit asks the advisory database of the package index, so this needs the network and is no part of `make
test`. Ends with 0 if nothing is known, 1 if something is (pip-audit's table says what), 3 if it could not be
asked: one line.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = (
    "deploy/docker/requirements.txt",
    "requirements/dev.txt",
    "requirements/torch.txt",
    "requirements/vllm.txt",
)
NOT_DONE = 3
_LONGEST_S = 600


def main(arguments: Sequence[str]) -> int:
    program, *files = arguments or ["pip-audit"]
    files = files or [str(ROOT / name) for name in FILES]
    command = [program, "--disable-pip", "--no-deps", "--progress-spinner", "off", "--timeout", "10"]
    for file in files:
        command += ["--requirement", file]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONGEST_S)
    except FileNotFoundError:
        return not_done(f"{program} is not installed (make audit installs it where there is a package index)")
    except subprocess.TimeoutExpired:
        return not_done(f"no answer within {_LONGEST_S} s")
    if done.stdout.strip():
        sys.stdout.write(done.stdout)
    if done.returncode == 0:
        print("audit: nothing is known of what is pinned in " + ", ".join(files))
        return 0
    if "vulnerabilit" in done.stderr.lower() and "Found " in done.stderr:
        print(f"audit: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return 1
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return not_done(f"the advisories of the package index could not be asked: {last[:160]}")


def not_done(why: str) -> int:
    print(f"audit: not done: {why}", file=sys.stderr)
    return NOT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
