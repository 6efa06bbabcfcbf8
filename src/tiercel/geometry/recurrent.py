"""Families with recurrent layers: a state of fixed size per sequence, beside attention or instead of it.

Mamba 1 and 2, gated DeltaNet, KDA, lightning attention, short convolutions and RG-LRU. Convolution tails
hold `kernel - 1` steps in 16 bits; recurrent states are 32-bit unless the configuration says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.geometry.attention import FULL
from tiercel.geometry.fields import HEADS_MAX, LAYERS_MAX, Fields
from tiercel.geometry.latent import latent_entry
from tiercel.geometry.model import GroupKind, LayerGroup, StatePart
from tiercel.geometry.shapes import (
    HIDDEN_NAMES,
    Heads,
    Layer,
    head_dim,
    kv_heads,
    num_layers,
    plain_heads,
    query_heads,
)

LINEAR = "linear_attention"
_LEGACY_KINDS = {
    "attention": FULL,
    "full_attention": FULL,
    "mamba": LINEAR,
    "mamba2": LINEAR,
    "linear_attention": LINEAR,
    "hybrid": "hybrid",
    "moe": "none",
    "mlp": "none",
    "conv": "conv",
}
_PATTERN_LETTERS = {"M": LINEAR, "*": FULL, "-": "none", "E": "none"}
_STATE_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CONV_BYTES = 2


def state(*parts: StatePart) -> LayerGroup:
    """A layer that keeps only a recurrent state."""
    return LayerGroup(GroupKind.STATE, (), state=tuple(part for part in parts if part.unit_elements))


def _state_bytes(fields: Fields) -> int:
    """Bytes of one element of the recurrent state."""
    value = fields.raw("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    if value is None or value == "auto":
        return 4
    size = _STATE_DTYPES.get(value) if isinstance(value, str) else None
    if size is None:
        names = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
        fields.refuse(fields.name_of(names), f"one of {', '.join(_STATE_DTYPES)}")
    return size


def kinds_of(fields: Fields, name: str, layers: int) -> list[str] | None:
    """A stated per-layer list in today's words, or None where absent."""
    stated = fields.per_layer(name, layers, " | ".join(_LEGACY_KINDS))
    if stated is None:
        return None
    for kind in stated:
        if not isinstance(kind, str) or kind not in _LEGACY_KINDS:
            fields.refuse(name, f"only {', '.join(_LEGACY_KINDS)}")
    return [_LEGACY_KINDS[kind] for kind in stated]


def _place(kinds: list[str], attention: LayerGroup, recurrent: LayerGroup) -> list[Layer]:
    stored: dict[str, Layer] = {
        FULL: (attention,),
        LINEAR: (recurrent,),
        "conv": (recurrent,),
        "hybrid": (attention, recurrent),
        "none": (),
    }
    return [stored[kind] for kind in kinds]


# --- Mamba 1 ---------------------------------------------------------------------------------------------


def _mamba1_state(fields: Fields) -> LayerGroup:
    inner = fields.optional("intermediate_size") if fields.raw("state_size") is not None else None
    if inner is None:
        inner = fields.count("mamba_expand", "expand") * fields.count(*HIDDEN_NAMES)
    kernel = fields.count("mamba_d_conv", "conv_kernel")
    size = fields.count("mamba_d_state", "state_size")
    return state(
        StatePart("convolution", inner, kernel - 1, _CONV_BYTES),
        StatePart("state", inner, size, _state_bytes(fields)),
    )


def jamba(fields: Fields) -> list[Layer]:
    """Attention every `attn_layer_period` layers from `attn_layer_offset`, Mamba 1 elsewhere."""
    layers = num_layers(fields)
    period = fields.count("attn_layer_period", top=LAYERS_MAX)
    offset = fields.count("attn_layer_offset", top=LAYERS_MAX, least=0)
    kinds = kinds_of(fields, "layer_types", layers) or kinds_of(fields, "layers_block_type", layers)
    kinds = kinds or [FULL if i % period == offset else LINEAR for i in range(layers)]
    return _place(kinds, plain_heads(fields).full(), _mamba1_state(fields))


