"""Attention written out: which queries see which tokens, weights in float32, never a NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Scores of this many queries at a time: bounds what a long prompt needs.
QUERIES_AT_ONCE = 256


def grouped(queries: Tensor, kv_heads: int) -> Tensor:
    """[batch, heads, new, dim] as [batch, kv_heads, group, new, dim]."""
    batch, heads, new, dim = queries.shape
    return queries.reshape(batch, kv_heads, heads // kv_heads, new, dim)


def attention_weights(
    queries: Tensor, keys: Tensor, bias: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """Softmax of scores and `bias`, in float32: [batch, kv_heads, group, new, tokens].

    `queries` [batch, kv_heads, group, new, dim], `keys` [batch, kv_heads, tokens, dim], `bias` float32, 0 or
    -inf, [batch or 1, kv_heads or 1, 1, new or 1, tokens]; every query must see something.
    """
    scores = products(queries.float() * scale, keys)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return scores.add_(bias).softmax(-1)


def products(queries: Tensor, keys: Tensor) -> Tensor:
    """q·k in float32: [batch, kv_heads, group, new, dim] with [batch, kv_heads, n, dim] gives [..., new, n].

    The query heads of a group are further rows, so keys are not copied per query head.
    """
    batch, kv_heads, group, new, dim = queries.shape
    rows = queries.float().reshape(batch, kv_heads, group * new, dim)
    return (rows @ keys.float().mT).view(batch, kv_heads, group, new, keys.shape[2])


def attend(weights: Tensor, values: Tensor) -> Tensor:
    """Weights [batch, kv_heads, group, new, tokens] times values [batch, kv_heads, tokens, dim].

    Returns [batch, new, heads, dim] in the values' dtype.
    """
    batch, kv_heads, group, new, tokens = weights.shape
    out = weights.view(batch, kv_heads, group * new, tokens) @ values.float()
    out = out.to(values.dtype).view(batch, kv_heads * group, new, values.shape[-1])
    return out.transpose(1, 2).contiguous()


def column_sums(weights: Tensor, rows: Tensor | None = None) -> Tensor:
    """What each token got: the sum over queries and the heads of a group, [batch, kv_heads, tokens].

    `rows` [batch, new]: how much each query counts. As a product with a row of ones, which is several times
    faster than a sum over outer dimensions.
    """
    batch, kv_heads, group, new, tokens = weights.shape
    ones = weights.new_ones(1, 1, 1, 1) if rows is None else rows.to(weights.dtype)[:, None, None]
    counted = ones.expand(batch, 1, group, new).reshape(batch, 1, 1, group * new).expand(-1, kv_heads, -1, -1)
    return (counted @ weights.view(batch, kv_heads, group * new, tokens)).squeeze(2)


def as_bias(allowed: Tensor) -> Tensor:
    """Zero where allowed, else minus infinity."""
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill_(~allowed, -torch.inf)


def causal(first: int, new: int, tokens: int, window: int | None, device: torch.device) -> Tensor:
    """bool [new, tokens]: query i stands at `first + i`; with `window`, it sees only the last so many."""
    at = torch.arange(first, first + new, device=device)[:, None]
    other = torch.arange(tokens, device=device)[None]
    seen = other <= at
    return seen if window is None else seen & (at - other < window)


def attend_parts(
    query: Tensor, parts: Sequence[tuple[Tensor, Tensor]], scale: float, softcap: float | None = None
) -> Tensor:
    """One new token's attention over keys and values that lie in several places, all of which it may see.

    `query` [1, kv_heads, group, 1, dim]; each part keys and values [kv_heads, n, dim]. Returns [1, 1, heads,
    value_dim] in the values' dtype. The same arithmetic as `attention_weights` and `attend`.
    """
    scores = torch.cat([products(query.float() * scale, keys[None]) for keys, _ in parts], -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = scores.softmax(-1)[0, :, :, 0]  # [kv_heads, group, n of all parts]
    each = torch.split(weights, [keys.shape[1] for keys, _ in parts], -1)
    first, *others = [some @ values.float() for some, (_, values) in zip(each, parts, strict=True)]
    out = torch.stack([first, *others]).sum(0).to(parts[0][1].dtype)
    return out.reshape(1, 1, -1, out.shape[-1])
