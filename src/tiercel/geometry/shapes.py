"""The fields that most families share: layers, heads, head size, context limit. No family knowledge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiercel.geometry.fields import HEADS_MAX, LAYERS_MAX, TOKENS_MAX, Fields
from tiercel.geometry.model import GroupKind, LayerGroup

LAYER_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEAD_NAMES = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
KV_HEAD_NAMES = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "n_kv_heads")
HIDDEN_NAMES = ("hidden_size", "n_embd", "n_embed", "d_model")
CONTEXT_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "model_max_length",
    "seq_length",
    "n_ctx",
    "max_target_positions",
    "max_context_length",
)


@dataclass(frozen=True, slots=True)
class Heads:
    """KV heads and the sizes of one key and one value vector."""

    kv_heads: int
    key_dim: int
    value_dim: int

    def full(self) -> LayerGroup:
        """A layer that keeps every token."""
        return LayerGroup(GroupKind.FULL, (), self.kv_heads, self.key_dim, self.value_dim)

    def windowed(self, window_tokens: int, kind: GroupKind = GroupKind.SLIDING) -> LayerGroup:
        """A layer that keeps at most `window_tokens`."""
        return LayerGroup(kind, (), self.kv_heads, self.key_dim, self.value_dim, window_tokens)


Layer = tuple[LayerGroup, ...]
"""What one layer stores: any number of groups whose `layers` are still empty."""


def gather(layers: Sequence[Layer]) -> tuple[LayerGroup, ...]:
    """Join the layers that store alike, in the order of their first appearance."""
    members: dict[LayerGroup, list[int]] = {}
    for index, stored in enumerate(layers):
        for group in stored:
            members.setdefault(group, []).append(index)
    return tuple(replace(group, layers=tuple(found)) for group, found in members.items())


def num_layers(fields: Fields) -> int:
    """Decoder layers."""
    return fields.count(*LAYER_NAMES, top=LAYERS_MAX)


def max_tokens(fields: Fields) -> int | None:
    """The context limit that the configuration states, None where it states none."""
    return fields.optional(*CONTEXT_NAMES, top=TOKENS_MAX)


def query_heads(fields: Fields) -> int:
    """Attention (query) heads."""
    return fields.count(*HEAD_NAMES, top=HEADS_MAX)


def head_dim(fields: Fields, heads: int, *names: str) -> int:
    """`head_dim` (or `names`) if stated, else hidden size over heads, which must then divide."""
    stated = fields.optional(*(names or ("head_dim",)))
    if stated is not None:
        return stated
    hidden = fields.count(*HIDDEN_NAMES)
    if hidden % heads:
        name = fields.name_of(HIDDEN_NAMES)
        fields.refuse(name, f"a multiple of the {heads} attention heads, or a head_dim beside it")
    return hidden // heads


def kv_heads(fields: Fields, heads: int, *names: str) -> int:
    """KV heads: stated, else one per attention head; must divide the attention heads."""
    names = names or KV_HEAD_NAMES
    stated = fields.optional(*names, top=HEADS_MAX)
    if stated is None:
        return heads
    if heads % stated:
        fields.refuse(fields.name_of(names), f"a divisor of the {heads} attention heads")
    return stated


def plain_heads(fields: Fields) -> Heads:
    """Heads of ordinary attention: keys and values of one size."""
    heads = query_heads(fields)
    dim = head_dim(fields, heads)
    return Heads(kv_heads(fields, heads), dim, dim)