def mamba1(fields: Fields) -> list[Layer]:
    """Only Mamba 1 layers."""
    return [(_mamba1_state(fields),)] * num_layers(fields)


def zamba(fields: Fields) -> list[Layer]:
    """Mamba 1 everywhere, a shared attention block on the hybrid layers; its heads are twice as wide."""
    layers = num_layers(fields)
    kinds = kinds_of(fields, "layers_block_type", layers)
    if kinds is None:
        period = fields.count("attn_layer_period", top=LAYERS_MAX)
        offset = fields.count("attn_layer_offset", top=LAYERS_MAX, least=0)
        tail = ["hybrid" if i % period == offset else LINEAR for i in range(max(0, layers - 3))]
        kinds = [LINEAR, LINEAR, "hybrid", *tail][:layers]
    return _place(kinds, _wide_attention(fields), _mamba1_state(fields))


def _wide_attention(fields: Fields) -> LayerGroup:
    heads = query_heads(fields)
    dim = fields.optional("attention_head_dim")
    if dim is None:
        width = 2 * fields.count(*HIDDEN_NAMES)
        if width % heads:
            fields.refuse("num_attention_heads", f"a divisor of {width}, twice the hidden size")
        dim = width // heads
    return Heads(kv_heads(fields, heads), dim, dim).full()


# --- Mamba 2 ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Mamba2:
    heads: int
    head_dim: int
    groups: int
    state_size: int
    kernel: int
    inner: int

    def group(self, state_bytes: int) -> LayerGroup:
        tail = self.kernel - 1
        return state(
            StatePart("convolution of inputs", self.inner, tail, _CONV_BYTES),
            StatePart("convolution of groups", self.groups, 2 * self.state_size * tail, _CONV_BYTES),
            StatePart("state", self.heads, self.head_dim * self.state_size, state_bytes),
        )


def _mamba2_state(fields: Fields) -> LayerGroup:
    heads = fields.count("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads", top=HEADS_MAX)
    hidden = fields.optional(*HIDDEN_NAMES)
    expand = fields.optional("mamba_expand", "expand") or 2
    stated = fields.raw("mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim")
    inner = fields.optional("mamba_d_ssm")
    if stated is None or stated == "auto":
        inner = inner or expand * (hidden or fields.count(*HIDDEN_NAMES))
        if inner % heads:
            fields.refuse("mamba_n_heads", f"a divisor of {inner}, the inner width")
        dim = inner // heads
    else:
        dim = fields.count("mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim")
    return _Mamba2(
        heads,
        dim,
        fields.count("n_groups", "mamba_n_groups", "mamba_ngroups", top=HEADS_MAX),
        fields.count("ssm_state_size", "mamba_d_state", "state_size"),
        fields.count("conv_kernel", "mamba_d_conv"),
        heads * dim,
    ).group(_state_bytes(fields))


def nemotron_h(fields: Fields) -> list[Layer]:
    """One letter or word per layer: Mamba 2, attention, or a feed-forward that stores nothing."""
    kinds = _nemotron_kinds(fields)
    heads = query_heads(fields)
    dim = head_dim(fields, heads, "attention_head_dim", "head_dim")
    attention = Heads(kv_heads(fields, heads), dim, dim).full()
    recurrent = _mamba2_state(fields) if LINEAR in kinds else state()
    return _place(kinds, attention, recurrent)


def _nemotron_kinds(fields: Fields) -> list[str]:
    pattern = fields.raw("hybrid_override_pattern")
    if pattern is not None:
        if not isinstance(pattern, str) or not 0 < len(pattern) <= LAYERS_MAX or set(pattern) - set("M*-E"):
            fields.refuse(
                "hybrid_override_pattern", "letters M (Mamba), * (attention), - or E (feed-forward)"
            )
        return [_PATTERN_LETTERS[letter] for letter in pattern]
    name = fields.name_of(("layers_block_type", "layer_types"))
    stated = fields.raw(name)
    if not isinstance(stated, list) or not 0 < len(stated) <= LAYERS_MAX:
        fields.refuse("hybrid_override_pattern", "letters M, *, - or E, one per layer; or layers_block_type")
    return kinds_of(fields, name, len(stated)) or []


