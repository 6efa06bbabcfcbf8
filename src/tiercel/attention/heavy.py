"""H2O: the tokens that the prompt itself attended to most, and the latest ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.attention.numbers import column_sums
from tiercel.attention.policy import Fixed, LayerContext, Observer, Prefill, fixed, newest, top


class AttentionSums:
    """How much attention each token has got so far, over all queries and the query heads of its KV head."""

    def __init__(self, prefill: Prefill) -> None:
        batch, tokens = prefill.real.shape
        self.sums = torch.zeros(batch, prefill.kv_heads, tokens, device=prefill.real.device)

    def see(self, weights: Tensor, first: int) -> None:
        self.sums[..., : weights.shape[-1]] += column_sums(weights)


@dataclass(frozen=True, slots=True)
class HeavyHitters:
    """H2O: per KV head, the tokens with the largest sum of attention weights, and the latest; drops the rest.

    `recent_share` of the budget goes to the latest tokens, the rest to the heaviest of the others. The paper
    evicts step by step with the sums seen until then; here, as for every policy, the prompt is read with full
    attention and the set is chosen at its end. Original positions.
    Source: arXiv 2306.14048, section 4 (greedy eviction by accumulated attention, half recent).
    """

    recent_share: float = 0.5
    name: str = "h2o"
    drops: bool = True

    def observer(self, prefill: Prefill) -> AttentionSums:
        return AttentionSums(prefill)

    def watches(self, tokens: int) -> int:
        return tokens

    def prepare(self, context: LayerContext, budget: Tensor, seen: Observer | None) -> Fixed:
        if not isinstance(seen, AttentionSums):
            raise TypeError("H2O needs the attention sums of the prefill")
        recent_tokens = (budget * self.recent_share).long()
        recent = newest(context.real, recent_tokens)
        heavy = top(seen.sums, context.real[:, None] & ~recent, budget - recent_tokens)
        return fixed(context, recent | heavy)
