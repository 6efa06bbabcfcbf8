"""Time to first token with the real model: recompute, from RAM, from disk in a new process.

    python -m benchmarks.ttft [--json FILE] [--dir DIR] [--tokens N]

Every arm answers the same prompts in one run, in turn; the new process is a real one. The text is Python's
own language reference, which comes with the interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.timing import publish, ratio, shown
from tiercel.config import Config
from tiercel.engines.transformers import Request, Result, TransformersEngine, open_engine
from tiercel.models import demo_model_dir
from tiercel.store import TieredStore

PROMPTS = 5
RESULT_LINE = "RESULT "


def prompts(engine: TransformersEngine, tokens: int) -> list[list[int]]:
    """`PROMPTS` prompts of exactly `tokens` tokens that differ from the first block on."""
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = engine.encode(text)
    assert len(ids) >= tokens + PROMPTS * 1000
    return [ids[start * 1000 : start * 1000 + tokens] for start in range(PROMPTS)]


def first_token(engine: TransformersEngine, tokens: list[int], *, use_cache: bool = True) -> Result:
    *_, result = engine.generate(Request(tokens=tokens, max_new_tokens=1, use_cache=use_cache))
    assert isinstance(result, Result)
    return result


def one_shot(engine: TransformersEngine, tokens: list[int]) -> float:
    """A plain transformers prefill of the whole prompt in one step, without any of our code."""
    ids = torch.tensor([tokens])
    started = time.perf_counter()
    with torch.inference_mode():
        engine.model.module(input_ids=ids, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1)
    return time.perf_counter() - started


def config(cache_dir: Path) -> Config:
    overrides = {"ram.size": "2GiB", "tiers.0.path": str(cache_dir), "tiers.0.size": "20GB"}
    return Config.load(environ={}, overrides=overrides)


def copy_rates(engine: TransformersEngine, tokens: list[int]) -> dict[str, float]:
    """Strided copies between cache and payload, against a plain copy of the same bytes."""
    blocks = len(tokens) // engine.block_tokens
    cache = engine.take_cache(len(tokens))
    size = engine.layout.payload_bytes
    slab = torch.zeros(blocks, size, dtype=torch.uint8)
    other = torch.zeros_like(slab)
    payloads = [memoryview(row.numpy()) for row in slab]
    plain, into, out = [], [], []
    for _ in range(8):
        started = time.perf_counter()
        for row, target in zip(slab, other, strict=True):
            target.copy_(row)
        copied = time.perf_counter()
        cache.clear()
        for index, payload in enumerate(payloads):
            cache.restore_block(index, payload)
        restored = time.perf_counter()
        for index, payload in enumerate(payloads):
            cache.save_block(index, payload)
        saved = time.perf_counter()
        plain.append(copied - started)
        into.append(restored - copied)
        out.append(saved - restored)
    engine.give_back(cache)
    return {
        "plain_copy_gb_per_s": blocks * size / statistics.median(plain[1:]) / 1e9,
        "restore_of_plain": ratio(plain[1:], into[1:]),
        "save_of_plain": ratio(plain[1:], out[1:]),
    }


def measure(folder: Path, tokens: int) -> dict[str, Any]:
    engine, store = open_engine(demo_model_dir(os.environ, notice), config(folder))
    texts = prompts(engine, tokens)
    one_shot(engine, texts[0])
    first_token(engine, texts[0], use_cache=False)
    times: dict[str, list[float]] = {name: [] for name in ("one_shot", "recompute", "cold", "ram", "store")}
    tokens_seen = []
    for text in texts:
        times["one_shot"].append(one_shot(engine, text))
        plain = first_token(engine, text, use_cache=False)
        cold = first_token(engine, text)
        warm = first_token(engine, text)
        assert not cold.reused_tokens
        assert warm.sources == {"ram": (tokens - 1) // engine.block_tokens}
        times["recompute"].append(plain.timing.ttft_s)
        times["cold"].append(cold.timing.ttft_s)
        times["store"].append(cold.timing.store_s)
        times["ram"].append(warm.timing.ttft_s)
        tokens_seen.append((plain.tokens, cold.tokens, warm.tokens))
    copies = copy_rates(engine, texts[0])
    finish(store)
    resumed = resume_in_new_process(folder, tokens)
    same = [
        len({*seen, tuple(other)}) == 1 for seen, other in zip(tokens_seen, resumed["tokens"], strict=True)
    ]
    return {
        "prompt_tokens": tokens,
        "prompts": PROMPTS,
        "payload_bytes": engine.layout.payload_bytes,
        "one_shot_prefill": shown(times["one_shot"]),
        "recompute": shown(times["recompute"]),
        "cold_with_store": shown(times["cold"]),
        "store_work": shown(times["store"]),
        "store_overhead": statistics.median(
            spent / whole for spent, whole in zip(times["store"], times["cold"], strict=True)
        ),
        "from_ram": shown(times["ram"]) | {"speedup": ratio(times["recompute"], times["ram"])},
        "from_disk_new_process": shown(resumed["ttft_s"])
        | {"speedup": ratio(times["recompute"], resumed["ttft_s"])},
        "same_first_token": all(same),
        "kv_copies": copies,
    }


def finish(store: TieredStore) -> None:
    assert store.close(60), "the store did not flush in time"


def resume_in_new_process(folder: Path, tokens: int) -> dict[str, Any]:
    call = [sys.executable, "-m", "benchmarks.ttft", "--resume", str(folder), "--tokens", str(tokens)]
    done = subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    line = next(line for line in done.stdout.splitlines() if line.startswith(RESULT_LINE))
    answer: dict[str, Any] = json.loads(line.removeprefix(RESULT_LINE))
    return answer


def resume(folder: Path, tokens: int) -> None:
    """In the new process: one short run to load code paths, then each prompt once, from disk."""
    engine, store = open_engine(demo_model_dir(os.environ, notice), config(folder))
    texts = prompts(engine, tokens)
    first_token(engine, list(range(100, 700)), use_cache=False)
    seen, times = [], []
    for text in texts:
        result = first_token(engine, text)
        assert result.sources == {"disk": (tokens - 1) // engine.block_tokens}, result.sources
        seen.append(result.tokens)
        times.append(result.timing.ttft_s)
    store.close()
    print(RESULT_LINE + json.dumps({"ttft_s": times, "tokens": seen}))


def notice(text: str) -> None:
    print(text, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dir", type=Path, default=None, help="a directory on the disk to measure")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--resume", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.resume:
        resume(options.resume, options.tokens)
        return
    folder = Path(tempfile.mkdtemp(prefix="tiercel-bench-", dir=options.dir))
    try:
        results = measure(folder / "cache", options.tokens)
    finally:
        shutil.rmtree(folder)
    publish(results, options.json)


if __name__ == "__main__":
    main()
