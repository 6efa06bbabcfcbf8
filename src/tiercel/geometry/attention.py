"""Families whose layers keep plain keys and values: every token, a window, a chunk, or another layer's.

Covers MHA, GQA, MQA (also by flag), interleaved local and global layers, chunked attention, cross-layer
sharing, per-layer head counts and key sizes that differ from value sizes. Rules for absent fields follow
the published configuration class of each model type.
"""

from __future__ import annotations

from collections.abc import Callable

from tiercel.geometry.fields import HEADS_MAX, TOKENS_MAX, Fields
from tiercel.geometry.model import GroupKind, LayerGroup
from tiercel.geometry.shapes import (
    Heads,
    Layer,
    head_dim,
    kv_heads,
    num_layers,
    plain_heads,
    query_heads,
)

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
Builder = Callable[[Fields], list[Layer]]
KindRule = Callable[[Fields, int], list[str]]
_GEMMA4_GLOBAL_HEAD_DIM = 512
SHARED_LAYER = LayerGroup(GroupKind.SHARED, ())


def window(fields: Fields, *names: str) -> int | None:
    """The sliding window, None where absent, null or 0."""
    return fields.optional(*(names or ("sliding_window",)), top=TOKENS_MAX, least=0) or None


def layer_kinds(fields: Fields, layers: int, accepted: tuple[str, ...], rule: KindRule) -> list[str]:
    """`layer_types` if stated (each one of `accepted`), else what `rule` derives."""
    stated = fields.per_layer("layer_types", layers, " | ".join(accepted))
    if stated is None:
        return rule(fields, layers)
    for kind in stated:
        if kind not in accepted:
            fields.refuse("layer_types", f"only {', '.join(accepted)} (found {kind!r:.40})")
    return stated


def plain(fields: Fields) -> list[Layer]:
    """Every layer keeps keys and values of every token, unless `layer_types` makes some slide."""
    stated = fields.raw("layer_types")
    if isinstance(stated, list) and (SLIDING in stated or CHUNKED in stated):
        return windowed(all_full)(fields)
    return [(plain_heads(fields).full(),)] * num_layers(fields)


def windowed(rule: KindRule) -> Builder:
    """Full and sliding layers of one head shape, told apart by `layer_types` or `rule`."""

    def build(fields: Fields) -> list[Layer]:
        layers = num_layers(fields)
        heads = plain_heads(fields)
        kinds = layer_kinds(fields, layers, (FULL, SLIDING), rule)
        return [(by_kind(fields, kind, heads),) for kind in kinds]

    return build


def by_kind(fields: Fields, kind: str, heads: Heads) -> LayerGroup:
    """The group of one layer of `kind`; a sliding layer needs the window stated."""
    if kind == FULL:
        return heads.full()
    tokens = window(fields)
    if tokens is None:
        fields.refuse("sliding_window", f"a whole number from 1 to {TOKENS_MAX}, as some layers slide")
    return heads.windowed(tokens)


def all_full(_fields: Fields, layers: int) -> list[str]:
    """No layer slides unless `layer_types` says so."""
    return [FULL] * layers


def all_sliding(fields: Fields, layers: int) -> list[str]:
    """Every layer slides if a window is stated."""
    return [FULL if window(fields) is None else SLIDING] * layers


def tail_sliding(fields: Fields, layers: int) -> list[str]:
    """Qwen 2 and 3: with `use_sliding_window`, the layers from `max_window_layers` on slide."""
    first = fields.optional("max_window_layers", least=0)
    on = fields.flag("use_sliding_window") and window(fields) is not None
    return [SLIDING if on and i >= (first or 0) else FULL for i in range(layers)]


def tail_sliding_always(fields: Fields, layers: int) -> list[str]:
    """dots.llm1: the layers from `max_window_layers` on slide if a window is stated."""
    first = fields.optional("max_window_layers", least=0)
    start = layers if first is None or window(fields) is None else first
    return [SLIDING if i >= start else FULL for i in range(layers)]


def all_sliding_if_used(fields: Fields, layers: int) -> list[str]:
    """Qwen3-MoE: every layer slides with `use_sliding_window`."""
    on = fields.flag("use_sliding_window") and window(fields) is not None
    return [SLIDING if on else FULL] * layers


def nth_full(period: int, *names: str, last_full: bool = False) -> KindRule:
    """Every `period`-th layer (1-based; overridden by the field `names`) is full, the others slide."""

    def rule(fields: Fields, layers: int) -> list[str]:
        if window(fields) is None:
            return [FULL] * layers
        every = pattern_period(fields, names) or period
        kinds = [SLIDING if (i + 1) % every else FULL for i in range(layers)]
        if last_full:
            kinds[-1] = FULL
        return kinds

    return rule


