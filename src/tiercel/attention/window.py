"""Policies that look only at positions: full attention, a sliding window, and StreamingLLM's sinks.

The window is that of the end of the prefill: tokens after it are added, none slides out while an answer of a
few hundred tokens is judged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.attention.policy import (
    Blind,
    Bytes,
    Fixed,
    LayerContext,
    Observer,
    fixed,
    newest,
    oldest,
    real_tokens,
    token_bytes,
)
from tiercel.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Full(Blind):
    """Attention over everything: exact, the reference. Drops nothing; takes no notice of the budget."""

    name: str = "full"
    drops: bool = False

    def prepare(self, context: LayerContext, budget: Tensor, seen: Observer | None) -> Fixed:
        every = context.real[:, None].expand(context.heads_shape)
        return fixed(context, every)


@dataclass(frozen=True, slots=True)
class SlidingWindow(Blind):
    """The last `budget` tokens; drops all others, the first ones too. Original positions.

    Source: the local attention of Longformer (arXiv 2004.05150) and Mistral 7B (arXiv 2310.06825, section 2),
    here put upon a model that was not trained with it.
    """

    name: str = "window"
    drops: bool = True

    def prepare(self, context: LayerContext, budget: Tensor, seen: Observer | None) -> Fixed:
        return fixed(context, newest(context.real, budget))


@dataclass(frozen=True, slots=True)
class Streaming(Blind):
    """StreamingLLM: the first `sinks` tokens and the last `budget - sinks`; drops what is between.

    `rerotate`: positions are those inside the cache, as in the paper, which matters beyond the length a model
    was trained with: the sinks' keys are moved next to the window, whose own distances to the queries stay.
    Without it every key keeps its original position. Source: arXiv 2309.17453, section 3.
    """

    sinks: int = 4
    rerotate: bool = False
    name: str = "streaming"
    drops: bool = True

    def prepare(self, context: LayerContext, budget: Tensor, seen: Observer | None) -> Fixed:
        first = oldest(context.real, budget.clamp(max=self.sinks))
        last = newest(context.real, (budget - self.sinks).clamp(min=0))
        keep = first | last
        keys = self._moved(context, first, keep) if self.rerotate else context.keys
        return Fixed(keys, context.values, keep, Bytes(device=float(keep.sum()) * token_bytes(context)))

    def _moved(self, context: LayerContext, first: Tensor, keep: Tensor) -> Tensor:
        """Sinks moved on by the number of tokens that are gone."""
        if context.rotate is None:
            raise ConfigError(
                "policy streaming-rerotated: this model's position encoding cannot be re-rotated; accepted: "
                "streaming, which keeps original positions"
            )
        gone = real_tokens(context.real)[:, None] - keep.sum(-1)
        return torch.where(first[..., None], context.rotate(context.keys, gone), context.keys)
