"""Hand-checked sizes of published models, in 16 bits, for the families that serving engines run.

`expected.csv` names for every row where its figures are from and whether vLLM 0.32 agreed.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tiercel.geometry import GroupKind, KVGeometry

HERE = Path(__file__).parent
ROWS = list(csv.DictReader((HERE / "expected.csv").read_text(encoding="utf-8").splitlines()))


def fixture(model: str) -> Path:
    return HERE / "fixtures" / f"{model.replace('/', '--')}.json"


@pytest.mark.parametrize("row", ROWS, ids=[row["model"] for row in ROWS])
def test_sizes_are_exact(row: dict[str, str]) -> None:
    geometry = KVGeometry.from_config(fixture(row["model"]))
    assert float(geometry.bytes_per_token_exact()) == float(row["bytes_per_token"])
    assert geometry.window_bytes_per_token() == int(row["window_bytes_per_token"])
    assert str(geometry.window_tokens or "") == row["window_tokens"]
    assert geometry.fixed_state_bytes() == int(row["fixed_state_bytes"])
    assert geometry.sequence_bytes(32_768) == int(row["total_bytes_at_32768"])


def test_every_fixture_has_a_row_and_the_other_way_round() -> None:
    names = {path.stem for path in (HERE / "fixtures").glob("*.json")}
    assert names == {row["model"].replace("/", "--") for row in ROWS}
    assert len(ROWS) >= 53


BASE = {"num_hidden_layers": 24, "num_attention_heads": 32, "hidden_size": 4096}


def sizes(config: dict[str, object]) -> tuple[float, int, int | None, int]:
    geometry = KVGeometry.from_config(config)
    return (
        float(geometry.bytes_per_token_exact()),
        geometry.window_bytes_per_token(),
        geometry.window_tokens,
        geometry.fixed_state_bytes(),
    )


# Further models of the same families, from their published sizes; the arithmetic stands beside each.
ARITHMETIC = {
    "Llama 3.1 405B": (
        {
            "model_type": "llama",
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
            "num_key_value_heads": 8,
            "hidden_size": 16384,
        },
        (126 * 8 * 2 * 128 * 2, 0, None, 0),
    ),
    "gemma 7B: head size beside the hidden size": (
        {
            "model_type": "gemma",
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "hidden_size": 3072,
        },
        (28 * 16 * 2 * 256 * 2, 0, None, 0),
    ),
    "Qwen2 with its windows on from layer 20": (
        {
            **BASE,
            "model_type": "qwen2",
            "num_key_value_heads": 8,
            "use_sliding_window": True,
            "sliding_window": 4096,
            "max_window_layers": 20,
        },
        (20 * 8 * 256 * 2, 4 * 8 * 256 * 2, 4096, 0),
    ),
    "Qwen2 with its windows off": (
        {
            **BASE,
            "model_type": "qwen2",
            "num_key_value_heads": 8,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 20,
        },
        (24 * 8 * 256 * 2, 0, None, 0),
    ),
    "gpt-oss 20B by the default pattern": (
        {
            "model_type": "gpt_oss",
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "hidden_size": 2880,
            "sliding_window": 128,
        },
        (12 * 8 * 128 * 2, 12 * 8 * 128 * 2, 128, 0),
    ),
    "OLMo 3: every fourth layer is global": (
        {**BASE, "model_type": "olmo3", "sliding_window": 4096},
        (6 * 32 * 256 * 2, 18 * 32 * 256 * 2, 4096, 0),
    ),
    "Gemma 3 with a stated pattern": (
        {
            **BASE,
            "model_type": "gemma3_text",
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 1024,
            "sliding_window_pattern": 4,
        },
        (6 * 4 * 512 * 2, 18 * 4 * 512 * 2, 1024, 0),
    ),
    "EXAONE 4 with a pattern in letters": (
        {
            **BASE,
            "model_type": "exaone4",
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "sliding_window_pattern": "LLLG",
        },
        (6 * 8 * 256 * 2, 18 * 8 * 256 * 2, 4096, 0),
    ),
    "a null window is no window": (
        {**BASE, "model_type": "mistral", "num_key_value_heads": 8, "sliding_window": None},
        (24 * 8 * 256 * 2, 0, None, 0),
    ),
    "GPT-BigCode is multi-query by default": (
        {"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144},
        (40 * 1 * 256 * 2, 0, None, 0),
    ),
    "GPT-BigCode without its flag": (
        {"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144, "multi_query": False},
        (40 * 48 * 256 * 2, 0, None, 0),
    ),
    "Falcon 180B: new decoder architecture": (
        {
            "model_type": "falcon",
            "num_hidden_layers": 80,
            "num_attention_heads": 232,
            "num_kv_heads": 8,
            "hidden_size": 14848,
            "new_decoder_architecture": True,
        },
        (80 * 8 * 128 * 2, 0, None, 0),
    ),
    "MPT with grouped heads in attn_config": (
        {
            "model_type": "mpt",
            "n_layers": 32,
            "n_heads": 32,
            "d_model": 4096,
            "attn_config": {"kv_n_heads": 8},
        },
        (32 * 8 * 256 * 2, 0, None, 0),
    ),
    "ChatGLM 3": (
        {
            "model_type": "chatglm",
            "num_layers": 28,
            "num_attention_heads": 32,
            "hidden_size": 4096,
            "kv_channels": 128,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
        },
        (28 * 2 * 256 * 2, 0, None, 0),
    ),
    "Hunyuan Large: two layers share one cache": (
        {
            "model_type": "hunyuan",
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "hidden_size": 6400,
            "use_cla": True,
            "cla_share_factor": 2,
        },
        (32 * 8 * 160 * 2, 0, None, 0),
    ),
    "DeepSeek V2 Lite": (
        {
            "model_type": "deepseek_v2",
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "hidden_size": 2048,
        },
        (27 * 576 * 2, 0, None, 0),
    ),
    "LongCat: two latents per layer": (
        {
            "model_type": "longcat_flash",
            "num_layers": 28,
            "num_attention_heads": 64,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "hidden_size": 6144,
        },
        (56 * 576 * 2, 0, None, 0),
    ),
    "DeepSeek V4 Pro": (
        {
            "model_type": "deepseek_v4",
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "head_dim": 512,
            "qk_rope_head_dim": 64,
            "index_head_dim": 128,
            "sliding_window": 128,
            "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
        },
        (30 * 716 / 4 + 31 * 584 / 128, 61 * 584, 128, 0),
    ),
    "Step 3.7: sliding layers with heads of their own": (
        {
            "model_type": "step3p7",
            "num_hidden_layers": 45,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_size": 4096,
            "sliding_window": 512,
            "layer_types": [*["full_attention", *["sliding_attention"] * 3] * 11, "full_attention"],
        },
        (12 * 8 * 256 * 2, 33 * 8 * 256 * 2, 512, 0),
    ),
    "Nemotron 3 Nano": (
        {
            "model_type": "nemotron_h",
            "hidden_size": 2688,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "hybrid_override_pattern": "M" * 23 + "E" * 23 + "*" * 6,
        },
        (6 * 2 * 256 * 2, 0, None, 23 * ((4096 + 2 * 8 * 128) * 3 * 2 + 64 * 64 * 128 * 4)),
    ),
    "LFM2: convolution tails": (
        {
            **BASE,
            "model_type": "lfm2",
            "num_key_value_heads": 8,
            "conv_L_cache": 3,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        },
        (6 * 8 * 256 * 2, 0, None, 18 * 4096 * 2 * 2),
    ),
    "T5: heads of d_kv, decoder layers as the encoder's": (
        {"model_type": "t5", "num_layers": 24, "num_heads": 128, "d_kv": 128, "d_model": 1024},
        (24 * 128 * 256 * 2, 0, None, 0),
    ),
    "LLaVA: a text part that leaves everything to the Llama defaults": (
        {"model_type": "llava", "text_config": {"model_type": "llama"}},
        (32 * 32 * 256 * 2, 0, None, 0),
    ),
    "Gemma 3 4B: a text part that leaves heads to the defaults": (
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "hidden_size": 2560,
                "sliding_window": 1024,
            },
        },
        (5 * 4 * 512 * 2, 29 * 4 * 512 * 2, 1024, 0),
    ),
    "InternVL: the text part is called llm_config": (
        {
            "model_type": "internvl_chat",
            "llm_config": {**BASE, "model_type": "internlm2", "num_key_value_heads": 8},
        },
        (24 * 8 * 256 * 2, 0, None, 0),
    ),
    "Qwen2-VL: the text fields stand at the top": (
        {**BASE, "model_type": "qwen2_vl", "num_key_value_heads": 4, "vision_config": {"depth": 32}},
        (24 * 4 * 256 * 2, 0, None, 0),
    ),
    "Omni: a text part inside the thinker": (
        {
            "model_type": "qwen2_5_omni",
            "thinker_config": {
                "model_type": "qwen2_5_omni_thinker",
                "text_config": {**BASE, "model_type": "qwen2_5_omni_text", "num_key_value_heads": 4},
            },
        },
        (24 * 4 * 256 * 2, 0, None, 0),
    ),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_families_follow_their_formula(name: str) -> None:
    config, expected = ARITHMETIC[name]
    assert sizes(config) == expected


def test_layers_without_attention_are_in_no_group() -> None:
    geometry = KVGeometry.from_config(fixture("nvidia/Llama-3_3-Nemotron-Super-49B-v1"))
    assert geometry.num_layers == 80
    assert sum(len(group.layers) for group in geometry.groups) == 49


def test_shared_layers_are_named_and_store_nothing() -> None:
    geometry = KVGeometry.from_config(fixture("google/gemma-3n-E4B-text"))
    shared = next(group for group in geometry.groups if group.kind is GroupKind.SHARED)
    assert shared.layers == tuple(range(20, 35))
    assert geometry.sequence_bytes(100) == 100 * (8_192 + 32_768)


def test_layer_indices_cover_the_model_in_order() -> None:
    geometry = KVGeometry.from_config(fixture("openai/gpt-oss-120b"))
    found = sorted(index for group in geometry.groups for index in group.layers)
    assert found == list(range(36))


def test_model_folder_and_mapping_and_file_agree(tmp_path: Path) -> None:
    text = fixture("Qwen/Qwen3-8B").read_text(encoding="utf-8")
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    from_folder = KVGeometry.from_config(tmp_path)
    assert from_folder == KVGeometry.from_config(str(tmp_path / "config.json"))
    assert from_folder.digest() == KVGeometry.from_config(fixture("Qwen/Qwen3-8B")).digest()
