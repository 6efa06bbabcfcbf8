"""Which builder reads which `model_type`, and where a multimodal model keeps its text part.

One row per architecture. A model type without a row is refused: there is no generic fallback.
"""

from __future__ import annotations

from collections.abc import Mapping

from tiercel.geometry import attention as a
from tiercel.geometry import encdec as e
from tiercel.geometry import latent as m
from tiercel.geometry import recurrent as r
from tiercel.geometry.attention import Builder

_PLAIN = """
llama qwen baichuan internlm internlm2 internlm3 Yi aquila xverse orion TeleChat telechat gpt2 gpt-sw3
gptj gpt_neo gpt_neox gpt_neox_japanese codegen bloom opt phi phi-msft persimmon stablelm stablelm_epoch
olmo olmo2 olmoe flex_olmo granite granitemoe granitemoeshared glm glm4 glm4_moe glm4v_text
glm4v_moe_text cohere nemotron minimax_m2 ernie4_5 ernie4_5_moe ernie4_5_vl_moe_text seed_oss helium
hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text exaone jais jais2 arcee apertus bitnet gemma deepseek
bailing_moe bailing_moe_v2 minicpm arctic solar solar_open hy_v3 hyperclovax diffllama aria_text fuyu
ernie4_5_moe_vl molmo chameleon xglm biogpt nanochat ministral3 qwen3_vl_text qwen3_vl_moe_text
qwen3_omni_moe_text emu3_text_model paddleocr_vl_text glm_ocr_text openai-gpt cohere_asr grok-1 cpmant
""".split()

TEXT_FAMILIES: dict[str, Builder] = {
    **dict.fromkeys(_PLAIN, a.plain),
    **dict.fromkeys(
        """qwen2 qwen2_moe qwen3 mimo qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text minicpmv minicpmo
        dots_ocr""".split(),
        a.windowed(a.tail_sliding),
    ),
    "qwen3_moe": a.windowed(a.all_sliding_if_used),
    "dots1": a.windowed(a.tail_sliding_always),
    **dict.fromkeys(
        "mistral mixtral phi3 phi3_v phi3small phimoe phi4mm phi4_multimodal starcoder2 ministral".split(),
        a.windowed(a.all_sliding),
    ),
    **dict.fromkeys(("gemma2", "vaultgemma", "gpt_oss"), a.windowed(a.nth_full(2))),
    "gemma3_text": a.windowed(a.nth_full(6, "sliding_window_pattern", "_sliding_window_pattern")),
    "cohere2_moe": a.windowed(a.prefixed(4)),
    **dict.fromkeys(("cohere2", "olmo3"), a.windowed(a.nth_full(4, "sliding_window_pattern"))),
    **dict.fromkeys(("exaone4", "exaone_moe"), a.windowed(a.nth_full(4, "sliding_window_pattern"))),
    "afmoe": a.windowed(a.nth_full(4, "global_attn_every_n_layers")),
    **dict.fromkeys(("cwm", "granite_swa", "granitemoe_swa"), a.windowed(a.first_full(4))),
    **dict.fromkeys(("laguna", "mellum"), a.windowed(a.all_full)),
    "smollm3": a.windowed(a.no_rope_sliding),
    "llama4_text": a.llama4,
    "falcon": a.falcon,
    "RefinedWeb": a.refined_web,
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
    **dict.fromkeys(("step3p5", "step3p5_text", "step3_text"), a.step),
    **dict.fromkeys(
        (
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_vl_v2_text",
            "kimi_k2",
            "axk1",
            "glm4_moe_lite",
            "youtu",
            "youtu_llm",
            "mistral4",
            "deepseek_ocr2_text",
        ),
        m.mla,
    ),
    "longcat_flash": m.longcat,
    "minicpm3": m.minicpm3,
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "axk2"), m.dsa),
    "hy_v4": m.hy_v4,
    **dict.fromkeys(("minimax_m3", "minimax_m3_vl_text"), m.minimax_m3),
    "deepseek_v4": m.deepseek_v4,
    "deepseek_ref": m.deepseek_v4,
    "jamba": r.jamba,
    **dict.fromkeys(("mamba", "falcon_mamba"), r.mamba1),
    "mamba2": r.mamba2,
    "zamba": r.zamba,
    "zamba2": r.zamba2,
    "nemotron_h": r.nemotron_h,
    **dict.fromkeys(("bamba", "granitemoehybrid"), r.mamba2_mixed),
    "falcon_h1": r.falcon_h1,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), r.delta_net),
    "kimi_linear": r.kimi_linear,
    **dict.fromkeys(("minimax", "minimax_text_01", "minimax_m1", "MiniMaxText01"), r.lightning),
    "bailing_moe_linear": r.lightning_groups,
    **dict.fromkeys(("lfm2", "lfm2_moe"), r.short_conv),
    "recurrent_gemma": r.recurrent_gemma,
    "whisper": e.bart_like,
    "speech_to_text": e.text_to_text,
    **dict.fromkeys(
        (
            "bart",
            "mbart",
            "marian",
            "pegasus",
            "blenderbot",
            "blenderbot-small",
            "m2m_100",
            "nllb-moe",
            "plbart",
            "bigbird_pegasus",
            "prophetnet",
            "fsmt",
        ),
        e.text_to_text,
    ),
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano"), e.t5),
    "mllama_text_model": e.mllama,
}

