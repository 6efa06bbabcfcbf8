"""The digest: equal where KV bytes mean the same, different where they may not, the same in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiercel.geometry import KVGeometry

FIXTURES = Path(__file__).parent / "fixtures"
LLAMA: dict[str, Any] = json.loads(
    (FIXTURES / "meta-llama--Meta-Llama-3.1-8B.json").read_text(encoding="utf-8")
)


def digest(config: dict[str, Any]) -> bytes:
    return KVGeometry.from_config(config).digest()


def test_it_is_pinned() -> None:
    """Stored blocks carry it: a change here orphans every cache on disk and needs a new format name."""
    assert digest(LLAMA).hex() == "3f441d2089730ad28003afc8578b10a69799fa65e24ea6821c3e4500bf311b8f"


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 10_000.0},
        {"rope_scaling": None},
        {"rope_scaling": {**LLAMA["rope_scaling"], "factor": 32.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}},
        {"partial_rotary_factor": 0.5},
        {"rms_norm_eps": 1e-6},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"num_key_value_heads": 4},
        {"num_hidden_layers": 31},
        {"head_dim": 64},
        {"model_type": "granite"},
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        {"a_field_of_tomorrow": 1},
    ],
    ids=str,
)
def test_what_can_change_the_numbers_changes_it(change: dict[str, Any]) -> None:
    assert digest({**LLAMA, **change}) != digest(LLAMA)


@pytest.mark.parametrize(
    "change",
    [
        {"transformers_version": "9.9"},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"torch_dtype": "float16"},
        {"use_cache": False},
        {"eos_token_id": [1, 2, 3]},
        {"max_position_embeddings": 4096},
        {"rope_theta": 500_000},
        {"pad_token_id": None},
    ],
    ids=str,
)
def test_what_cannot_does_not(change: dict[str, Any]) -> None:
    assert digest({**LLAMA, **change}) == digest(LLAMA)


def test_both_spellings_of_the_rope_settings_are_one() -> None:
    old = dict(LLAMA)
    scaling = old.pop("rope_scaling")
    theta = old.pop("rope_theta")
    new = {**old, "rope_parameters": {**scaling, "rope_theta": theta}}
    assert digest(new) == digest(LLAMA)
    older = {**old, "rope_theta": theta, "rope_scaling": {**scaling, "type": scaling["rope_type"]}}
    del older["rope_scaling"]["rope_type"]
    assert digest(older) == digest(LLAMA)


def test_every_published_model_has_its_own() -> None:
    found = {path.stem: KVGeometry.from_config(path).digest() for path in FIXTURES.glob("*.json")}
    # These pairs share every field that the fixtures keep.
    same = {
        "zai-org--GLM-5.3": "zai-org--GLM-5.2",
        "Qwen--Qwen3-VL-4B-Instruct": "Qwen--Qwen3-VL-8B-Instruct",
    }
    distinct = [value for name, value in found.items() if name not in same]
    assert len(set(distinct)) == len(distinct)


def test_it_is_the_same_in_another_process_with_another_hash_seed() -> None:
    code = (
        "import sys, json; from tiercel.geometry import KVGeometry; "
        "print(KVGeometry.from_config(json.load(sys.stdin)).digest().hex())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "4711"}
    shuffled = dict(reversed(LLAMA.items()))
    told = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(shuffled),
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == digest(LLAMA).hex()
