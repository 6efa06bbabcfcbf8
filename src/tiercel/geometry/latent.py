"""Families with compressed caches: MLA, its sparse-attention indexers, DeepSeek-V4's compressed time.

An MLA entry is `kv_lora_rank + qk_rope_head_dim` elements per token and layer, shared by all heads (no
factor of two). The expanded form, which some engines keep instead, is attached as `alternative`.
"""

from __future__ import annotations

from dataclasses import replace

from tiercel.geometry.attention import FULL, window
from tiercel.geometry.fields import HEADS_MAX, TOKENS_MAX, Fields
from tiercel.geometry.model import GroupKind, LayerGroup
from tiercel.geometry.shapes import Layer, num_layers, plain_heads, query_heads

_SCALE_BLOCK = 128
_RATIO_OF_KIND = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def expanded_heads(fields: Fields) -> LayerGroup | None:
    """The per-head keys and values behind a latent, None where the configuration lacks their sizes."""
    heads = fields.optional("num_attention_heads", top=HEADS_MAX)
    nope = fields.optional("qk_nope_head_dim")
    rope = fields.optional("qk_rope_head_dim")
    value = fields.optional("v_head_dim")
    if heads is None or nope is None or rope is None or value is None:
        return None
    return LayerGroup(GroupKind.FULL, (), heads, nope + rope, value)


def latent_entry(fields: Fields) -> LayerGroup:
    """One MLA layer."""
    rank = fields.count("kv_lora_rank")
    rope = fields.count("qk_rope_head_dim", least=0)
    return LayerGroup(GroupKind.LATENT, (), 1, rank, rope, alternative=expanded_heads(fields))


def mla(fields: Fields) -> list[Layer]:
    """Every layer keeps one latent per token; with a null rank or `use_mla` false, plain heads."""
    if fields.raw("kv_lora_rank") is None or not fields.flag("use_mla", default=True):
        return [(plain_heads(fields).full(),)] * num_layers(fields)
    return [(latent_entry(fields),)] * num_layers(fields)


def longcat(fields: Fields) -> list[Layer]:
    """LongCat: each layer holds two MLA attentions, so twice `num_layers` caches."""
    layers = fields.optional("num_layers", top=5_000)
    if layers is None:
        layers = num_layers(fields)
        return [(latent_entry(fields),)] * layers
    return [(latent_entry(fields),)] * (2 * layers)


def minicpm3(fields: Fields) -> list[Layer]:
    """MiniCPM3: serving engines keep per-head keys, and values padded to the key size, not the latent."""
    rank = fields.count("kv_lora_rank")
    rope = fields.count("qk_rope_head_dim")
    heads = query_heads(fields)
    dim = fields.count("qk_nope_head_dim") + rope
    latent = LayerGroup(GroupKind.LATENT, (), 1, rank, rope)
    group = LayerGroup(GroupKind.FULL, (), heads, dim, dim, alternative=latent, note="expanded latent")
    return [(group,)] * num_layers(fields)