PER_LAYER_SHAPES = frozenset({"gemma4_text", "gemma4_unified_text"})
"""Families whose builder reads `per_layer_config`, the newer way to write heads that differ by layer."""

TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")

_LLAMA_WRAPPERS = """llava llava_next llava_next_video vipllava video_llava idefics3 smolvlm janus deepseek_vl
deepseek_vl_hybrid glmasr perception_lm granite4_vision""".split()
_QWEN2_WRAPPERS = """llava_onevision internvl internvl_chat ovis2 fast_vlm got_ocr2 video_llama_3 qwen2_audio
vibevoice_asr InternVLChat""".split()
_SAME_NAME = """gemma3n gemma4 gemma4_unified llama4 qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5
qwen3_5_moe aria glm4v glm4v_moe glm_ocr paddleocr_vl ernie4_5_vl_moe hunyuan_vl minimax_m3_vl
gemma3""".split()

WRAPPERS: Mapping[str, str] = {
    **dict.fromkeys(_LLAMA_WRAPPERS, "llama"),
    **dict.fromkeys(_QWEN2_WRAPPERS, "qwen2"),
    **{name: f"{name}_text" for name in _SAME_NAME},
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "deepseek_ocr2": "deepseek_ocr2_text",
    "deepseek_vl_v2": "deepseek_v2",
    "emu3": "emu3_text_model",
    "exaone4_5": "exaone4",
    "glm46v": "glm4v_text",
    "glmga": "glm4v_text",
    "granite_speech": "granite",
    "granite_speech_plus": "granite",
    "hyperclovax_vision_v2": "hyperclovax",
    "idefics2": "mistral",
    "kimi_k25": "deepseek_v3",
    "kimi_k3": "kimi_linear",
    "kimi_vl": "deepseek_v3",
    "lfm2_vl": "lfm2",
    "lighton_ocr": "qwen3",
    "interns1": "qwen3",
    "minicpmv4_6": "qwen3_5_text",
    "minicpmv4_7": "qwen3_5_text",
    "minimax_vl_01": "minimax_text_01",
    "mistral3": "mistral",
    "mllama": "mllama_text_model",
    "nemotron_h_omni": "nemotron_h",
    "paligemma": "gemma",
    "qianfan_ocr": "qwen3",
    "qwen2_5_omni": "qwen2_5_omni_text",
    "qwen2_5_omni_thinker": "qwen2_5_omni_text",
    "qwen3_asr": "qwen3",
    "qwen3_omni_moe": "qwen3_omni_moe_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    "shieldgemma2": "gemma3_text",
    "step3_vl": "step3_text",
    "step3p7": "step3p5",
    "voxtral": "llama",
}
"""Multimodal model types and the text model type that their text part has where it names none."""
