"""What engines really hold for a sequence, where that differs from the plain sizes."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from tiercel.errors import GeometryError
from tiercel.geometry import GroupKind, KVGeometry, kv_dtype
from tiercel.geometry.engines import Engine, as_stored, engine_named

FIXTURES = Path(__file__).parent / "fixtures"
BF16 = kv_dtype("bfloat16")


def geometry_of(model: str) -> KVGeometry:
    return KVGeometry.from_config(FIXTURES / f"{model}.json")


def held(model: str, engine: str, tokens: int, **settings: int) -> int:
    stored = as_stored(geometry_of(model), engine, BF16, **settings)
    total = sum((stored.group_bytes(g, tokens, BF16) for g in stored.geometry.groups), Fraction(0))
    assert total.denominator == 1
    return int(total)


def test_vllm_holds_the_window_the_tokens_in_flight_and_one_block() -> None:
    """The figure that vLLM's own specification gives: 64 blocks of full, 18 of sliding layers."""
    asked = held("openai--gpt-oss-120b", "vllm", 8192, block_tokens=128, in_flight_tokens=2048)
    assert asked == (64 + 18) * 4_718_592 == 386_924_544


def test_vllm_rounds_up_to_blocks() -> None:
    assert held("meta-llama--Meta-Llama-3.1-8B", "vllm", 17) == 32 * 131_072
    assert held("meta-llama--Meta-Llama-3.1-8B", "exact", 17) == 17 * 131_072


@pytest.mark.parametrize(
    ("model", "tokens"),
    [("Qwen--Qwen3.5-27B", 784), ("tiiuae--Falcon-H1-7B", 3104), ("ai21labs--Jamba-v0.1", 144)],
)
def test_vllm_grows_hybrid_blocks_until_they_hold_a_state(model: str, tokens: int) -> None:
    assert as_stored(geometry_of(model), "vllm", BF16).block_tokens == tokens


def test_vllm_hybrid_blocks_on_cpu() -> None:
    assert as_stored(geometry_of("Qwen--Qwen3.5-27B"), "vllm", BF16, block_tokens=128).block_tokens == 896


def test_vllm_pads_the_pages_of_compressed_entries() -> None:
    stored = as_stored(geometry_of("deepseek-ai--DeepSeek-V4-Flash"), "vllm", BF16)
    assert stored.geometry.bytes_per_token_exact() == 3915
    assert geometry_of("deepseek-ai--DeepSeek-V4-Flash").bytes_per_token_exact() == Fraction("3850.25")


def test_minicpm3_is_expanded_in_serving_engines_and_latent_in_transformers() -> None:
    geometry = geometry_of("openbmb--MiniCPM3-4B")
    assert as_stored(geometry, "vllm", BF16).geometry.bytes_per_token() == 952_320
    assert as_stored(geometry, "transformers", BF16).geometry.bytes_per_token() == 35_712


def test_transformers_keeps_one_token_less_in_a_window() -> None:
    assert held("mistralai--Mistral-7B-v0.1", "transformers", 10_000) == 4095 * 131_072
    assert held("mistralai--Mistral-7B-v0.1", "exact", 10_000) == 4096 * 131_072


def test_llamacpp_expands_latents_unless_the_file_carries_them() -> None:
    """DeepSeek-Coder-V2-Lite: 270 KiB per token, as llama.cpp reports it."""
    lite = {
        "model_type": "deepseek_v2",
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "hidden_size": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    geometry = KVGeometry.from_config(lite)
    assert as_stored(geometry, "llama.cpp", BF16).geometry.bytes_per_token("float16") == 270 * 1024
    assert as_stored(geometry, "llama.cpp-mla", BF16).geometry.bytes_per_token("float16") == 27 * 576 * 2


def test_llamacpp_has_no_selector_keys_and_wide_states() -> None:
    groups = as_stored(geometry_of("zai-org--GLM-5"), "llama.cpp", BF16).geometry.groups
    assert [group.kind for group in groups] == [GroupKind.FULL]
    qwen = geometry_of("Qwen--Qwen3.5-27B")
    stored = as_stored(qwen, "llama.cpp", BF16).geometry
    assert stored.bytes_per_token() == 64 * 1024
    assert stored.fixed_state_bytes() > qwen.fixed_state_bytes()


@pytest.mark.parametrize("engine", [e for e in Engine if e is not Engine.EXACT])
@pytest.mark.parametrize("model", ["Qwen--Qwen3-8B", "google--gemma-3-27b-text", "ai21labs--Jamba-v0.1"])
def test_more_tokens_never_need_less(engine: Engine, model: str) -> None:
    stored = as_stored(geometry_of(model), engine, BF16)
    totals = [
        sum((stored.group_bytes(g, tokens, BF16) for g in stored.geometry.groups), Fraction(0))
        for tokens in (0, 1, 15, 16, 17, 127, 128, 1000, 1024, 1025, 5000, 100_000)
    ]
    assert totals == sorted(totals)


def test_what_an_engine_does_with_compressed_time_is_not_guessed() -> None:
    with pytest.raises(GeometryError, match="deepseek_v4"):
        as_stored(geometry_of("deepseek-ai--DeepSeek-V4-Flash"), "llama.cpp", BF16)


def test_engine_names() -> None:
    assert engine_named("LlamaCpp") is Engine.LLAMACPP
    with pytest.raises(GeometryError, match="'ollama'; accepted: exact, vllm"):
        engine_named("ollama")
