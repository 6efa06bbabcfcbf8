"""What a KV device budget costs: prefill and seconds per token under budgets, against the engine without one.

    python -m benchmarks.offload [--json FILE] [--tokens N] [--answer N] [--rounds N] [--model FOLDER]

Engines with budgets of 100, 50, 25 and 10 % of the KV of a prompt, and one without, answer equal prompts in
turn. With `streamed`, decoding streams KV to the device instead of computing where it lies. On a CPU the
"device" is the same memory: a copy gains nothing there, and takes what the computation could use; processor
time, which a busy machine hardly changes, counts both.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.run import machine
from benchmarks.timing import publish, ratio, shown
from benchmarks.ttft import prompts
from tiercel.engines.transformers import Request, Result, TransformersEngine
from tiercel.models import demo_model_dir

SHARES = (1.0, 0.5, 0.25, 0.1)
STREAMED_SHARE = 0.25


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; without it the demo model")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--answer", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model = options.model or demo_model_dir(os.environ, print)
    publish(measured(model, options.tokens, options.answer, options.rounds), options.json)


def measured(model: Path, tokens: int, answer_tokens: int, rounds: int) -> dict[str, Any]:
    """Median seconds of each arm, and its ratio to the engine without a budget."""
    plain = TransformersEngine(model)
    # As close to what a budget of all should hold as a share of it can say.
    kv_bytes = plain.layout.token_bytes * (tokens + answer_tokens)
    arms = {"plain": plain} | {
        f"{share:.0%}": TransformersEngine(model, kv_device_bytes=int(share * kv_bytes)) for share in SHARES
    }
    streamed = TransformersEngine(model, kv_device_bytes=int(STREAMED_SHARE * kv_bytes))
    assert streamed.offload is not None
    streamed.offload.stream_from_tokens = 1
    arms[f"{STREAMED_SHARE:.0%} streamed"] = streamed
    took: dict[str, list[Took]] = {name: [] for name in arms}
    for number, prompt in enumerate(prompts(plain, tokens)[: rounds + 1]):
        for name, engine in arms.items():
            one = answered(engine, Request(prompt, max_new_tokens=answer_tokens, use_cache=False))
            if number:
                took[name].append(one)
    return {
        "machine": machine() | {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None},
        "prompt_tokens": tokens,
        "kv_bytes": kv_bytes,
        "arms": {name: row(engine, took[name], took["plain"]) for name, engine in arms.items()},
    }


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of a prompt and per token of its answer, by the clock and of processor time; and the answer."""

    prefill: float
    per_token: float
    prefill_cpu: float
    per_token_cpu: float
    tokens: tuple[int, ...]


def answered(engine: TransformersEngine, request: Request) -> Took:
    began_s = time.process_time()
    events = engine.generate(request)
    next(events)
    first_s = time.process_time()
    *_, result = events
    assert isinstance(result, Result)
    steps = max(1, len(result.tokens) - 1)
    return Took(
        result.timing.prefill_s,
        result.timing.decode_s / steps,
        first_s - began_s,
        (time.process_time() - first_s) / steps,
        result.tokens,
    )


def row(engine: TransformersEngine, took: list[Took], plain: list[Took]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("prefill", "per_token", "prefill_cpu", "per_token_cpu"):
        mine = [getattr(one, name) for one in took]
        found[name] = shown(mine)
        found[f"{name}_of_plain"] = ratio(mine, [getattr(one, name) for one in plain])
    found["equal_answers"] = equal([one.tokens for one in took], [one.tokens for one in plain])
    if (offload := engine.offload) is not None:
        found |= {
            "budget_bytes": offload.memory.limit_bytes,
            "peak_bytes": offload.memory.peak_bytes,
            "streamed_bytes": offload.stream.copied_bytes,
            "ready_share": offload.stream.ready / max(1, offload.stream.pieces),
        }
    return found


def equal(some: Sequence[tuple[int, ...]], others: Sequence[tuple[int, ...]]) -> float:
    """Share of answers with equal tokens: in half precision a different order of sums may change one."""
    return sum(one == other for one, other in zip(some, others, strict=True)) / max(1, len(some))


if __name__ == "__main__":
    main()