def prefixed(period: int) -> KindRule:
    """Cohere 2 MoE: the first `first_k_dense_replace` layers and the rest count their patterns apart."""

    def rule(fields: Fields, layers: int) -> list[str]:
        first = min(fields.optional("first_k_dense_replace", least=0) or 0, layers)
        if window(fields) is None:
            return [FULL] * layers
        dense = fields.optional("prefix_dense_sliding_window_pattern") or 1
        every = fields.optional("sliding_window_pattern") or period
        places = [(i, dense) for i in range(first)] + [(i, every) for i in range(layers - first)]
        return [SLIDING if (i + 1) % step else FULL for i, step in places]

    return rule


def pattern_period(fields: Fields, names: tuple[str, ...]) -> int | None:
    """A pattern stated as a number, or as letters such as 'LLLG' (its length)."""
    value = fields.raw(*names) if names else None
    if isinstance(value, str) and value and set(value) <= {"L", "G"} and value.endswith("G"):
        return len(value)
    return fields.optional(*names) if names else None


def first_full(period: int) -> KindRule:
    """Layers 0, `period`, 2·`period` ... are full, the others slide."""

    def rule(fields: Fields, layers: int) -> list[str]:
        none = window(fields) is None
        return [FULL if none or i % period == 0 else SLIDING for i in range(layers)]

    return rule


def no_rope_sliding(fields: Fields, layers: int) -> list[str]:
    """SmolLM3: with `use_sliding_window`, the layers without rotary embedding slide."""
    if not fields.flag("use_sliding_window") or window(fields) is None:
        return [FULL] * layers
    return [FULL if rope else SLIDING for rope in _rope_layers(fields, layers)]


def _rope_layers(fields: Fields, layers: int) -> list[int]:
    stated = fields.numbers("no_rope_layers", top=1)
    if stated:
        if len(stated) != layers:
            fields.refuse("no_rope_layers", f"a list of {layers} entries, one per layer (0 | 1)")
        return stated
    every = fields.optional("no_rope_layer_interval") or 4
    return [int((i + 1) % every != 0) for i in range(layers)]


def llama4(fields: Fields) -> list[Layer]:
    """Layers with rotary embedding keep the current chunk (`attention_chunk_size`), the others all."""
    layers = num_layers(fields)
    heads = plain_heads(fields)

    def rule(fields: Fields, layers: int) -> list[str]:
        return [CHUNKED if rope else FULL for rope in _rope_layers(fields, layers)]

    kinds = layer_kinds(fields, layers, (FULL, CHUNKED), rule)
    chunk = fields.optional("attention_chunk_size", top=TOKENS_MAX)
    if chunk is None:
        return [(heads.full(),)] * layers
    chunked = heads.windowed(chunk, GroupKind.CHUNKED)
    return [(heads.full() if kind == FULL else chunked,) for kind in kinds]


def falcon(fields: Fields) -> list[Layer]:
    """`multi_query` without `new_decoder_architecture` means one KV head, whatever num_kv_heads says."""
    heads = query_heads(fields)
    dim = head_dim(fields, heads)
    if fields.flag("new_decoder_architecture"):
        shared = kv_heads(fields, heads, "num_kv_heads", "n_head_kv")
    else:
        shared = 1 if fields.flag("multi_query", default=True) else heads
    return [(Heads(shared, dim, dim).full(),)] * num_layers(fields)


def refined_web(fields: Fields) -> list[Layer]:
    """Falcon under its first name: `n_head_kv`, where stated, means the newer decoder with grouped heads."""
    if fields.raw("n_head_kv", "num_kv_heads") is None:
        return falcon(fields)
    heads = query_heads(fields)
    dim = head_dim(fields, heads)
    return [(Heads(kv_heads(fields, heads, "n_head_kv", "num_kv_heads"), dim, dim).full(),)] * num_layers(
        fields
    )


def gpt_bigcode(fields: Fields) -> list[Layer]:
    """`multi_query` (the default) means one KV head."""
    heads = query_heads(fields)
    dim = head_dim(fields, heads)
    shared = 1 if fields.flag("multi_query", default=True) else heads
    return [(Heads(shared, dim, dim).full(),)] * num_layers(fields)


def nested_attention(fields: Fields) -> list[Layer]:
    """MPT and DBRX: KV heads stand in `attn_config.kv_n_heads`; absent means one per head."""
    heads = query_heads(fields)
    dim = head_dim(fields, heads)
    nested = fields.object("attn_config")
    shared = heads if nested is None else kv_heads(nested, heads, "kv_n_heads")
    return [(Heads(shared, dim, dim).full(),)] * num_layers(fields)


