"""vLLM, imported once and quietly; without it these tests are skipped and say so."""

from __future__ import annotations

import os
import warnings

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

pytest.importorskip("vllm", reason="vLLM is not installed", exc_type=ImportError)
with warnings.catch_warnings():
    # vLLM's and its dependencies' own deprecations are not ours to mend.
    warnings.simplefilter("ignore")
    import vllm.engine.arg_utils
    import vllm.v1.core.sched.scheduler  # noqa: F401


@pytest.fixture(autouse=True)
def _foreign_warnings() -> None:
    warnings.filterwarnings("ignore", module=r"(vllm|torch|transformers|triton)\b.*")
