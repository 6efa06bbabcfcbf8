"""Attention over one part of the tokens at a time, and the exact result of all parts put together.

Parts add up to the softmax over all when each keeps its largest score and the sum of its weights:
"online softmax", Milakov and Gimelshein, arXiv 1805.02867, as in FlashAttention (arXiv 2205.14135). Sums are
kept in float32, whatever the dtype of keys and values. It knows no model, no cache and no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

# Below every real score and still a number: rows that see nothing of a part weigh nothing in the end.
_LOWEST = -1e30


@dataclass(frozen=True, slots=True)
class Asking:
    """Queries of `new` tokens that stand at `first` and after, one row per query head of a group and token.

    `rows` [kv_heads, group * new, dim]. `window`: each sees itself and the `window - 1` tokens before (None:
    all before).
    """

    rows: Tensor
    first: int
    new: int
    scale: float
    softcap: float | None = None
    window: int | None = None

    @property
    def seen_from(self) -> int:
        """The first token that any of them sees."""
        return 0 if self.window is None else max(0, self.first - self.window + 1)


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention over a part: `total` [kv_heads, rows, value_dim] is the sum of weighted values, `weight` of
    the weights exp(score - `peak`), with the largest score as `peak`; both [kv_heads, rows, 1], all float32.
    """

    total: Tensor
    weight: Tensor
    peak: Tensor

    def result(self) -> Tensor:
        """The attention, when all parts are in."""
        return self.total / self.weight


def attend(asking: Asking, keys: Tensor, values: Tensor, start: int) -> Partial:
    """Attend to `keys` and `values` [kv_heads, tokens, dim] of the tokens from `start` on."""
    scores = _product(asking.rows, keys.mT).mul_(asking.scale)
    if asking.softcap is not None:
        scores.div_(asking.softcap).tanh_().mul_(asking.softcap)
    hidden = _hidden(asking, start, start + keys.shape[1], scores.device)
    if hidden is not None:
        scores.view(scores.shape[0], -1, *hidden.shape).add_(hidden)
    peak = scores.amax(-1, keepdim=True)
    if hidden is not None:
        peak = peak.clamp_(min=_LOWEST)
    weights = scores.sub_(peak).exp_()
    return Partial(_product(weights.to(values.dtype), values), weights.sum(-1, keepdim=True), peak)


def merged(one: Partial | None, other: Partial) -> Partial:
    """Attention over the parts of both (None: of none)."""
    if one is None:
        return other
    peak = torch.maximum(one.peak, other.peak)
    here, there = (one.peak - peak).exp_(), (other.peak - peak).exp_()
    return Partial(one.total * here + other.total * there, one.weight * here + other.weight * there, peak)


def sunk(one: Partial, sinks: Tensor, new: int) -> Partial:
    """`one` with a score per query head, `sinks` [heads], that takes weight and gives nothing."""
    peak = sinks.float().view(one.peak.shape[0], -1, 1).expand(-1, -1, new).reshape(one.peak.shape)
    return merged(one, Partial(torch.zeros_like(one.total), torch.ones_like(peak), peak))


def _hidden(asking: Asking, start: int, stop: int, device: torch.device) -> Tensor | None:
    """What to add to the scores of tokens `start..stop-1`: [new, tokens]; None where all is seen."""
    last, window = asking.first + asking.new - 1, asking.window
    if stop - 1 <= asking.first and (window is None or last - start < window):
        return None
    return _bias(asking.new, start - asking.first, stop - asking.first, window, device)


@lru_cache(maxsize=8)
def _bias(new: int, start: int, stop: int, window: int | None, device: torch.device) -> Tensor:
    """0 where query i of `new` sees the token at `start` and after, else -inf. The same for all layers."""
    back = torch.arange(new, device=device)[:, None] - torch.arange(start, stop, device=device)[None]
    seen = back >= 0 if window is None else (back >= 0) & (back < window)
    return torch.zeros(seen.shape, device=device).masked_fill_(~seen, -torch.inf)


def _product(one: Tensor, other: Tensor) -> Tensor:
    """The batched matrix product in float32."""
    if one.dtype == torch.float32:
        return one @ other
    if one.is_cuda:
        return torch.bmm(one, other, out_dtype=torch.float32)
    return (one @ other).float()
