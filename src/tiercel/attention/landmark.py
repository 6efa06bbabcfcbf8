"""Per-token landmarks: a 2-bit copy of every key stays on the device and says which tokens to fetch.

The method we recommend: at a quarter of the tokens read it answers like the oracle, and like full attention
on tasks that need many facts (docs/eval.md has the figures), where whole pages or fixed sets lose most of
them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.attention.digest import Landmarks
from tiercel.attention.higgs import Higgs
from tiercel.attention.policy import Blind, LayerContext, Observer, token_bytes
from tiercel.attention.reading import RECENT_TOKENS, Coded, Reading, offloaded, split_budget

TWO_BITS, FOUR_BITS = Higgs(4), Higgs(2)


@dataclass(frozen=True, slots=True)
class Landmark(Blind):
    """Fetches per query and KV head the tokens whose low-bit key promises most attention; only skips.

    landmark  codec of the copies of the post-RoPE keys on the device (2 bits a number)
    stored    codec of the keys and values that are fetched; None: as they are. Recent tokens are exact.

    Scores: softmax of q·landmark / sqrt(dim) per query head, the largest over the heads of a KV head. The
    paper codes all heads of a token together and, for what is fetched, keys before RoPE; here each head by
    itself, after RoPE. Original positions. Source: arXiv 2604.08426 (its alternative to ShadowKV), 64 recent
    tokens.
    """

    landmark: Higgs = TWO_BITS
    stored: Higgs | None = None
    recent: int = RECENT_TOKENS
    name: str = "landmark"
    drops: bool = False

    def prepare(self, context: LayerContext, budget: Tensor, seen: Observer | None) -> Reading:
        recent, rest, count = split_budget(context, budget, self.recent)
        dim, value_dim = context.keys.shape[-1], context.values.shape[-1]
        tokens = float(context.real.sum()) * context.keys.shape[1]
        keys, values, share, coded = context.keys, context.values, 1.0, None
        if (codec := self.stored) is not None:
            coded = Coded(codec, codec.pack(keys), codec.pack(values))
            keys = torch.where(recent[..., None], keys, codec.unpack(coded.keys).to(keys.dtype))
            values = torch.where(recent[..., None], values, codec.unpack(coded.values).to(values.dtype))
            share = (codec.bits(dim) + codec.bits(value_dim)) / 8 / token_bytes(context)
        index = tokens * self.landmark.bits(dim) / 8
        return Reading(
            keys, values, recent, rest, count, Landmarks.of(context, self.landmark),
            offloaded(context, budget, recent, index, share), coded,
        )  # fmt: skip
