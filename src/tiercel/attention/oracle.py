"""The best that a choice of tokens per query can do: by the exact attention. A yardstick, not a method."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tiercel.attention.numbers import products
from tiercel.attention.policy import Blind, LayerContext, Observer, group_scores
from tiercel.attention.reading import RECENT_TOKENS, Reading, offloaded, split_budget


@dataclass(frozen=True, slots=True)
class Oracle(Blind):
    """Per query and KV head the tokens with the most attention (largest share over the head's queries).

    Only skips. It needs every key on the device to choose, so it saves less than it seems to.
    """

    recent: int = RECENT_TOKENS
    name: str = "oracle"
    drops: bool = False

    def prepare(self, context: LayerContext, budget: Tensor, seen: Observer | None) -> Reading:
        recent, rest, count = split_budget(context, budget, self.recent)
        real = context.real[:, None, None, None]
        index = float(context.real.sum()) * context.keys.shape[1] * context.keys.shape[-1]
        index *= context.keys.element_size()

        def score(queries: Tensor) -> Tensor:
            logits = products(queries, context.keys) * context.keys.shape[-1] ** -0.5
            return group_scores(logits, real)

        return Reading(
            context.keys, context.values, recent, rest, count, score,
            offloaded(context, budget, recent, index, 1.0),
        )  # fmt: skip
