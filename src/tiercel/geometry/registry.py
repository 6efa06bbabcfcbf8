"""Which builder reads which `model_type`, and where a multimodal model keeps its text part.

One row per architecture. A model type without a row is refused: there is no generic fallback.
"""

from __future__ import annotations

from collections.abc import Mapping

from tiercel.geometry import attention as a
from tiercel.geometry.attention import Builder

_PLAIN = """llama qwen baichuan internlm internlm2 internlm3 Yi aquila xverse orion TeleChat telechat gpt2 gpt-sw3
gptj gpt_neo gpt_neox gpt_neox_japanese codegen bloom opt phi phi-msft persimmon stablelm stablelm_epoch olmo
olmo2 olmoe flex_olmo granite granitemoe granitemoeshared glm glm4 glm4_moe glm4v_text glm4v_moe_text cohere
nemotron minimax_m2 ernie4_5 ernie4_5_moe ernie4_5_vl_moe_text seed_oss helium hunyuan_v1_dense hunyuan_v1_moe
hunyuan_vl_text exaone jais jais2 arcee apertus bitnet gemma deepseek bailing_moe bailing_moe_v2
minicpm arctic solar solar_open hy_v3 hyperclovax diffllama aria_text fuyu xglm biogpt nanochat ministral3
qwen3_vl_text qwen3_vl_moe_text qwen3_omni_moe_text emu3_text_model paddleocr_vl_text glm_ocr_text openai-gpt
cohere_asr grok-1 cpmant""".split()

TEXT_FAMILIES: dict[str, Builder] = {
    **dict.fromkeys(_PLAIN, a.plain),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"),
                    a.windowed(a.tail_sliding)),
    "qwen3_moe": a.windowed(a.all_sliding_if_used),
    "dots1": a.windowed(a.tail_sliding_always),
    **dict.fromkeys(
        ("mistral", "mixtral", "phi3", "phimoe", "phi4_multimodal", "starcoder2", "ministral", "phi3small"),
        a.windowed(a.all_sliding),
    ),
    **dict.fromkeys(("gemma2", "vaultgemma", "gpt_oss"), a.windowed(a.nth_full(2))),
    "gemma3_text": a.windowed(a.nth_full(6, "sliding_window_pattern", "_sliding_window_pattern")),
    **dict.fromkeys(("cohere2", "olmo3"), a.windowed(a.nth_full(4, "sliding_window_pattern"))),
    **dict.fromkeys(("exaone4", "exaone_moe"), a.windowed(a.nth_full(4, "sliding_window_pattern"))),
    "afmoe": a.windowed(a.nth_full(4, "global_attn_every_n_layers")),
    **dict.fromkeys(("cwm", "granite_swa", "granitemoe_swa"), a.windowed(a.first_full(4))),
    **dict.fromkeys(("laguna", "mellum"), a.windowed(a.all_full)),
    "smollm3": a.windowed(a.no_rope_sliding),
    "llama4_text": a.llama4,
    "falcon": a.falcon,
    "RefinedWeb": a.falcon,
    "RefinedWebModel": a.falcon,
    "gpt_bigcode": a.gpt_bigcode,
    "mpt": a.nested_attention,
    "dbrx": a.nested_attention,
    "chatglm": a.chatglm,
    "jetmoe": a.channels,
    "hunyuan": a.shared_across_layers,
    "gemma3n_text": a.tail_shared(a.nth_full(5)),
    "gemma4_text": a.gemma4,
    "gemma4_unified_text": a.gemma4,
    "mimo_v2_flash": a.two_shapes((a.SLIDING,), a.mimo_kinds),
    "nemotron-nas": a.nas_blocks,
    "deci": a.nas_blocks,
    "openelm": a.openelm,
}

TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")

WRAPPERS: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "llava": "llama",
    "mistral3": "mistral",
}
"""Multimodal model types and the text model type that their text part has where it names none."""
