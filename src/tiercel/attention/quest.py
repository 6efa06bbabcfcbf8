"""Quest: pages chosen by an upper bound of their keys' attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.attention.numbers import products
from tiercel.attention.policy import Blind, Fixed, LayerContext, Observer, fixed, group_scores
from tiercel.attention.reading import RECENT_TOKENS, Reading, offloaded, split_budget


@dataclass(frozen=True, slots=True)
class Quest(Blind):
    """Reads whole pages of `page` tokens, best first, until the budget is used up; only skips, drops nothing.

    A page is known by the smallest and the largest value of its keys in each dimension; its score for a query
    is sum_d max(q_d * min_d, q_d * max_d), which no key in it can exceed. Query heads of one KV head choose
    together (the largest log-softmax of their scores). The page that no longer fits is read from its
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
        place = (context.real.cumsum(-1) - 1).clamp(min=0)
        page_of, offset = place // self.page, place % self.page
        low, high, filled = _bounds(context, page_of)
        index = 2.0 * float(filled.sum()) * low.shape[1] * low.shape[-1] * context.keys.element_size()

        def score(queries: Tensor) -> Tensor:
            q = queries.float()
            bound = products(q.clamp(min=0), high) + products(q.clamp(max=0), low)
            pages = group_scores(bound * low.shape[-1] ** -0.5, filled[:, None, None, None])
            rank = pages.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
            shape = (*rank.shape[:-1], page_of.shape[-1])
            rank = rank.gather(-1, page_of[:, None, None].expand(shape))
            return -(rank * self.page + offset[:, None, None]).float()

        return Reading(
            context.keys, context.values, recent, rest, count, score,
            offloaded(context, budget, recent, index, 1.0),
        )  # fmt: skip


def _bounds(context: LayerContext, page_of: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Smallest and largest key values per page [batch, kv_heads, pages, dim], and which pages hold tokens."""
    keys = context.keys.float()
    batch, kv_heads, _, dim = keys.shape
    pages = int(page_of.max()) + 1
    at = page_of[:, None, :, None].expand(keys.shape)
    padding = ~context.real[:, None, :, None]
    empty = torch.zeros(batch, kv_heads, pages, dim, device=keys.device)
    low = empty.scatter_reduce(2, at, keys.masked_fill(padding, torch.inf), "amin", include_self=False)
    high = empty.scatter_reduce(2, at, keys.masked_fill(padding, -torch.inf), "amax", include_self=False)
    filled = torch.arange(pages, device=keys.device) <= page_of.amax(-1)[:, None]
    return low, high, filled