def index_entry(fields: Fields) -> LayerGroup:
    """One sparse-attention selector key: 8-bit elements and a 4-byte scale per 128 of them."""
    dim = fields.count("index_head_dim")
    size = dim + 4 * -(-dim // _SCALE_BLOCK)
    return LayerGroup(GroupKind.INDEX, (), 1, dim, 0, entry_bytes=size, note="fp8 selector key + scale")


def dsa(fields: Fields) -> list[Layer]:
    """MLA with an indexer on the layers whose `indexer_types` is 'full' (by default all)."""
    latent, index = latent_entry(fields), index_entry(fields)
    types = _indexer_types(fields, num_layers(fields))
    return [(latent, index) if kind == "full" else (latent,) for kind in types]


def _indexer_types(fields: Fields, layers: int) -> list[str]:
    stated = fields.per_layer("indexer_types", layers, "full | shared")
    if stated is None:
        pattern = fields.raw("index_topk_pattern")
        if isinstance(pattern, str):
            stated = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
        elif pattern is not None:
            stated = fields.per_layer("index_topk_pattern", layers, "full | shared")
    if stated is not None:
        if len(stated) != layers or any(kind not in ("full", "shared") for kind in stated):
            fields.refuse(
                fields.name_of(("indexer_types", "index_topk_pattern")), f"{layers} × full | shared"
            )
        return stated
    every = fields.optional("index_topk_freq", least=0) or 1
    offset = fields.optional("index_skip_topk_offset", least=0)
    offset = 2 if offset is None else offset
    return ["full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(layers)]


def hy_v4(fields: Fields) -> list[Layer]:
    """MLA whose indexer runs on layer 0 and every fourth layer after it, unless `indexer_types` says."""
    latent, index = latent_entry(fields), index_entry(fields)
    layers = num_layers(fields)
    stated = fields.per_layer("indexer_types", layers, "full | shared")
    kinds = stated or ["full" if i == 0 or (i - 1) % 4 == 0 else "shared" for i in range(layers)]
    return [(latent, index) if kind == "full" else (latent,) for kind in kinds]


def minimax_m3(fields: Fields) -> list[Layer]:
    """Grouped heads, and one selector key (not one per index head) on the layers with sparse attention."""
    layers = num_layers(fields)
    full = plain_heads(fields).full()
    sparse = fields.object("sparse_attention_config")
    if sparse is not None and sparse.flag("use_sparse_attention", default=True):
        dim = sparse.count("sparse_index_dim")
        on = sparse.numbers("sparse_attention_freq", top=1)
        if on is None or len(on) != layers:
            sparse.refuse("sparse_attention_freq", f"a list of {layers} entries, one per layer (0 | 1)")
    else:
        kinds = fields.per_layer("layer_types", layers, f"{FULL} | minimax_m3_sparse") or [FULL] * layers
        on = [int(kind == "minimax_m3_sparse") for kind in kinds]
        dim = fields.count("index_head_dim") if any(on) else 1
    index = LayerGroup(GroupKind.INDEX, (), 1, dim, 0, note="selector key")
    return [(full, index) if sparse_here else (full,) for sparse_here in on]


def deepseek_v4(fields: Fields) -> list[Layer]:
    """A short window on every layer, and compressed entries: one per `compress_ratios` tokens.

    An entry packs the part without rotary embedding in 8 bits, the rotary part in 16, and a scale byte
    per 64 elements (padded to 8). Layers of ratio 4 also keep a selector key per entry. Entries of the
    draft (MTP) layers at the end of the list are dropped.
    """
    layers = num_layers(fields)
    dim, rope = fields.count("head_dim"), fields.count("qk_rope_head_dim")
    if rope >= dim:
        fields.refuse("qk_rope_head_dim", f"a whole number below head_dim {dim}")
    plain_part = dim - rope
    size = plain_part + 2 * rope + 8 * -(-plain_part // (64 * 8))
    tokens = window(fields)
    if tokens is None:
        fields.refuse("sliding_window", f"a whole number from 1 to {TOKENS_MAX}")
    entry = LayerGroup(GroupKind.LATENT, (), 1, plain_part, rope, tokens, entry_bytes=size)
    index = index_entry(fields)
    return [_v4_layer(entry, index, ratio) for ratio in _compress_ratios(fields, layers)]


def _v4_layer(entry: LayerGroup, index: LayerGroup, ratio: int) -> Layer:
    local = replace(entry, note="window")
    if ratio == 0:
        return (local,)
    compressed = replace(
        entry, window_tokens=None, tokens_per_entry=ratio, note=f"1 entry per {ratio} tokens"
    )
    if ratio == min(r for r in _RATIO_OF_KIND.values() if r):
        return (local, compressed, replace(index, tokens_per_entry=ratio))
    return (local, compressed)


def _compress_ratios(fields: Fields, layers: int) -> list[int]:
    ratios = fields.numbers("compress_ratios", top=TOKENS_MAX)
    if ratios is not None:
        if len(ratios) < layers:
            fields.refuse("compress_ratios", f"a list of at least {layers} entries, one per layer")
        return ratios[:layers]
    kinds = fields.raw("layer_types")
    if not isinstance(kinds, list) or len(kinds) < layers:
        fields.refuse("compress_ratios", f"a list of at least {layers} entries, one per layer")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _RATIO_OF_KIND:
            fields.refuse("layer_types", f"only {', '.join(_RATIO_OF_KIND)}")
    return [_RATIO_OF_KIND[kind] for kind in kinds[:layers]]
