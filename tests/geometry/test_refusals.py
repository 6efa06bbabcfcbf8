"""Bad configurations: one line that names the file, the field, the value and what is accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.errors import GeometryError
from tiercel.geometry import KVGeometry
from tiercel.geometry.registry import TEXT_FAMILIES, WRAPPERS

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in LLAMA.items() if key != name}


def test_the_control_is_read() -> None:
    assert KVGeometry.from_config(LLAMA).bytes_per_token() == 131_072


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (without("num_hidden_layers"), "num_hidden_layers: missing"),
        (without("num_attention_heads"), "num_attention_heads: missing"),
        (without("hidden_size"), "hidden_size: missing"),
        ({**LLAMA, "num_hidden_layers": -1}, "num_hidden_layers: -1"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers: 0"),
        ({**LLAMA, "num_hidden_layers": "32"}, "num_hidden_layers: '32'"),
        ({**LLAMA, "num_hidden_layers": 32.0}, "num_hidden_layers: 32.0"),
        ({**LLAMA, "num_hidden_layers": True}, "num_hidden_layers: True"),
        ({**LLAMA, "num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000"),
        ({**LLAMA, "num_hidden_layers": 10**5000}, "num_hidden_layers: an integer of"),
        ({**LLAMA, "num_key_value_heads": 7}, "num_key_value_heads: 7"),
        ({**LLAMA, "num_key_value_heads": 64}, "num_key_value_heads: 64"),
        ({**LLAMA, "hidden_size": 4097}, "hidden_size: 4097"),
        ({**LLAMA, "head_dim": -128}, "head_dim: -128"),
        ({**LLAMA, "max_position_embeddings": "many"}, "max_position_embeddings: 'many'"),
        ({**LLAMA, "model_type": "mistral", "sliding_window": -4}, "sliding_window: -4"),
        ({**LLAMA, "model_type": "qwen2", "use_sliding_window": "yes"}, "use_sliding_window: 'yes'"),
        (
            {**LLAMA, "model_type": "gemma2", "layer_types": ["full_attention"]},
            "layer_types: ['full_attention']",
        ),
        ({**LLAMA, "model_type": "gemma2", "layer_types": ["odd"] * 32}, "layer_types: a list of 32"),
        (
            {
                **LLAMA,
                "model_type": "gemma2",
                "layer_types": ["sliding_attention"] * 32,
                "sliding_window": None,
            },
            "sliding_window: None",
        ),
        ({**LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": "512"}, "kv_lora_rank: '512'"),
        ({"model_type": "llava", "text_config": [1]}, "text_config: [1]"),
        (
            {"model_type": "llava", "text_config": {"num_hidden_layers": -2}},
            "text_config.num_hidden_layers: -2",
        ),
    ],
)
def test_a_bad_field_is_named_with_its_value(config: dict[str, Any], named: str) -> None:
    with pytest.raises(GeometryError) as refusal:
        KVGeometry.from_config(config)
    message = str(refusal.value)
    assert named in message
    assert "accepted: " in message
    assert "\n" not in message


def test_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "hidden_size": -1}), encoding="utf-8")
    with pytest.raises(GeometryError, match="hidden_size: -1") as refusal:
        KVGeometry.from_config(path)
    assert str(refusal.value).startswith(f"{path}: ")


@pytest.mark.parametrize("model_type", ["quasar", "", None, 7])
def test_an_unknown_architecture_is_refused_with_what_was_found(model_type: object) -> None:
    with pytest.raises(GeometryError) as refusal:
        KVGeometry.from_config({**LLAMA, "model_type": model_type, "architectures": ["QuasarForCausalLM"]})
    message = str(refusal.value)
    for found in ("QuasarForCausalLM", "num_hidden_layers=32", "num_key_value_heads=8", "hidden_size=4096"):
        assert found in message
    assert "accepted: one of " in message


def test_an_unknown_text_part_is_refused() -> None:
    with pytest.raises(GeometryError, match=r"text_config\.model_type: 'quasar'"):
        KVGeometry.from_config({"model_type": "llava", "text_config": {**LLAMA, "model_type": "quasar"}})


def test_an_unknown_wrapper_is_not_guessed_from_its_text_part() -> None:
    with pytest.raises(GeometryError, match="model_type: 'quasar_vl'"):
        KVGeometry.from_config({"model_type": "quasar_vl", "text_config": LLAMA})


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1, 2]", b"null", b"\xff\xfe", b"[" * 200_000, b'{"model_type": ' + b"9" * 5000 + b"}"],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(GeometryError) as refusal:
        KVGeometry.from_config(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["missing/config.json", "with\0nul", "x" * 5000])
def test_a_path_that_is_not_there(name: str) -> None:
    with pytest.raises(GeometryError, match="accepted"):
        KVGeometry.from_config(name)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
FIELDS = sorted(
    {
        name
        for path in (Path(__file__).parent / "fixtures").glob("*.json")
        for config in [json.loads(path.read_text(encoding="utf-8"))]
        for part in (config, config.get("text_config", {}))
        for name in part
    }
)


def read_or_refused(config: dict[str, Any]) -> None:
    try:
        geometry = KVGeometry.from_config(config)
    except GeometryError as error:
        message = str(error)
    else:
        assert geometry.sequence_bytes(1000) >= 0
        assert len(geometry.digest()) == 32
        return
    assert "\n" not in message


@given(JSON)
def test_any_json_is_read_or_refused(value: Any) -> None:
    config = value if isinstance(value, dict) else {"model_type": value}
    with pytest.raises(GeometryError):
        KVGeometry.from_config(config)


SMALL = st.integers(-1, 70) | JSON | st.lists(st.integers(0, 4), max_size=40)


@given(
    st.sampled_from([*TEXT_FAMILIES, *WRAPPERS]),
    st.dictionaries(st.sampled_from(FIELDS), SMALL, max_size=30),
    st.booleans(),
)
def test_any_fields_of_a_known_family_are_read_or_refused(
    model_type: str, fields: dict[str, Any], nested: bool
) -> None:
    config = (
        {"model_type": model_type, "text_config": fields} if nested else {**fields, "model_type": model_type}
    )
    read_or_refused(config)


@given(st.data())
def test_a_damaged_real_configuration_is_read_or_refused(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted((Path(__file__).parent / "fixtures").glob("*.json"))))
    config = json.loads(path.read_text(encoding="utf-8"))
    part = config.get("text_config", config)
    name = data.draw(st.sampled_from(sorted(part)))
    part[name] = data.draw(SMALL)
    read_or_refused(config)
