"""The same sizes asked of vLLM: full-size models built without weights, every layer's own specification.

Skipped where vLLM cannot be imported. Experts are replaced by dense layers where the configuration allows
it, since they store nothing and not every machine has kernels for them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tiercel.geometry import KVGeometry, kv_dtype
from tiercel.geometry.engines import as_stored
from tiercel.plan.parallel import Parallel, rank_share

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

HERE = Path(__file__).parent
FIXTURES = HERE.parent / "geometry" / "fixtures"
ARCHITECTURES = {
    "Qwen--Qwen3-8B": "Qwen3ForCausalLM",
    "Qwen--Qwen3-235B-A22B": "Qwen3MoeForCausalLM",
    "Qwen--Qwen3-Next-80B-A3B": "Qwen3NextForCausalLM",
    "Zyphra--Zamba2-2.7B": "Zamba2ForCausalLM",
    "deepseek-ai--DeepSeek-V3": "DeepseekV3ForCausalLM",
    "facebook--opt-1.3b": "OPTForCausalLM",
    "google--gemma-3-1b-text": "Gemma3ForCausalLM",
    "google--gemma-3-27b-text": "Gemma3ForCausalLM",
    "meta-llama--Llama-2-7b-hf": "LlamaForCausalLM",
    "meta-llama--Meta-Llama-3.1-70B": "LlamaForCausalLM",
    "mistralai--Mistral-7B-v0.1": "MistralForCausalLM",
    "openbmb--MiniCPM3-4B": "MiniCPM3ForCausalLM",
    "tiiuae--Falcon-H1-7B": "FalconH1ForCausalLM",
    "tiiuae--falcon-7b": "FalconForCausalLM",
}
BF16 = kv_dtype("bfloat16")


def full_config(name: str) -> dict[str, Any]:
    from transformers import AutoConfig

    fields = json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))
    layers = fields["num_hidden_layers"]
    if "moe" in fields["model_type"] or fields["model_type"] == "qwen3_next":
        fields["mlp_only_layers"] = list(range(1, layers))  # vLLM wants to find one layer of experts
    if fields["model_type"] == "deepseek_v3":
        fields["first_k_dense_replace"] = layers
    full: dict[str, Any] = AutoConfig.for_model(**fields).to_dict()
    full["architectures"] = [ARCHITECTURES[name]]
    del full["transformers_version"]
    return full


def told_by_vllm(names: list[str], tp: int, pp: int) -> dict[str, dict[str, Any]]:
    asked = json.dumps({name: full_config(name) for name in names})
    done = subprocess.run(
        [sys.executable, str(HERE / "vllm_specs.py"), str(tp), str(pp)],
        input=asked,
        capture_output=True,
        text=True,
        check=False,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["model"] for answer in answers] == names, done.stderr[-2000:]
    return {answer["model"]: answer for answer in answers}


@pytest.mark.parametrize(
    ("names", "tp"),
    [
        (list(ARCHITECTURES), 1),
        (
            ["deepseek-ai--DeepSeek-V3", "Qwen--Qwen3-8B", "google--gemma-3-1b-text", "tiiuae--Falcon-H1-7B"],
            4,
        ),
        (["Qwen--Qwen3-235B-A22B", "meta-llama--Meta-Llama-3.1-70B"], 8),
    ],
    ids=["tp1", "tp4", "tp8"],
)
def test_vllm_stores_what_the_geometry_says(names: list[str], tp: int) -> None:
    told = told_by_vllm(sorted(names, key=lambda name: "moe" not in ARCHITECTURES[name].lower()), tp, 1)
    different = {}
    for name in names:
        geometry = KVGeometry.from_config(FIXTURES / f"{name}.json")
        share = rank_share(as_stored(geometry, "exact", BF16, tp), 1, 1, BF16, Parallel(tp))
        ours = {
            "grows": float(share.bytes_per_token),
            "windowed": float(share.window_bytes_per_token),
            "fixed": float(share.fixed_state_bytes),
        }
        theirs = {key: told[name].get(key, told[name].get("error")) for key in ours}
        if theirs != ours:
            different[name] = (theirs, ours)
    assert not different
