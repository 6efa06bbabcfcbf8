"""The best that a choice of tokens per query can do: by the exact attention. A yardstick, not a method."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tiercel.attention.digest import Keys
from tiercel.attention.policy import Blind, LayerContext, Observer
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
        index = float(context.real.sum()) * context.keys.shape[1] * context.keys.shape[-1]
        index *= context.keys.element_size()
        return Reading(
            context.keys, context.values, recent, rest, count, Keys(context.keys, context.real),
            offloaded(context, budget, recent, index, 1.0),
        )  # fmt: skip