def chatglm(fields: Fields) -> list[Layer]:
    """ChatGLM 2 to 4: `multi_query_attention` selects `multi_query_group_num` heads of `kv_channels`."""
    heads = query_heads(fields)
    dim = head_dim(fields, heads, "kv_channels", "head_dim")
    grouped = fields.flag("multi_query_attention")
    shared = kv_heads(fields, heads, "multi_query_group_num") if grouped else heads
    return [(Heads(shared, dim, dim).full(),)] * num_layers(fields)


def channels(fields: Fields) -> list[Layer]:
    """JetMoE and Qwen 1: the head size is called `kv_channels`; JetMoE's heads are its KV heads."""
    heads = fields.optional("num_key_value_heads", top=HEADS_MAX) or query_heads(fields)
    dim = head_dim(fields, heads, "kv_channels", "head_dim")
    return [(Heads(heads, dim, dim).full(),)] * num_layers(fields)


def shared_across_layers(fields: Fields) -> list[Layer]:
    """Hunyuan: with `use_cla` one layer in `cla_share_factor` stores, the rest read it."""
    heads = query_heads(fields)
    dim = head_dim(fields, heads, "head_dim", "attention_head_dim")
    group = Heads(kv_heads(fields, heads), dim, dim).full()
    factor = fields.count("cla_share_factor") if fields.flag("use_cla") else 1
    return [(group if i % factor == 0 else SHARED_LAYER,) for i in range(num_layers(fields))]


def tail_shared(rule: KindRule) -> Builder:
    """Gemma 3n: the last `num_kv_shared_layers` read the cache of an earlier layer."""

    def build(fields: Fields) -> list[Layer]:
        return _share_tail(fields, windowed(rule)(fields))

    return build


def _share_tail(fields: Fields, layers: list[Layer]) -> list[Layer]:
    shared = fields.optional("num_kv_shared_layers", least=0) or 0
    if shared >= len(layers):
        fields.refuse("num_kv_shared_layers", f"a whole number below the {len(layers)} layers")
    kept = len(layers) - shared
    return layers[:kept] + [(SHARED_LAYER,)] * shared


def gemma4(fields: Fields) -> list[Layer]:
    """Local layers of one head shape, global ones of `global_head_dim` and `num_global_key_value_heads`."""
    layers = num_layers(fields)
    heads = query_heads(fields)
    local = plain_heads(fields)
    dim = fields.optional("global_head_dim") or _GEMMA4_GLOBAL_HEAD_DIM
    stated = fields.optional("num_global_key_value_heads", top=HEADS_MAX)
    # The global head count applies only where keys double as values; both are stored all the same.
    shared = stated if stated is not None and fields.flag("attention_k_eq_v") else local.kv_heads
    if heads % shared:
        fields.refuse("num_global_key_value_heads", f"a divisor of the {heads} attention heads")
    wide = Heads(shared, dim, dim)
    kinds = layer_kinds(fields, layers, (FULL, SLIDING), nth_full(6, last_full=True))
    kinds = [*kinds[:-1], FULL]  # the last layer is always global
    shapes = [wide if kind == FULL else local for kind in kinds]
    stated_shapes = fields.object("per_layer_config")
    if stated_shapes is not None:
        shapes = [_overridden(stated_shapes, i, local) for i in range(layers)]
    stored: list[Layer] = [(by_kind(fields, kind, shape),) for kind, shape in zip(kinds, shapes, strict=True)]
    return _share_tail(fields, stored)


def _overridden(layers: Fields, index: int, otherwise: Heads) -> Heads:
    """The heads of one layer where `per_layer_config` lists the layers that differ."""
    layer = layers.object(str(index))
    if layer is None:
        return otherwise
    dim = layer.optional("head_dim") or otherwise.key_dim
    return Heads(layer.optional("num_key_value_heads", top=HEADS_MAX) or otherwise.kv_heads, dim, dim)


def two_shapes(local_kinds: tuple[str, ...], rule: KindRule) -> Builder:
    """MiMo-V2-Flash and Inkling: `swa_*` fields give the sliding layers heads and sizes of their own."""

    def build(fields: Fields) -> list[Layer]:
        layers = num_layers(fields)
        heads = query_heads(fields)
        dim = head_dim(fields, heads)
        wide = Heads(kv_heads(fields, heads), dim, fields.optional("v_head_dim") or dim)
        local_heads = fields.optional("swa_num_attention_heads", top=HEADS_MAX) or heads
        local_dim = fields.optional("swa_head_dim") or dim
        local_shared = fields.optional("swa_num_key_value_heads", top=HEADS_MAX) or wide.kv_heads
        if local_heads % local_shared:
            fields.refuse("swa_num_key_value_heads", f"a divisor of the {local_heads} attention heads")
        local_value = fields.optional("swa_v_head_dim", "v_head_dim") or local_dim
        local = Heads(local_shared, local_dim, local_value)
        tokens = window(fields, "sliding_window", "sliding_window_size")
        kinds = layer_kinds(fields, layers, (FULL, "hybrid", *local_kinds), rule)
        if tokens is None:
            fields.refuse("sliding_window", f"a whole number from 1 to {TOKENS_MAX}, as some layers slide")
        return [(local.windowed(tokens) if kind in local_kinds else wide.full(),) for kind in kinds]

    return build


