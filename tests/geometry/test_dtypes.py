"""Quantised KV: sizes with their scales, as vLLM's cache specifications give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiercel.errors import GeometryError
from tiercel.geometry import DTYPES, KVGeometry, kv_dtype

FIXTURES = Path(__file__).parent / "fixtures"


def tokens_of(model: str, dtype: str) -> int:
    return KVGeometry.from_config(FIXTURES / f"{model}.json").bytes_per_token(dtype)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("bfloat16", 131_072),
        ("float32", 262_144),
        ("fp8", 65_536),
        ("fp8_per_token_head", 67_584),
        ("int8_per_token_head", 67_584),
        ("int4_per_token_head", 34_816),
        ("nvfp4", 36_864),
        ("turboquant_k8v4", 50_176),
        ("turboquant_4bit", 34_304),
        ("turboquant_k3v4", 30_208),
        ("turboquant_3bit", 26_112),
        ("q8_0", 131_072 // 2 * 34 // 32),
        ("q4_0", 131_072 // 2 * 18 // 32),
    ],
)
def test_llama_8b(dtype: str, expected: int) -> None:
    assert tokens_of("meta-llama--Meta-Llama-3.1-8B", dtype) == expected


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("bf16", 61 * 1152),
        ("fp8", 61 * 576),
        ("fp8_ds_mla", 40_016),
        ("nvfp4_ds_mla", 21_472),
        ("nvfp4", 21_472),
    ],
)
def test_latent(dtype: str, expected: int) -> None:
    assert tokens_of("deepseek-ai--DeepSeek-V3", dtype) == expected


def test_selector_keys_stay_fp8_with_a_scale() -> None:
    assert tokens_of("deepseek-ai--DeepSeek-V3.2", "fp8_ds_mla") == 61 * (656 + 132)


def test_scales_weigh_more_on_small_heads() -> None:
    half = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 64}
    assert KVGeometry.from_config(half).bytes_per_token("fp8_per_token_head") == 2 * (64 + 4)


def test_recurrent_states_do_not_depend_on_the_kv_dtype() -> None:
    geometry = KVGeometry.from_config(FIXTURES / "Qwen--Qwen3.5-27B.json")
    assert geometry.fixed_state_bytes("fp8") == geometry.fixed_state_bytes("bfloat16") == 153_944_064
    assert geometry.bytes_per_token("fp8") * 2 == geometry.bytes_per_token("bfloat16")


@pytest.mark.parametrize(("model", "dtype"), [("deepseek-ai--DeepSeek-V3", "int8_per_token_head")])
def test_a_format_that_latents_do_not_have_is_refused(model: str, dtype: str) -> None:
    with pytest.raises(GeometryError, match=r"int8_per_token_head.*latent"):
        tokens_of(model, dtype)


def test_a_latent_format_is_refused_for_plain_heads() -> None:
    with pytest.raises(GeometryError, match="fp8_ds_mla"):
        tokens_of("meta-llama--Meta-Llama-3.1-8B", "fp8_ds_mla")


@pytest.mark.parametrize("name", [*DTYPES, "BF16", "torch.float16", "auto", "fp8_e5m2"])
def test_names(name: str) -> None:
    assert kv_dtype(name).name in DTYPES


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(GeometryError, match=r"'fp7'; accepted: float32, bfloat16"):
        kv_dtype("fp7")
