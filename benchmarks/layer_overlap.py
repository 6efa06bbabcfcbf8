"""What a RAM hit could gain if a layer computed while the next one is copied into the model's cache.

    python -m benchmarks.layer_overlap [--json FILE] [--tokens 2048,6000] [--rounds N]

Three ways to the first token of a prompt whose blocks are ready in memory, in turn on the same cache:
`copied` as the engine does it (all blocks, then the rest of the prompt), `overlapped` (a thread copies layer
by layer, each layer waits for its own), `free` (nothing to copy). The most there is to gain is the copy's
share of the processor time, which a busy machine hardly changes; with OMP_NUM_THREADS=1 nobody spins.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.run import machine
from benchmarks.timing import publish, ratio, shown
from benchmarks.ttft import prompts
from tiercel.engines.transformers import TransformersEngine
from tiercel.engines.transformers.kv_cache import KVCache
from tiercel.models import demo_model_dir

RESTS = (1, 112, 256)
# One thread hands over so many layers at a time: single ones cost more calls than they hide.
GROUPS = (1, 5)


class Overlapped:
    """A prompt's blocks copied layer by layer by a thread while the model already runs."""

    def __init__(self, engine: TransformersEngine, cache: KVCache, payloads: Sequence[memoryview]) -> None:
        self._engine, self._cache, self._payloads = engine, cache, payloads
        layers = engine.model.module.model.layers
        self._there = [threading.Event() for _ in layers]
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, at=number: self._there[at].wait(30) and None)

    def run(self, rest: list[int], group: int) -> torch.Tensor:
        for event in self._there:
            event.clear()
        self._cache.clear()
        self._cache.cover(len(self._payloads) * self._engine.block_tokens)
        copying = threading.Thread(target=self._copy, args=(group,))
        copying.start()
        logits = self._engine._forward(rest, self._cache)
        copying.join()
        return logits

    def let_through(self) -> None:
        """What the other arms need: no layer waits."""
        for event in self._there:
            event.set()

    @torch.inference_mode()
    def _copy(self, group: int) -> None:
        size = self._engine.block_tokens
        (slab,) = self._cache._slabs
        (part,) = slab._parts
        for first in range(0, part.shape[0], group):
            for index, payload in enumerate(self._payloads):
                target = part[first : first + group, ..., index * size : (index + 1) * size, :]
                start = first * 2 * target[0, 0].numel() * part.element_size()
                source = torch.frombuffer(payload, dtype=part.dtype, count=target.numel(), offset=start)
                target.copy_(source.view(target.shape))
            for event in self._there[first : first + group]:
                event.set()


def timed(
    rounds: int, arms: dict[str, Callable[[], object]]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds by the clock and of processor time, arm after arm in each round; the first one uncounted."""
    wall: dict[str, list[float]] = {name: [] for name in arms}
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(rounds + 1):
        for name, call in arms.items():
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            call()
            if repeat:
                wall[name].append(time.perf_counter() - began_s)
                cpu[name].append(time.process_time() - began_cpu_s)
    return wall, cpu


def by_hand(engine: TransformersEngine, tokens: list[int], rounds: int) -> list[dict[str, Any]]:
    blocks = len(tokens) // engine.block_tokens
    context = blocks * engine.block_tokens
    cache = KVCache(engine.layout, engine.model.device)
    cache.reserve(context + max(RESTS), exactly=True)
    # Any numbers do: what is compared are times, and whether both ways give the same logits.
    elements = engine.layout.payload_bytes // engine.layout.dtype.itemsize
    slab = torch.randn(blocks, elements).to(engine.layout.dtype)
    payloads = [memoryview(row.view(torch.uint8).numpy()) for row in slab]
    overlapped = Overlapped(engine, cache, payloads)

    def copy() -> None:
        cache.clear()
        for index, payload in enumerate(payloads):
            cache.restore_block(index, payload)

    def copied(rest: list[int]) -> torch.Tensor:
        overlapped.let_through()
        copy()
        return engine._forward(rest, cache)

    def free(rest: list[int]) -> torch.Tensor:
        overlapped.let_through()
        cache.truncate(context)
        return engine._forward(rest, cache)

    rows = []
    for length in RESTS:
        rest = tokens[:length]
        arms: dict[str, Callable[[], object]] = {
            "copied": lambda rest=rest: copied(rest),
            **{f"overlapped_{one}": lambda rest=rest, one=one: overlapped.run(rest, one) for one in GROUPS},
            "free": lambda rest=rest: free(rest),
            "copy alone": copy,
        }
        times, cpu = timed(rounds, arms)
        equal = all(torch.equal(copied(rest), overlapped.run(rest, one)) for one in GROUPS)
        rows.append(
            {
                "context_tokens": context,
                "rest_tokens": length,
                "seconds": {name: shown(taken) for name, taken in times.items()},
                "cpu_seconds": {name: shown(taken) for name, taken in cpu.items()},
                "most_to_gain": ratio(cpu["copy alone"], cpu["free"])
                / (1 + ratio(cpu["copy alone"], cpu["free"])),
                "gained": {
                    str(one): 1 - 1 / ratio(times["copied"], times[f"overlapped_{one}"]) for one in GROUPS
                },
                "equal_logits": equal,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", default="2048,6000")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(), "threads": torch.get_num_threads(), "lengths": []}
    engine = TransformersEngine(demo_model_dir(os.environ))
    for length in map(int, options.tokens.split(",")):
        results["lengths"] += by_hand(engine, prompts(engine, length)[0], options.rounds)
    publish(results, options.json)


if __name__ == "__main__":
    main()