def mimo_kinds(fields: Fields, layers: int) -> list[str]:
    """`hybrid_layer_pattern` (1 = sliding), else layer 0 and every sixth are full."""
    stated = fields.numbers("hybrid_layer_pattern", top=1)
    if stated is None:
        return [FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING for i in range(layers)]
    if len(stated) != layers:
        fields.refuse("hybrid_layer_pattern", f"a list of {layers} entries, one per layer (0 | 1)")
    return [SLIDING if local else FULL for local in stated]


def nas_blocks(fields: Fields) -> list[Layer]:
    """Nemotron NAS (DeciLM): `block_configs` gives each layer its own head groups, or no attention."""
    layers = num_layers(fields)
    heads = query_heads(fields)
    dim = head_dim(fields, heads)
    blocks = fields.per_layer("block_configs", layers, "objects with an attention part")
    if blocks is None:
        return _decilm_heads(fields, layers, heads, dim)
    return [_nas_block(fields, index, block, heads, dim) for index, block in enumerate(blocks)]


def _nas_block(fields: Fields, index: int, block: object, heads: int, dim: int) -> Layer:
    part = block.get("attention") if isinstance(block, dict) else None
    if not isinstance(part, dict):
        fields.refuse("block_configs", f"an object with an attention part at layer {index}")
    attention = Fields(fields.source, part, path=f"{fields.path}block_configs[{index}].attention.")
    if attention.flag("no_op") or attention.flag("replace_with_linear"):
        return ()
    in_group = attention.count("n_heads_in_group", top=HEADS_MAX)
    if heads % in_group:
        attention.refuse("n_heads_in_group", f"a divisor of the {heads} attention heads")
    shape = Heads(heads // in_group, dim, dim)
    tokens = attention.optional("window_length", top=TOKENS_MAX)
    return (shape.full() if tokens is None else shape.windowed(tokens),)


def _decilm_heads(fields: Fields, layers: int, heads: int, dim: int) -> list[Layer]:
    stated = fields.numbers("num_key_value_heads_per_layer", top=HEADS_MAX, least=1)
    if stated is None or len(stated) != layers:
        fields.refuse("block_configs", f"a list of {layers} entries, or num_key_value_heads_per_layer")
    for shared in stated:
        if heads % shared:
            fields.refuse("num_key_value_heads_per_layer", f"divisors of the {heads} attention heads")
    return [(Heads(shared, dim, dim).full(),) for shared in stated]


def openelm(fields: Fields) -> list[Layer]:
    """OpenELM: `num_kv_heads` is a list with one count per layer."""
    stated = fields.numbers("num_kv_heads", top=HEADS_MAX, least=1)
    layers = fields.count("num_transformer_layers", top=10_000)
    if stated is None or len(stated) != layers:
        fields.refuse("num_kv_heads", f"a list of {layers} entries, one per layer")
    dim = fields.count("head_dim")
    return [(Heads(shared, dim, dim).full(),) for shared in stated]


def step(fields: Fields) -> list[Layer]:
    """Step 3.5 and 3.7: KV heads are `num_attention_groups`; sliding layers may have a count of their own.

    Per-layer lists may carry the draft (MTP) layers at their end; those are dropped.
    """
    layers = num_layers(fields)
    heads = query_heads(fields)
    dim = head_dim(fields, heads)
    wide = Heads(kv_heads(fields, heads, "num_attention_groups", "num_key_value_heads"), dim, dim)
    kinds = fields.raw("layer_types")
    if kinds is None:
        return [(wide.full(),)] * layers
    if not isinstance(kinds, list) or len(kinds) < layers or any(k not in (FULL, SLIDING) for k in kinds):
        fields.refuse("layer_types", f"a list of {layers} entries, each {FULL} or {SLIDING}")
    other = fields.object("attention_other_setting")
    local = wide
    if other is not None:
        local_heads = other.optional("num_attention_heads", top=HEADS_MAX) or heads
        names = ("num_attention_groups", "num_key_value_heads")
        stated = other.raw(*names)
        shared = wide.kv_heads if stated is None else kv_heads(other, local_heads, *names)
        local_dim = other.optional("head_dim") or dim
        local = Heads(shared, local_dim, local_dim)
    return [(by_kind(fields, kind, local if kind == SLIDING else wide),) for kind in kinds[:layers]]
