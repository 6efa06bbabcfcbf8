"""What a token of an answer costs in batches of several sizes, with and without a KV device budget.

    python -m benchmarks.batch [--json FILE] [--tokens N] [--steps N] [--rounds N] [--threads N] [--model DIR]

Batches of 1, 2, 4 and 8 answers to prompts of so many tokens decode in turn, some steps each, in engines
without a budget and with budgets of 25 and 10 % of the batch's KV; with "streamed", KV is brought to the
device for decoding, too, in FlexGen's order, instead of computed with where it lies. Ratios are to one answer
at a time without a budget, in the same run. On a CPU the "device" is the same memory; processor time, which a
busy machine hardly changes, counts the copying, too. Prints the figures, and tables for docs/offload.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.run import machine
from benchmarks.timing import publish
from benchmarks.ttft import prompts
from tiercel.engines.transformers import Batch, Request, TransformersEngine
from tiercel.models import demo_model_dir

SIZES = (1, 2, 4, 8)
SHARES = (0.25, 0.1)
STREAMED_SHARE = 0.25
PLAIN = "none"


@dataclass(slots=True)
class Arm:
    """A batch that decodes, and seconds per token of its rounds, by the clock and of processor time."""

    batch: Batch
    streamed: bool = False
    clock_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def run(self, steps: int) -> None:
        """Let it decode `steps` tokens of every answer."""
        offload, tokens = self.batch._engine.offload, steps * len(self.batch)
        if offload is not None:
            offload.stream_from_tokens = 1 if self.streamed else 2
        clock_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(steps):
            said = self.batch.step()
            assert len(said) == len(self.batch), "all decode"
        self.clock_s.append((time.perf_counter() - clock_s) / tokens)
        self.cpu_s.append((time.process_time() - cpu_s) / tokens)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; without it the demo model")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = options.model or demo_model_dir(os.environ, print)
    found = measured(model, options.tokens, options.steps, options.rounds)
    publish(found, options.json)
    print(tables(found["arms"]))


def measured(
    model: Path, tokens: int, steps: int, rounds: int, sizes: Sequence[int] = SIZES
) -> dict[str, Any]:
    """Medians of each arm, and its ratio to one answer at a time without a budget."""
    plain = without_end(TransformersEngine(model, batch=max(sizes)))
    kv_bytes = plain.layout.token_bytes * (tokens + 2 * steps * (rounds + 1))
    requests = [
        Request(prompt, max_new_tokens=4 * steps * (rounds + 1), use_cache=False)
        for prompt in several(plain, tokens, max(sizes))
    ]
    arms: dict[str, dict[int, Arm]] = {PLAIN: {}}
    for size in sizes:
        arms[PLAIN][size] = Arm(decoding(plain, requests[:size]))
        for share in SHARES:
            budget = int(share * size * kv_bytes)
            engine = without_end(TransformersEngine(model, kv_device_bytes=budget, batch=size))
            batch = decoding(engine, requests[:size])
            arms.setdefault(f"{share:.0%}", {})[size] = Arm(batch)
            if share == STREAMED_SHARE:
                arms.setdefault(f"{share:.0%}, decoding streamed", {})[size] = Arm(batch, streamed=True)
    for number in range(rounds + 1):
        for by_size in arms.values():
            for arm in by_size.values():
                arm.run(steps)
                if not number:  # the first round warms up
                    arm.clock_s.clear(), arm.cpu_s.clear()
    base = arms[PLAIN][sizes[0]]
    return {
        "machine": machine() | {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None},
        "threads": torch.get_num_threads(),
        "prompt_tokens": tokens,
        "arms": {
            name: {size: row(arm, base) for size, arm in by_size.items()} for name, by_size in arms.items()
        },
    }


def several(engine: TransformersEngine, tokens: int, count: int) -> list[list[int]]:
    """So many prompts of equal length, with different beginnings."""
    found = prompts(engine, tokens + count // 2)
    return [found[at % len(found)][at // len(found) :][:tokens] for at in range(count)]


def without_end(engine: TransformersEngine) -> TransformersEngine:
    """The engine, with answers that end by their length only."""
    engine.model = replace(engine.model, eos_ids=frozenset())
    return engine


def decoding(engine: TransformersEngine, requests: list[Request]) -> Batch:
    """A batch whose members have all read their prompts."""
    batch = Batch(engine, len(requests))
    for request in requests:
        batch.admit(request)
    for _ in requests:
        batch.step()
    return batch


def row(arm: Arm, base: Arm) -> dict[str, float]:
    clock_s = statistics.median(arm.clock_s)
    found = {
        "tokens_per_s": 1 / clock_s,
        "cpu_ms_per_token": 1000 * statistics.median(arm.cpu_s),
        "cpu_of_one_at_a_time": quotient(arm.cpu_s, base.cpu_s),
        "clock_of_one_at_a_time": quotient(arm.clock_s, base.clock_s),
    }
    if (offload := arm.batch._engine.offload) is not None:
        assert offload.memory.limit_bytes is not None
        assert offload.memory.peak_bytes <= offload.memory.limit_bytes
        found |= {
            "budget_bytes": offload.memory.limit_bytes,
            "peak_bytes": offload.memory.peak_bytes,
            "ready_share": offload.stream.ready / max(1, offload.stream.pieces),
        }
    return found


def quotient(times: list[float], base: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(times, base, strict=True))


def tables(arms: Mapping[str, Mapping[int, Mapping[str, float]]]) -> str:
    """Two tables in Markdown: processor time per token, and tokens per second."""
    head = " | ".join(["budget, of the batch's KV", *(f"batch {size}" for size in SIZES)])
    line = "|".join("---" for _ in range(len(SIZES) + 1))
    parts = []
    for shown in (
        lambda one: f"{one['cpu_of_one_at_a_time']:.2f} ({one['cpu_ms_per_token']:.1f} ms)",
        lambda one: f"{one['tokens_per_s']:.1f}",
    ):
        rows = [
            " | ".join([name, *(shown(by_size[size]) for size in SIZES)]) for name, by_size in arms.items()
        ]
        parts.append("\n".join([f"| {head} |", f"|{line}|", *(f"| {one} |" for one in rows)]))
    return "\n\n".join(
        [
            "Processor time per token, of one answer at a time without a budget:",
            parts[0],
            "Tokens per second by the clock:",
            parts[1],
        ]
    )


if __name__ == "__main__":
    main()
