"""What only a machine with a CUDA GPU can show: right bytes, right order, how fast. One command there.

    make gpu-check             (ARGS='--json FILE' writes the figures elsewhere than docs/benchmarks/gpu.json)

Runs the tests marked `gpu` and their like, compares copies between arena and GPU with a plain pinned copy,
and answers prompts cold and warm, with vLLM where it is installed and the transformers engine else. Without a
GPU it says so, runs what a CPU can, and writes no figures unless told where. Any failure is a non-zero exit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import mmap
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import batch, offload
from benchmarks.run import FOLDER, ROOT, machine
from benchmarks.timing import interleaved, ratio, shown
from tiercel.memory import Arena, ArenaKind
from tiercel.models import demo_model_dir

TESTS = ("tests/engines/vllm/test_mover_devices.py", "tests/engines/test_device.py")
# vLLM's blocks of the demo model: 30 layers of 98,304 bytes for 128 tokens; two of them to a slot.
RUN_BYTES, RUNS = 98_304, 60
HAVE_GPU = torch.cuda.is_available()
HAVE_VLLM = importlib.util.find_spec("vllm") is not None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; without it the demo model")
    parser.add_argument("--tokens", type=int, help="length of the longest prompt")
    options = parser.parse_args()
    where = torch.cuda.get_device_name() if HAVE_GPU else "none: only what a CPU can run is checked"
    print(f"GPU: {where}", flush=True)
    passed = run_tests()
    results: dict[str, Any] = {
        "machine": machine() | {"gpu": torch.cuda.get_device_name() if HAVE_GPU else None},
        "tests_passed": passed,
    }
    if HAVE_VLLM:
        results["copies"] = copies()
    model = options.model or demo_model_dir(os.environ, print)
    tokens = options.tokens or (8000 if HAVE_GPU else 1088)
    results["engine"] = with_vllm(model, tokens) if HAVE_VLLM else with_transformers(model, tokens)
    if HAVE_VLLM:
        results["tiering"] = with_tiering(model, tokens)
    results["offload"] = offload.measured(model, tokens, answer_tokens=32, rounds=2)
    results["batch"] = batch.measured(model, min(tokens, 2000), steps=8, rounds=2, sizes=(1, 4))
    text = json.dumps(results, indent=2)
    print(text)
    target = options.json or (FOLDER / "gpu.json" if HAVE_GPU else None)
    if target:
        target.write_text(text + "\n")
    parts = (results["engine"], results.get("tiering", results["engine"]))
    if not passed or not all(one["cold_equals_warm"] for one in parts):
        sys.exit("gpu-check failed: see above")


def run_tests() -> bool:
    call = [sys.executable, "-m", "pytest", "-q", *TESTS]
    return subprocess.run(call, cwd=ROOT).returncode == 0


def copies() -> dict[str, Any]:
    """Slots to engine blocks and back as the connector does it, against one plain copy of as many bytes."""
    from tiercel.engines.vllm.layout import Copies
    from tiercel.engines.vllm.mover import mover_for

    device = torch.device("cuda" if HAVE_GPU else "cpu")
    payload_bytes, slots = RUN_BYTES * RUNS, 31
    arena = Arena(payload_bytes, slots, kind=ArenaKind.SHARED)
    slab = memoryview(mmap.mmap(arena.fileno(), arena.total_bytes))
    mover = mover_for(device)
    mover.use_slab(slab)
    cache = torch.zeros(RUNS, slots, RUN_BYTES, dtype=torch.uint8, device=device)
    host = torch.zeros(slots * payload_bytes, dtype=torch.uint8, pin_memory=HAVE_GPU)
    there = torch.zeros(slots * payload_bytes, dtype=torch.uint8, device=device)
    offsets = [run * RUN_BYTES for run in range(RUNS)]
    blocks = [
        (
            slab[slot * arena.slot_bytes :][:payload_bytes],
            Copies([cache[run, slot].data_ptr() for run in range(RUNS)], offsets, [RUN_BYTES] * RUNS),
        )
        for slot in range(slots)
    ]

    def plain(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        def run() -> None:
            target.copy_(source, non_blocking=True)
            if HAVE_GPU:
                torch.cuda.synchronize()

        return run

    times = interleaved(
        10,
        load=lambda: mover.load(mover.mark(), blocks),
        plain_to_device=plain(there, host),
        save=lambda: mover.save(mover.mark(), blocks),
        plain_to_host=plain(host, there),
    )
    rate = {name: slots * payload_bytes / shown(taken)["median_s"] / 1e9 for name, taken in times.items()}
    arena.close()
    return {
        "bytes": slots * payload_bytes,
        "runs_of_bytes": RUN_BYTES,
        "gb_per_s": rate,
        "load_of_plain": ratio(times["plain_to_device"], times["load"]),
        "save_of_plain": ratio(times["plain_to_host"], times["save"]),
    }


def with_vllm(model: Path, tokens: int) -> dict[str, Any]:
    """Cold, vLLM's own hit, Tiercel's hit after a reset and in a new engine; equal tokens to the end."""
    return in_vllm("vllm", model, tokens, lambda connector: connector, resets=True)


def with_tiering(model: Path, tokens: int) -> dict[str, Any]:
    """vLLM's own CPU tier with ours below: cold, its own hit, and a new engine whose CPU tier is empty.

    Without a GPU vLLM's copies to its CPU tier are replaced by those of the tests.
    """

    def below(connector: dict[str, Any]) -> dict[str, Any]:
        tier = {"type": "TiercelTier", "module_path": "tiercel.engines.vllm.secondary"}
        extra: dict[str, Any] = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 2 << 30,
            "block_size": 256,
            "secondary_tiers": [tier | connector["kv_connector_extra_config"]],
        }
        if not HAVE_GPU:
            extra |= {"spec_name": "CpuTieringSpec", "spec_module_path": "tests.engines.vllm.secondary.cpu"}
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
            "kv_load_failure_policy": "recompute",
        }

    return in_vllm("vllm, OffloadingConnector", model, tokens, below, resets=False)


def in_vllm(
    name: str,
    model: Path,
    tokens: int,
    connector_of: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    resets: bool,
) -> dict[str, Any]:
    """Prompts in one engine and the one after it, over one daemon; `connector_of` is given its connector.

    `resets`: the first engine's own cache can be emptied, so that it hits Tiercel as well.
    """
    from benchmarks.vllm.servers import TiercelDaemon

    prompts = [random_prompt(tokens, number) for number in range(3)]
    hits = ("own_hit", "hit", "restart") if resets else ("own_hit", "restart")
    times: dict[str, list[float]] = {kind: [] for kind in ("cold", *hits)}
    answers: dict[str, list[list[int]]] = {kind: [] for kind in hits}
    with tempfile.TemporaryDirectory(prefix="tiercel-gpu-") as folder:
        daemon = TiercelDaemon(Path(folder), "tiercel", "4GiB" if HAVE_GPU else "1GiB", files=False)
        engines = partial(started, model, tokens, connector_of(daemon.connector()), Path(folder))
        try:
            engine = engines()
            for prompt in prompts:
                times["cold"].append(engine.ask("ttft", tokens=prompt)["seconds"])
                time.sleep(0.3)
                ask(engine, prompt, "own_hit", times, answers)
                if resets:
                    engine.ask("reset")
                    ask(engine, prompt, "hit", times, answers)
            time.sleep(1.0)
            engine.stop()
            engine = engines()
            for prompt in prompts:
                ask(engine, prompt, "restart", times, answers)
            engine.stop()
        finally:
            daemon.stop()
    return {
        "engine": name,
        "prompt_tokens": tokens,
        "ttft": {kind: shown(taken) for kind, taken in times.items()},
        "recompute_over_hit": ratio(times["cold"], times[hits[1]]),
        "hit_over_own_hit": ratio(times[hits[1]], times["own_hit"]),
        # Against vLLM's own hit: cold, the last tokens are computed in another batch, which rounds otherwise.
        "cold_equals_warm": all(answers[kind] == answers["own_hit"] for kind in hits),
    }


def started(model: Path, tokens: int, connector: dict[str, Any], folder: Path) -> Any:
    """A vLLM engine that has answered once."""
    from benchmarks.vllm.driver import EngineProcess

    env = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    env["PYTHONPATH"] = str(ROOT)
    if not HAVE_GPU:
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}"}
    options: dict[str, Any] = {"model": str(model), "max_model_len": tokens + 128, "seed": 0}
    options |= {"enforce_eager": not HAVE_GPU, "kv_transfer_config": connector}
    if HAVE_GPU:
        options["gpu_memory_utilization"] = 0.5
    engine = EngineProcess("vllm", Path(sys.executable), options, env, folder / "engine.log")
    engine.wait_ready()
    engine.ask("ttft", tokens=random_prompt(tokens, -1))
    return engine


def ask(
    engine: Any,
    prompt: list[int],
    kind: str,
    times: dict[str, list[float]],
    answers: dict[str, list[list[int]]],
) -> None:
    first = engine.ask("ttft", tokens=prompt)
    assert first["reused"] >= len(prompt) // 256 * 256, f"{kind}: only {first['reused']} tokens reused"
    times[kind].append(first["seconds"])
    answers[kind].append(engine.ask("answer", tokens=prompt, max_tokens=64)["tokens"])


def with_transformers(model: Path, tokens: int) -> dict[str, Any]:
    from tiercel.config import Config
    from tiercel.engines.transformers import Request, Result, open_engine

    config = Config.load(environ={}, overrides={"ram.size": "1GiB"})
    engine, store = open_engine(model, config)
    cold, warm, answers = [], [], []
    for number in range(-1, 3):
        request = Request(tokens=random_prompt(tokens, number), max_new_tokens=64)
        results = []
        for _ in range(2):
            *_, result = engine.generate(request)
            assert isinstance(result, Result)
            results.append(result)
        if number >= 0:
            assert results[1].reused_tokens, "nothing was reused"
            cold.append(results[0].timing.ttft_s)
            warm.append(results[1].timing.ttft_s)
            answers.append(results[0].tokens == results[1].tokens)
    store.close()
    return {
        "engine": "transformers",
        "prompt_tokens": tokens,
        "ttft": {"cold": shown(cold), "hit": shown(warm)},
        "recompute_over_hit": ratio(cold, warm),
        "cold_equals_warm": all(answers),
    }


def random_prompt(tokens: int, number: int) -> list[int]:
    source = random.Random(str(number))  # as numbers, -1 and 1 would be the same
    return [source.randrange(1000, 40000) for _ in range(tokens)]


if __name__ == "__main__":
    main()
