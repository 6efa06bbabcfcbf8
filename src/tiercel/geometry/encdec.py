"""Decoders that also read another sequence: encoder-decoder models and cross-attention to images.

The decoder's own cache grows with its tokens; the cross keys and values are stored once per source token
(audio frame, source text, image patch) and then stay.
"""

from __future__ import annotations

from tiercel.geometry.fields import HEADS_MAX, LAYERS_MAX, TOKENS_MAX, Fields
from tiercel.geometry.model import GroupKind, LayerGroup
from tiercel.geometry.shapes import HIDDEN_NAMES, Heads, Layer, num_layers, plain_heads


def _cross(heads: Heads, source_tokens: int | None, note: str) -> LayerGroup:
    return LayerGroup(
        GroupKind.CROSS,
        (),
        heads.kv_heads,
        heads.key_dim,
        heads.value_dim,
        source_tokens=source_tokens,
        note=note,
    )


def bart_like(fields: Fields) -> list[Layer]:
    """BART, Whisper, Marian, NLLB ...: `decoder_layers` of self and cross attention over `d_model`."""
    layers = fields.count("decoder_layers", "num_decoder_layers", top=LAYERS_MAX)
    heads = fields.count("decoder_attention_heads", "num_decoder_attention_heads", top=HEADS_MAX)
    width = fields.count(*HIDDEN_NAMES)
    if width % heads:
        fields.refuse(fields.name_of(HIDDEN_NAMES), f"a multiple of the {heads} decoder attention heads")
    shape = Heads(heads, width // heads, width // heads)
    frames = fields.optional("max_source_positions", top=TOKENS_MAX)
    return [(shape.full(), _cross(shape, frames, "encoder tokens"))] * layers


def text_to_text(fields: Fields) -> list[Layer]:
    """BART's shape where the source length is the user's, not the model's: cross keys are not counted."""
    return [
        tuple(LayerGroup(g.kind, (), g.kv_heads, g.key_dim, g.value_dim, note=g.note) for g in stored)
        for stored in bart_like(fields)
    ]


def t5(fields: Fields) -> list[Layer]:
    """T5 and kin: heads of `d_kv`, whatever the model width; decoder layers default to the encoder's."""
    layers = fields.optional("num_decoder_layers", top=LAYERS_MAX) or num_layers(fields)
    heads = fields.count("num_heads", "num_attention_heads", top=HEADS_MAX)
    dim = fields.count("d_kv", "head_dim")
    shape = Heads(heads, dim, dim)
    return [(shape.full(), _cross(shape, None, "encoder tokens"))] * layers


def mllama(fields: Fields) -> list[Layer]:
    """Llama 3.2 Vision: the `cross_attention_layers` keep image tokens only, the others text."""
    layers = num_layers(fields)
    shape = plain_heads(fields)
    cross = set(fields.numbers("cross_attention_layers", top=layers - 1) or ())
    seen = _cross(shape, None, "image tokens")
    return [(seen,) if i in cross else (shape.full(),) for i in range(layers)]
