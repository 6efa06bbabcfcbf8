"""What a policy that fetches keeps of all keys on the device, to tell which tokens a query needs.

The same digest chooses whether an answer is judged or generated. Each is small tensors and a score; none
keeps the keys it was made of, but `Keys`, which is the yardstick. `place` puts a tensor where it shall stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from tiercel.attention.higgs import Higgs, Packed
from tiercel.attention.numbers import products
from tiercel.attention.policy import LayerContext, group_scores

Place = Callable[[Tensor], Tensor]


class Digest(Protocol):
    """Scores tokens of one layer's context."""

    def score(self, queries: Tensor) -> Tensor:
        """Queries [batch, kv_heads, group, new, dim], post-RoPE -> [batch, kv_heads, new, tokens], higher is
        better.
        """
        ...

    def placed(self, place: Place) -> Self:
        """The same on other memory."""
        ...


@dataclass(frozen=True, slots=True)
class Landmarks:
    """Every key in a few bits: the share of attention that it would get."""

    codec: Higgs
    packed: Packed
    real: Tensor

    @classmethod
    def of(cls, context: LayerContext, codec: Higgs) -> Self:
        """Code the keys of a context."""
        return cls(codec, codec.pack(context.keys), context.real)

    def score(self, queries: Tensor) -> Tensor:
        """The largest log-share of attention over the query heads of a KV head."""
        logits = self.codec.products(queries, self.packed) * self.packed.dim**-0.5
        return group_scores(logits, self.real[:, None, None, None])

    def placed(self, place: Place) -> Self:
        """The same on other memory."""
        codes, lengths = (place(one) for one in self.packed.tensors())
        return replace(self, packed=Packed(codes, lengths, self.packed.dim), real=self.real.to(codes.device))


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys themselves: what they would get, exactly."""

    keys: Tensor
    real: Tensor

    def score(self, queries: Tensor) -> Tensor:
        """The largest log-share of attention over the query heads of a KV head."""
        logits = products(queries, self.keys) * self.keys.shape[-1] ** -0.5
        return group_scores(logits, self.real[:, None, None, None])

    def placed(self, place: Place) -> Self:
        """The same on other memory."""
        keys = place(self.keys)
        return replace(self, keys=keys, real=self.real.to(keys.device))


@dataclass(frozen=True, slots=True)
class Bounds:
    """Pages of `page` tokens by the smallest and largest value of their keys in each dimension, in the keys'
    dtype: [batch, kv_heads, pages, dim]. Padding is in no page's bounds.
    """

    low: Tensor
    high: Tensor
    page: int
    real: Tensor

    @classmethod
    def of(cls, context: LayerContext, page: int) -> Self:
        """Bound the keys of a context."""
        keys = context.keys
        batch, kv_heads, _, dim = keys.shape
        page_of, _ = _pages(context.real, page)
        at = page_of[:, None, :, None].expand(keys.shape)
        padding = ~context.real[:, None, :, None]
        empty = keys.new_zeros(batch, kv_heads, int(page_of.max()) + 1, dim)
        low = empty.scatter_reduce(2, at, keys.masked_fill(padding, torch.inf), "amin", include_self=False)
        high = empty.scatter_reduce(2, at, keys.masked_fill(padding, -torch.inf), "amax", include_self=False)
        return cls(low, high, page, context.real)

    @property
    def filled(self) -> Tensor:
        """Which pages hold tokens: bool [batch, pages]."""
        page_of, _ = _pages(self.real, self.page)
        return torch.arange(self.low.shape[2], device=self.low.device) <= page_of.amax(-1)[:, None]

    def score(self, queries: Tensor) -> Tensor:
        """Pages by sum_d max(q_d * low_d, q_d * high_d), the largest of a KV head's queries, best first.

        In a page from its beginning.
        """
        q = queries.float()
        bound = products(q.clamp(min=0), self.high) + products(q.clamp(max=0), self.low)
        # Not as shares of attention: how loose the bounds are differs between heads, and shares by far more.
        pages = bound.masked_fill(~self.filled[:, None, None, None], -torch.inf).amax(2)
        rank = pages.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        page_of, offset = _pages(self.real, self.page)
        rank = rank.gather(-1, page_of[:, None, None].expand(*rank.shape[:-1], page_of.shape[-1]))
        return -(rank * self.page + offset[:, None, None]).float()

    def placed(self, place: Place) -> Self:
        """The same on other memory."""
        low, high = place(self.low), place(self.high)
        return replace(self, low=low, high=high, real=self.real.to(low.device))


def _pages(real: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Each token's page and its place there, both [batch, tokens]; padding is at the first place."""
    place = (real.cumsum(-1) - 1).clamp(min=0)
    return place // page, place % page