def mamba2_mixed(fields: Fields) -> list[Layer]:
    """Bamba and Granite hybrids: `attn_layer_indices` or `layer_types` places attention among Mamba 2."""
    layers = num_layers(fields)
    kinds = kinds_of(fields, "layer_types", layers) or kinds_of(fields, "layers_block_type", layers)
    if kinds is None:
        places = set(fields.numbers("attn_layer_indices", top=layers - 1) or ())
        kinds = [FULL if i in places else LINEAR for i in range(layers)]
    recurrent = _mamba2_state(fields) if LINEAR in kinds else state()
    return _place(kinds, plain_heads(fields).full(), recurrent)


def falcon_h1(fields: Fields) -> list[Layer]:
    """Every layer runs attention and Mamba 2 side by side."""
    return [(plain_heads(fields).full(), _mamba2_state(fields))] * num_layers(fields)


def mamba2(fields: Fields) -> list[Layer]:
    """Only Mamba 2 layers."""
    return [(_mamba2_state(fields),)] * num_layers(fields)


def zamba2(fields: Fields) -> list[Layer]:
    """Mamba 2 everywhere, a shared attention block on the hybrid layers, each with a cache of its own."""
    layers = num_layers(fields)
    kinds = kinds_of(fields, "layers_block_type", layers)
    if kinds is None:
        places = fields.numbers("hybrid_layer_ids", top=layers - 1)
        if places is None:
            fields.refuse("layers_block_type", f"a list of {layers} entries, or hybrid_layer_ids")
        kinds = ["hybrid" if i in set(places) else LINEAR for i in range(layers)]
    return _place(kinds, _wide_attention(fields), _mamba2_state(fields))


# --- Gated DeltaNet, KDA, lightning, convolutions, RG-LRU -------------------------------------------------


def _every_nth_full(fields: Fields, layers: int, period: int) -> list[str]:
    kinds = kinds_of(fields, "layer_types", layers)
    every = fields.optional("full_attention_interval") or period
    return kinds or [LINEAR if (i + 1) % every else FULL for i in range(layers)]


def delta_net(fields: Fields) -> list[Layer]:
    """Qwen3-Next and Qwen3.5: gated DeltaNet, with attention every fourth layer."""
    kinds = _every_nth_full(fields, num_layers(fields), 4)
    key_heads = fields.count("linear_num_key_heads", top=HEADS_MAX)
    value_heads = fields.count("linear_num_value_heads", top=HEADS_MAX)
    key_dim, value_dim = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    tail = fields.count("linear_conv_kernel_dim") - 1
    recurrent = state(
        StatePart("convolution of keys", key_heads, 2 * key_dim * tail, _CONV_BYTES),
        StatePart("convolution of values", value_heads, value_dim * tail, _CONV_BYTES),
        StatePart("state", value_heads, key_dim * value_dim, _state_bytes(fields)),
    )
    return _place(kinds, plain_heads(fields).full(), recurrent)


def kimi_linear(fields: Fields) -> list[Layer]:
    """Kimi Linear and K3: KDA states, with MLA on the layers listed (1-based) as full attention."""
    layers = num_layers(fields)
    linear = fields.object("linear_attn_config")
    kinds = kinds_of(fields, "layer_types", layers)
    if linear is not None:
        heads = linear.count("num_heads", top=HEADS_MAX)
        dim = linear.count("head_dim")
        kernel = linear.count("short_conv_kernel_size")
        kinds = kinds or _listed_layers(linear, layers)
    else:
        heads = fields.count("linear_num_heads", top=HEADS_MAX)
        dim = fields.count("linear_head_dim")
        kernel = fields.count("linear_conv_kernel_dim")
    kinds = kinds or [FULL if i and i % 4 == 0 else LINEAR for i in range(layers)]
    recurrent = state(
        StatePart("convolution", heads, 3 * dim * (kernel - 1), _CONV_BYTES),
        StatePart("state", heads, dim * dim, _state_bytes(fields)),
    )
    return _place(kinds, latent_entry(fields), recurrent)


