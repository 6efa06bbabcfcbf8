"""The backend with SGLang's own classes, in a process of its own: importing SGLang changes libraries."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.engines.sglang.inside.boot import HOME, installed

from tiercel.engines.sglang.support import VERSIONS

ROOT = Path(__file__).parents[3]
INSIDE = Path(__file__).parent / "inside"


@pytest.mark.skipif(installed() is None, reason=f"no SGLang in {HOME}; make setup puts it there")
@pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM, and so not what SGLang imports as well")
def test_inside_sglang() -> None:
    """One process for all of `inside/`: importing SGLang takes as long as they do."""
    assert installed() in VERSIONS, "the release that is tested is the one that is accepted"
    # A short path: sockets are made below it.
    with TemporaryDirectory(prefix="tiercel-") as folder:
        done = subprocess.run(
            [
                # Should one of them hang, its own limit comes first and tells where.
                sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=240",
                "-p", "tests.engines.sglang.inside.begin", f"--basetemp={folder}/in",
                *map(str, sorted(INSIDE.glob("on_*.py"))),
            ],
            cwd=ROOT, capture_output=True, text=True, timeout=550, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""},
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted is not None
    assert int(counted.group(1)) >= 50, "they were really run"
