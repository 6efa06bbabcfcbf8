"""Quest: pages chosen by an upper bound of their keys' attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tiercel.attention.digest import Bounds
from tiercel.attention.policy import Blind, Fixed, LayerContext, Observer, fixed
from tiercel.attention.reading import RECENT_TOKENS, Reading, offloaded, split_budget


@dataclass(frozen=True, slots=True)
class Quest(Blind):
    """Reads whole pages of `page` tokens, best first, until the budget is used up; only skips, drops nothing.

    A page is known by the smallest and the largest value of its keys in each dimension; its score for a query
    is sum_d max(q_d * min_d, q_d * max_d), which no key in it can exceed. Query heads of one KV head choose
    together (the largest of their scores). The page that no longer fits is read from its
    beginning as far as the budget goes. `dense_layers`: first layers that read everything (the paper: 2; here
    0, so that all methods have the same budget). Original positions. Source: arXiv 2406.10774, section 3.
    """

    page: int = 16
    recent: int = RECENT_TOKENS
    dense_layers: int = 0
    name: str = "quest"
    drops: bool = False

    def prepare(self, context: LayerContext, budget: Tensor, seen: Observer | None) -> Reading | Fixed:
        if context.layer < self.dense_layers:
            return fixed(context, context.real[:, None].expand(context.heads_shape))
        recent, rest, count = split_budget(context, budget, self.recent)
        bounds = Bounds.of(context, self.page)
        kv_heads, dim = context.keys.shape[1], context.keys.shape[-1]
        index = 2.0 * float(bounds.filled.sum()) * kv_heads * dim * context.keys.element_size()
        return Reading(
            context.keys, context.values, recent, rest, count, bounds,
            offloaded(context, budget, recent, index, 1.0),
        )  # fmt: skip
