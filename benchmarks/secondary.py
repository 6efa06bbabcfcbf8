"""vLLM's own file tier and ours as secondary tiers of one CPU tier: how fast chunks go down and come up.

python -m benchmarks.secondary [--json FILE] [--dir DIR] [--rounds N]

Both belong to one `TieringOffloadingManager` and get the same jobs in turn, as vLLM's scheduler gives them.
`store` is until the job has ended, `kept` until all of it is in files; ours loads once from its RAM and once
from files alone. What is loaded is compared byte by byte. Files are written and read past the page cache
by both. vLLM's copies between GPU and CPU tier have no part in this.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob

from benchmarks.run import ROOT, machine
from benchmarks.timing import publish, ratio, shown
from tiercel.engines.vllm.secondary import TiercelTier

CHUNKS, LAYERS, TOKENS = 64, 8, 256
# Rounds in which a set of chunks has left our RAM, which has room for two.
AGE = 3
PATIENCE_S = 120.0
FOLDER = "toy"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--dir", type=Path, default=ROOT / ".cache", help="a directory on the disk to measure"
    )
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    before = machine()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="secondary-") as name:
        connector = made(Path(name))
        try:
            results = measured(connector, options.rounds)
        finally:
            connector.shutdown()
    publish({"machine": before, **results}, options.json)


def made(folder: Path) -> OffloadingConnector:
    """The scheduler's half of vLLM's connector with both tiers."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
    set_bytes = CHUNKS * LAYERS * spec.page_size_bytes
    ours = {
        "type": "TiercelTier", "module_path": "tiercel.engines.vllm.secondary",
        "ram.size": f"{2 * set_bytes + (64 << 20)}B", "tiers.0.path": str(folder / "ours"),
        "tiers.0.size": "8GiB",
    }  # fmt: skip
    transfer = {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": set_bytes,
            "secondary_tiers": [{"type": "fs", "root_dir": str(folder / "fs")}, ours],
        },
    }  # fmt: skip
    model = folder / FOLDER
    model.mkdir()
    content = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "vocab_size": 1000,
        "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 4096,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(content))
    config = EngineArgs(
        model=str(model), skip_tokenizer_init=True, enforce_eager=True, load_format="dummy",
        max_model_len=1024, kv_transfer_config=transfer,  # type: ignore[arg-type]
    ).create_engine_config()  # fmt: skip
    names = [f"layer{number}" for number in range(LAYERS)]
    page, blocks = spec.page_size_bytes, 4
    tensor = KVCacheTensor(page * LAYERS * blocks, names, layer_stride=page * blocks, block_stride=page)
    cache = KVCacheConfig(
        blocks, [tensor], [KVCacheGroupSpec(names, spec)], kv_cache_layout="LBHNC", hash_block_size=TOKENS,
        kv_tp_replicas=1,
    )  # fmt: skip
    return OffloadingConnector(config, KVConnectorRole.SCHEDULER, cache)


def measured(connector: OffloadingConnector, rounds: int) -> dict[str, Any]:
    manager: Any = connector.scheduler.manager
    fs, ours = manager.secondary_tiers
    assert isinstance(ours, TiercelTier)
    rows = np.asarray(memoryview(manager.primary_tier.get_kv_memoryview().cast("B")))
    rows = rows.reshape(CHUNKS, -1)
    random = np.random.default_rng(0)
    content = random.integers(0, 256, rows.shape, np.uint8)
    times: dict[str, list[float]] = {
        name: [] for name in ("fs_store", "ours_store", "ours_kept", "fs_load", "ours_load_ram", "ours_load")
    }
    for number in range(rounds + AGE):
        rows[:] = content ^ np.uint8(number)
        for name, tier in (("fs", fs), ("ours", ours)):
            started_s = time.perf_counter()
            run(tier, number, load=False)
            times[f"{name}_store"].append(time.perf_counter() - started_s)
            if tier is ours:
                assert ours._store.flush(PATIENCE_S)
                times["ours_kept"].append(time.perf_counter() - started_s)
        aged = number - AGE
        for name, tier, which in (
            ("fs_load", fs, aged), ("ours_load_ram", ours, number), ("ours_load", ours, aged)
        ):  # fmt: skip
            if which < 0:
                continue
            rows[:] = 0
            started_s = time.perf_counter()
            run(tier, which, load=True)
            times[name].append(time.perf_counter() - started_s)
            assert np.array_equal(rows, content ^ np.uint8(which)), name
    places = [tier.counters for tier in ours._store.stats().tiers]
    assert places[0].read_blocks >= rounds * CHUNKS, "ours was not read from files"
    nbytes = rows.nbytes
    return {
        "chunk_bytes": nbytes // CHUNKS,
        "chunks_per_job": CHUNKS,
        "gb_per_s": {name: nbytes / shown(taken[1:])["median_s"] / 1e9 for name, taken in times.items()},
        "seconds": {name: shown(taken[1:]) for name, taken in times.items()},
        "kept_fs_over_ours": ratio(times["fs_store"][1:], times["ours_kept"][1:]),
        "load_fs_over_ours": ratio(times["fs_load"][1:], times["ours_load"][1:]),
    }


_JOBS = itertools.count()


def run(tier: SecondaryTierManager, number: int, *, load: bool) -> None:
    """One job of all rows, from hand-over to its end."""
    keys: Sequence[OffloadKey] = [
        OffloadKey(number.to_bytes(16, "big") + chunk.to_bytes(16, "big") + bytes(4))
        for chunk in range(CHUNKS)
    ]
    context = ReqContext(f"{number}")
    for at, key in enumerate(keys, 1):
        context.set_offload_key_position(key, at * TOKENS)
    tier.on_new_request(context)
    job = TransferJob(next(_JOBS), keys, np.arange(CHUNKS, dtype=np.int32), load, context)
    (tier.submit_load if load else tier.submit_store)(job)
    until_s = time.monotonic() + PATIENCE_S
    while not (ended := list(tier.get_finished_jobs())):
        assert time.monotonic() < until_s, "the job does not end"
        time.sleep(0.0002)
    assert ended[0].job_id == job.job_id
    assert ended[0].success, "the job failed"
    tier.on_request_finished(context)


if __name__ == "__main__":
    main()
