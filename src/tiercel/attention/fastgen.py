"""FastGen: each head gets the cheapest rule that keeps most of the attention it paid in the prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.attention.policy import Fixed, LayerContext, Observer, Prefill, fixed, newest, real_tokens, top


class LocalAndFar:
    """A token's attention from queries within its local window, and from those beyond it.

    sums   [batch, kv_heads, tokens]: over all queries
    far    the same, only of queries that have it outside their last `local` tokens
    local  [batch, kv_heads]: what all queries paid inside their window
    """

    def __init__(self, prefill: Prefill) -> None:
        self._place = prefill.real.cumsum(-1)
        self._local = prefill.budget // 2
        batch, tokens = prefill.real.shape
        shape = (batch, prefill.kv_heads, tokens)
        self.sums, self.far = (torch.zeros(shape, device=prefill.real.device) for _ in range(2))
        self.local = torch.zeros(shape[:2], device=prefill.real.device)

    def see(self, weights: Tensor, first: int) -> None:
        mean = weights.mean(2)
        seen = self._place[:, first : first + weights.shape[3]]
        tokens = weights.shape[-1]
        distance = seen[:, None, :, None] - self._place[:, None, None, :tokens]  # 0: itself
        inside = distance < self._local[..., None, None]
        self.sums[..., :tokens] += mean.sum(2)
        self.far[..., :tokens] += (mean * ~inside).sum(2)
        self.local += (mean * inside).sum((2, 3))


@dataclass(frozen=True, slots=True)
class FastGen:
    """Per KV head the first of these that recovers `threshold` of the prompt's attention; drops the rest:

    1. special tokens (always the first token)   2. and punctuation   3. and the heaviest tokens
    4. and a local window   5. everything

    The heaviest and the window get half the budget each, so a head of kind 4 may keep more than the budget by
    its special tokens and punctuation, and one of kind 5 keeps all: the share kept is measured, not set.
    Recovered is the mean over the prompt's queries of the attention (averaged over query heads) that a rule
    would leave. Original positions. Source: arXiv 2310.01801, section 3 (hybrid policies, profiled once on
    the prompt).
    """

    threshold: float = 0.95
    name: str = "fastgen"
    drops: bool = True

    def observer(self, prefill: Prefill) -> LocalAndFar:
        return LocalAndFar(prefill)

    def watches(self, tokens: int) -> int:
        return tokens

    def prepare(self, context: LayerContext, budget: Tensor, seen: Observer | None) -> Fixed:
        if not isinstance(seen, LocalAndFar):
            raise TypeError("FastGen needs the prompt's attention")
        real = context.real[:, None]
        queries = real_tokens(context.real)[:, None]
        none = torch.zeros_like(context.real)
        special = (none if context.special is None else context.special)[:, None] | oldest_one(context.real)
        special = (special & real).expand(context.heads_shape)
        marks = special | ((none if context.punctuation is None else context.punctuation)[:, None] & real)
        heavy = marks | top(seen.sums, real & ~marks, budget - budget // 2)
        local = heavy | newest(context.real, budget // 2)
        full = real.expand(context.heads_shape)
        kept = full
        # From the dearest to the cheapest: the cheapest that recovers enough has the last word.
        recovered = (seen.local + (seen.far * heavy).sum(-1)) / queries
        kept = torch.where((recovered >= self.threshold)[..., None], local, kept)
        for rule in (heavy, marks, special):
            recovered = (seen.sums * rule).sum(-1) / queries
            kept = torch.where((recovered >= self.threshold)[..., None], rule, kept)
        return fixed(context, kept)


def oldest_one(real: Tensor) -> Tensor:
    """The first real token of each row: bool [batch, 1, tokens]."""
    return ((real.cumsum(-1) == 1) & real)[:, None]