def _listed_layers(linear: Fields, layers: int) -> list[str]:
    full = linear.numbers("full_attn_layers", top=layers, least=1)
    kda = linear.numbers("kda_layers", top=layers, least=1)
    if full is None or kda is None or sorted([*full, *kda]) != list(range(1, layers + 1)):
        linear.refuse("full_attn_layers", f"with kda_layers, each of the layers 1 to {layers} once")
    return [FULL if i + 1 in set(full) else LINEAR for i in range(layers)]


def lightning(fields: Fields) -> list[Layer]:
    """MiniMax: lightning attention keeps one matrix per head; `attn_type_list` 1 means softmax attention."""
    layers = num_layers(fields)
    heads = query_heads(fields)
    kinds = kinds_of(fields, "layer_types", layers)
    stated = fields.numbers("attn_type_list", top=1)
    if kinds is None and stated is not None:
        if len(stated) != layers:
            fields.refuse("attn_type_list", f"a list of {layers} entries, one per layer (0 | 1)")
        kinds = [FULL if softmax else LINEAR for softmax in stated]
    if kinds is None:
        kinds = [FULL if (i + 1) % 2 else LINEAR for i in range(layers)]
    plain = plain_heads(fields)
    matrix = state(StatePart("state", heads, plain.key_dim * plain.key_dim, 4))
    return _place(kinds, plain.full(), matrix)


def lightning_groups(fields: Fields) -> list[Layer]:
    """Ring linear: the last layer of each `layer_group_size`, and what is left over, is attention.

    Later releases keep a latent on those layers (`kv_lora_rank`), the first ones plain heads.
    """
    layers = num_layers(fields)
    size = fields.count("layer_group_size", top=LAYERS_MAX)
    whole = layers // size * size
    kinds = [FULL if (i + 1) % size == 0 or i >= whole else LINEAR for i in range(layers)]
    heads = query_heads(fields)
    dim = head_dim(fields, heads)
    latent = fields.raw("kv_lora_rank") is not None
    attention = latent_entry(fields) if latent else plain_heads(fields).full()
    return _place(kinds, attention, state(StatePart("state", heads, dim * dim, 4)))


def short_conv(fields: Fields) -> list[Layer]:
    """LFM2: gated short convolutions, with attention on the listed layers."""
    layers = num_layers(fields)
    kinds = kinds_of(fields, "layer_types", layers)
    if kinds is None:
        places = fields.numbers("full_attn_idxs", top=layers - 1)
        kinds = [FULL if places is None or i in places else "conv" for i in range(layers)]
    width = fields.count(*HIDDEN_NAMES)
    tail = fields.count("conv_L_cache") - 1
    return _place(
        kinds, plain_heads(fields).full(), state(StatePart("convolution", width, tail, _CONV_BYTES))
    )


def recurrent_gemma(fields: Fields) -> list[Layer]:
    """RG-LRU layers with local attention in between; `block_types` repeats over the layers."""
    layers = num_layers(fields)
    block = fields.raw("block_types")
    if not isinstance(block, list) or not block or any(k not in ("recurrent", "attention") for k in block):
        fields.refuse("block_types", "a list of recurrent | attention")
    width = fields.optional("lru_width") or fields.count(*HIDDEN_NAMES)
    tail = fields.count("conv1d_width") - 1
    lru = state(
        StatePart("convolution", width, tail, _CONV_BYTES),
        StatePart("state", width, 1, 4),
    )
    local = plain_heads(fields).windowed(fields.count("attention_window_size", top=10**12))
    return [(local,) if block[i % len(block)] == "attention" else (lru,) for i in range(layers)]
