"""SnapKV: what the end of the prompt attended to, with its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from tiercel.attention.numbers import column_sums
from tiercel.attention.policy import Fixed, LayerContext, Observer, Prefill, fixed, newest, real_tokens, top


class LastQueries:
    """The attention each token got from the last `window` queries: summed over them and their query heads."""

    def __init__(self, prefill: Prefill, window: int) -> None:
        self._place = prefill.real.cumsum(-1)
        self._begin = (real_tokens(prefill.real) - window).clamp(min=0)
        batch, tokens = prefill.real.shape
        self.sums = torch.zeros(batch, prefill.kv_heads, tokens, device=prefill.real.device)

    def see(self, weights: Tensor, first: int) -> None:
        counted = self._place[:, first : first + weights.shape[3]] > self._begin[:, None]
        if bool(counted.any()):
            self.sums[..., : weights.shape[-1]] += column_sums(weights, counted)


@dataclass(frozen=True, slots=True)
class SnapKV:
    """The last `window` tokens and, per KV head, the others they attend to most; drops the rest.

    Scores are attention weights of the last `window` queries, averaged over these and the query heads, then
    over `pool` neighbouring tokens (average pooling, zeros outside), so that a clue keeps its surroundings.
    The question is not part of the prompt here, which the method would like it to be. Original positions.
    Source: arXiv 2404.14469, section 4 (observation window, pooling, top-k per head).
    """

    window: int = 32
    pool: int = 5
    name: str = "snapkv"
    drops: bool = True

    def observer(self, prefill: Prefill) -> LastQueries:
        return LastQueries(prefill, self.window)

    def watches(self, tokens: int) -> int:
        return min(self.window, tokens)

    def prepare(self, context: LayerContext, budget: Tensor, seen: Observer | None) -> Fixed:
        if not isinstance(seen, LastQueries):
            raise TypeError("SnapKV needs the last queries' attention")
        window_tokens = budget.clamp(max=self.window)
        recent = newest(context.real, window_tokens)
        rest = context.real[:, None] & ~recent
        pooled = avg_pool1d(seen.sums * rest, self.pool, stride=1, padding=self.pool // 2)
        return fixed(context, recent | top(pooled, rest, budget - window_tokens))
