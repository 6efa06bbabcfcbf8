"""Ask vLLM what every attention layer of a full-size model would store, without weights or a GPU.

Run as a script: model configurations as JSON on stdin, one line of JSON per model on stdout. Models are on
torch's meta device; ranks other than the first exist only as the width of their group.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1")


def start_ranks(vllm_config: Any, tp: int, pp: int) -> None:
    """One real rank in groups that claim to be `tp` and `pp` wide: enough for building, not for running."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        get_pp_group,
        get_tp_group,
        init_distributed_environment,
        initialize_model_parallel,
    )

    store = Path(tempfile.mkdtemp()) / "store"
    with set_current_vllm_config(vllm_config):
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        initialize_model_parallel(1, 1)
    get_tp_group().world_size = tp
    get_pp_group().world_size = pp


def vllm_config_of(config: dict[str, Any], tp: int, pp: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    folder = tempfile.mkdtemp()
    (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
    made = EngineArgs(
        model=folder, skip_tokenizer_init=True, enforce_eager=True, load_format="dummy", dtype="bfloat16"
    ).create_engine_config()
    made.parallel_config.tensor_parallel_size = tp
    made.parallel_config.pipeline_parallel_size = pp
    return made


def stored_by(vllm_config: Any) -> dict[str, float]:
    """Bytes per token of growing and of windowed layers, and bytes of states, on the first rank."""
    import torch
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

    sums = {"grows": 0.0, "windowed": 0.0, "fixed": 0.0}
    with set_current_vllm_config(vllm_config):
        with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
            initialize_model(vllm_config=vllm_config)
        for layer in get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values():
            spec = layer.get_kv_cache_spec(vllm_config)
            if spec is None or getattr(layer, "kv_sharing_target_layer_name", None):
                continue
            if isinstance(spec, MambaSpec):
                sums["fixed"] += spec.real_page_size_bytes
            elif isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
                sums["windowed"] += spec.real_page_size_bytes / spec.block_size
            else:
                sums["grows"] += spec.real_page_size_bytes / spec.block_size
    return sums


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what vLLM prints belongs to the diagnostics
    tp, pp = int(sys.argv[1]), int(sys.argv[2])
    started = False
    for name, config in json.load(sys.stdin).items():
        try:
            made = vllm_config_of(config, tp, pp)
            if not started:
                start_ranks(made, tp, pp)
                started = True
            answer: dict[str, Any] = stored_by(made)
        except Exception as error:  # noqa: BLE001 - a model that this vLLM cannot build is an answer
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps({"model": name, **answer}), file=answers, flush=True)


if __name__ == "__main__":
    main()
