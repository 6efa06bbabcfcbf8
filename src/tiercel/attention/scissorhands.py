"""Scissorhands: drop first what was below average most often of late."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.attention.policy import Fixed, LayerContext, Observer, Prefill, fixed, newest, real_tokens, top


class BelowAverage:
    """For how many of the last `history` queries a token got less than an even share of the attention."""

    def __init__(self, prefill: Prefill, history: int) -> None:
        self._place = prefill.real.cumsum(-1)  # 1 is the first real token
        # Rows before this place are not looked at.
        self._begin = real_tokens(prefill.real) - history
        batch, tokens = prefill.real.shape
        self.counts = torch.zeros(batch, prefill.kv_heads, tokens, device=prefill.real.device)

    def see(self, weights: Tensor, first: int) -> None:
        seen = self._place[
            :, first : first + weights.shape[3]
        ]  # [batch, some]: how many tokens each query sees
        counted = (seen > self._begin[:, None]) & (seen > 0)
        if not bool(counted.any()):
            return
        mean = weights.mean(2)  # [batch, kv_heads, some, tokens]
        below = mean < 1.0 / seen.clamp(min=1)[:, None, :, None]
        # A query does not judge tokens that come after it.
        tokens = weights.shape[-1]
        earlier = self._place[:, None, :tokens] <= seen[:, :, None]
        self.counts[..., :tokens] += (below & (counted[:, :, None] & earlier)[:, None]).sum(2)


@dataclass(frozen=True, slots=True)
class Scissorhands:
    """Keeps the latest tokens and those that were least often below average; drops the rest.

    Of the last `history` queries each token counts those whose attention (mean over the query heads of its KV
    head) was below 1/t, t being the tokens that query saw; the highest counts go first, of equal ones the
    older. `recent` latest tokens stay (half the budget at most). `layer_shares`, if given, multiplies the
    budget per layer, as the paper gives later layers more. Original positions. Source: arXiv 2305.17118,
    section 4 (algorithm for a compression step; history 400, recent 10).
    """

    history: int = 400
    recent: int = 10
    layer_shares: tuple[float, ...] = ()
    name: str = "scissorhands"
    drops: bool = True

    def observer(self, prefill: Prefill) -> BelowAverage:
        return BelowAverage(prefill, self.history)

    def watches(self, tokens: int) -> int:
        return min(self.history, tokens)

    def prepare(self, context: LayerContext, budget: Tensor, seen: Observer | None) -> Fixed:
        if not isinstance(seen, BelowAverage):
            raise TypeError("Scissorhands needs the counts of the prefill")
        if self.layer_shares:
            scaled = (budget * self.layer_shares[context.layer % len(self.layer_shares)]).long().clamp(min=1)
            budget = torch.minimum(scaled, real_tokens(context.real)[:, None])
        recent_tokens = (budget // 2).clamp(max=self.recent)
        recent = newest(context.real, recent_tokens)
        tokens = context.real.shape[1]
        # Counts are whole numbers: the fraction only orders equal ones, the newer first.
        newer = torch.arange(tokens, device=seen.counts.device, dtype=torch.float64) / tokens
        kept = top(newer - seen.counts.double(), context.real[:, None] & ~recent, budget - recent_tokens)
        return fixed(context, recent | kept)
