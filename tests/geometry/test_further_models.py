"""Models beyond the collected ones, one line each of `further.jsonl`: its shape, its size and how that comes.

Fields were entered by hand from what is published and not compared with the files; the sums are what is
tested. Some lines are variants (a null head size, older field names) rather than models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tiercel.errors import GeometryError
from tiercel.geometry import KVGeometry, kv_dtype
from tiercel.plan.size import as_json, measure

TOKENS = 32_768
LINES = (Path(__file__).parent / "further.jsonl").read_text(encoding="utf-8").splitlines()
MODELS: dict[str, dict[str, Any]] = {model["model"]: model for model in map(json.loads, LINES)}
PARTS = ("bytes_per_token", "window_bytes_per_token", "window_tokens", "fixed_state_bytes")
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "hidden_size": 512,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.mark.parametrize("name", MODELS)
def test_a_further_model_has_the_size_that_its_shape_implies(name: str) -> None:
    model = MODELS[name]
    grows, windowed, window, fixed = (model[part] for part in PARTS)
    found = as_json(measure(KVGeometry.from_config(model["config"]), kv_dtype("bfloat16"), TOKENS))
    total = grows * TOKENS + windowed * min(TOKENS, window or 0) + fixed
    assert {part: found[part] for part in (*PARTS, "total_bytes")} == {
        **{part: model[part] for part in PARTS},
        "total_bytes": total,
    }


def test_a_layer_that_slides_needs_a_window_in_plain_families_too() -> None:
    assert KVGeometry.from_config({**LLAMA, "sliding_window": 64}).window_tokens == 64
    with pytest.raises(GeometryError, match="sliding_window: missing"):
        KVGeometry.from_config(LLAMA)
    with pytest.raises(GeometryError, match="layer_types"):
        KVGeometry.from_config({**LLAMA, "sliding_window": 64, "num_hidden_layers": 3})


def test_falcon_under_its_first_name_has_one_head_unless_grouped_heads_are_stated() -> None:
    config = {"model_type": "RefinedWeb", "hidden_size": 8192, "n_head": 128, "n_layer": 60}
    assert KVGeometry.from_config(config).bytes_per_token() == 60 * 2 * 64 * 2
    assert KVGeometry.from_config({**config, "n_head_kv": 8}).bytes_per_token() == 60 * 2 * 8 * 64 * 2
