"""Builders and the published trace, for all tests of the simulator."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tiercel.plan.simulate.trace import Trace, build_trace, read_trace

TRACE_NAME = "conversation_trace.jsonl"
# Read now: single tests run without the caller's TIERCEL_ variables.
TRACE_FOLDER = Path(
    os.environ.get("TIERCEL_TRACES", Path(__file__).resolve().parents[3].parent / "shared" / "traces")
)
TraceMaker = Callable[..., Trace]


@pytest.fixture(scope="session")
def make_trace() -> TraceMaker:
    """Build a trace from the contents of prompts: a prompt is a list of blocks, each any small number.

    Equal prefixes become equal chains of ids. Request i arrives at second i unless `arrivals` are given.
    """

    def make(
        prompts: Sequence[Sequence[int]],
        *,
        block_tokens: int = 4,
        last_block_tokens: int | None = None,
        arrivals: Sequence[float] | None = None,
    ) -> Trace:
        names: dict[tuple[int, ...], int] = {}
        ids: list[int] = []
        for prompt in prompts:
            for end in range(1, len(prompt) + 1):
                ids.append(names.setdefault(tuple(prompt[:end]), len(names)))
        lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        tokens = lengths * block_tokens
        if last_block_tokens is not None:
            tokens = np.where(lengths > 0, tokens - block_tokens + last_block_tokens, 0)
        when = np.array(arrivals if arrivals is not None else range(len(prompts)), dtype=np.float64)
        return build_trace(
            "made", block_tokens, when, tokens, np.zeros_like(tokens), lengths, np.array(ids, dtype=np.uint64)
        )

    return make


@pytest.fixture(scope="session")
def published_trace() -> Trace:
    """Mooncake's conversation trace, which is not part of this repository."""
    path = TRACE_FOLDER / TRACE_NAME
    if not path.is_file():
        pytest.skip(f"{TRACE_NAME} is neither in $TIERCEL_TRACES nor in ../shared/traces")
    return read_trace(path)
