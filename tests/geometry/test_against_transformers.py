"""The oracle that is no formula: tiny models of many families run here, and their caches are weighed.

Skipped where transformers is not installed. Weights are random; only the shapes of the cache matter.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from tiercel.geometry import KVGeometry, kv_dtype
from tiercel.geometry.engines import as_stored

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA = {
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
TOKENS = 40
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"head_dim": None, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 4},
    "qwen3": {"head_dim": 24},
    "mistral": {"sliding_window": 16},
    "phi3": {"head_dim": None, "sliding_window": 16},
    "gemma2": {"sliding_window": 16},
    "gemma3_text": {"sliding_window": 16},
    "gemma4_text": {
        "sliding_window": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
    "gpt_oss": {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "cohere2": {"head_dim": None, "sliding_window": 16},
    "olmo3": {"head_dim": None, "sliding_window": 16},
    "smollm3": {"head_dim": None},
    "llama4_text": {
        "attention_chunk_size": 16,
        "num_local_experts": 2,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 1,
    },
    "falcon": {"head_dim": None, "num_key_value_heads": None, "alibi": False},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 6, "n_head": 4, "head_dim": None},
    "deepseek_v3": {**MLA, **MOE, "head_dim": None, "first_k_dense_replace": 2},
    "glm4_moe_lite": {**MLA, **MOE, "head_dim": None},
    "minicpm3": {**MLA, "head_dim": None},
    "deepseek_v32": {
        **MLA,
        **MOE,
        "head_dim": None,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 8,
    },
    "lfm2": {"head_dim": None, "full_attn_idxs": [1, 4]},
    "jamba": {
        "head_dim": None,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "use_mamba_kernels": False,
        "mamba_dt_rank": 4,
    },
    "qwen3_5_text": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "mimo_v2_flash": {
        **MOE,
        "sliding_window": 16,
        "v_head_dim": 8,
        "swa_head_dim": 16,
        "swa_v_head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
    },
}


def cache_bytes(config: Any, tokens: int) -> int:
    """Bytes of keys, values and selector keys after one forward pass; recurrent states are not counted."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.arange(tokens).remainder(60).add(3).unsqueeze(0)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    kept = 0
    for layer in cache.layers:
        tensors = (getattr(layer, name, None) for name in ("keys", "values", "indexer_keys"))
        kept += sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
    return kept


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("model_type", MODELS)
def test_a_running_model_keeps_what_the_geometry_says(model_type: str) -> None:
    fields = {**SMALL, **MODELS[model_type]}
    config = transformers.AutoConfig.for_model(
        model_type, **{name: value for name, value in fields.items() if value is not None}
    )
    dtype = kv_dtype("float32")
    stored = as_stored(KVGeometry.from_config(config.to_dict()), "transformers", dtype)
    groups = [group for group in stored.geometry.groups if group.per_token]
    said = sum((stored.group_bytes(group, TOKENS, dtype) for group in groups), Fraction(0))
    assert cache_bytes(config, TOKENS) == said
