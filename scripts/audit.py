"""Known vulnerabilities of what Tiercel is installed with: `make audit`.

    python -m scripts.audit PIP_AUDIT [FILE ...]     the pinned files, or the image's and the tests' own

pip-audit asks the package index for advisories, so this needs the network and is no part of `make test`. Ends
with 0 if none is known of what could be looked at, 1 if one is, 3 if nothing could be looked at: one line.
"""

from __future__ import annotations

import json
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
    command = [program, "--disable-pip", "--no-deps", "--progress-spinner", "off", "--format", "json"]
    for file in files or [str(ROOT / name) for name in FILES]:
        command += ["--requirement", file]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONGEST_S)
    except FileNotFoundError:
        return not_done(f"{program} is not installed (make audit installs it where there is a package index)")
    except subprocess.TimeoutExpired:
        return not_done(f"no answer within {_LONGEST_S} s")
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return not_done(f"the package index could not be asked for advisories: {last[:160]}")
    looked = [one for one in packages if "vulns" in one]
    if not looked:
        return not_done(
            f"the package index has no advisories; of {len(packages)} packages none was looked at"
        )
    for one in looked:
        for found in one["vulns"]:
            print(f"{one['name']} {one['version']}: {found['id']}, mended in {found.get('fix_versions')}")
    known = sum(len(one["vulns"]) for one in looked)
    others = len(packages) - len(looked)
    print(f"audit: {len(looked)} packages looked at, {known} vulnerabilities known; {others} not looked at")
    return 1 if known else 0


def not_done(why: str) -> int:
    print(f"audit: not done: {why}", file=sys.stderr)
    return NOT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
