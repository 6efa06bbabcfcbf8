"""What a transformers model calls for attention when its cache is an offloaded one.

No mask function bears this name, so transformers builds no mask: causality and windows are ours, by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from tiercel.engines.transformers.offload.cache import MARK, OffloadedCache, OffloadedLayer
from tiercel.engines.transformers.offload.lying import Row, attended
from tiercel.engines.transformers.offload.partial import Asking, sunk
from tiercel.engines.transformers.rows import MARK as ROWS_MARK
from tiercel.engines.transformers.rows import Attention, RowsLayer
from tiercel.errors import ModelError

NAME = "tiercel_offloaded"
# What a model passes beside the usual, and that we need not do.
_UNDERSTOOD = {
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_router_logits",
    "is_causal",
}


class OffloadedRows(RowsLayer):  # type: ignore[no-untyped-call]  # transformers has no types
    """Layer `number` of several sequences, that attend as one: what is moved is moved for all at once."""

    def __init__(self, caches: Sequence[OffloadedCache], number: int) -> None:
        self._caches = caches
        layers = [cache.layer(number) for cache in caches]
        super().__init__(layers, layers[0].window)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Give each sequence its row of [rows, kv_heads, 1, dim]; returns them as they are, marked."""
        self._pairs = list(zip(key_states, value_states, strict=True))
        for layer, (keys, values) in zip(self._layers, self._pairs, strict=True):
            layer.append(keys, values)
        if self._layers[0].number == 0:
            self._caches[0].shared.begin(self._caches, key_states.shape[-2])
        setattr(key_states, ROWS_MARK, self)
        return key_states, value_states

    def attend(self, attention: Attention, module: torch.nn.Module, query: Tensor, **how: Any) -> Tensor:
        """Attend [rows, heads, 1, dim]; gives [rows, 1, heads, dim]. Raises ModelError as alone."""
        rows = [
            _row(module, layer, asked, keys, values, **how)
            for layer, asked, (keys, values) in zip(self._layers, query, self._pairs, strict=True)
        ]
        return _output(rows, query, how.get("s_aux"))


def offloaded_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **how: Any,
) -> tuple[Tensor, None]:
    """Attend [1, heads, new, dim] to the cache of `key` [1, kv_heads, new, dim]; gives [1, new, heads, dim].

    `s_aux` [heads] are scores of sinks. Raises ModelError for a kind of attention that is not known.
    """
    layer = getattr(key, MARK, None)
    if not isinstance(layer, OffloadedLayer) or attention_mask is not None:
        raise ModelError(f"{type(module).__name__} attends to more than KV as it is")
    return _output([_row(module, layer, query[0], key[0], value[0], **how)], query, how.get("s_aux")), None


def _row(
    module: torch.nn.Module,
    layer: OffloadedLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> Row:
    """What one sequence asks: `query` [heads, new, dim], `key` and `value` [kv_heads, new, dim]."""
    odd = sorted(name for name in kwargs.keys() - _UNDERSTOOD if kwargs[name] is not None)
    if dropout:
        odd.append("more than KV as it is")
    if sliding_window != layer.window:
        odd.append(f"a window of {sliding_window} tokens where {layer.window} are kept")
    if odd:
        raise ModelError(f"{type(module).__name__} attends to {', '.join(odd)}")
    new, dim = query.shape[1:]
    asking = Asking(
        rows=query.reshape(key.shape[0], -1, dim),
        first=layer.length - new,
        new=new,
        scale=dim**-0.5 if scaling is None else scaling,
        softcap=softcap,
        window=sliding_window,
    )
    return Row(layer.cache, layer.number, asking, key, value)


def _output(rows: Sequence[Row], query: Tensor, sinks: Tensor | None) -> Tensor:
    """What all rows attend to, [rows, new, heads, dim]."""
    heads, new = query.shape[1:3]
    parts = attended(rows, streamed=rows[0].cache.shared.streams(new))
    if sinks is not None:
        parts = [sunk(part, sinks, new) for part in parts]
    outputs = torch.stack([part.result() for part in parts]).to(query.dtype)
    return outputs.view(len(rows), heads, new, -1).transpose(1, 2).contiguous()


AttentionInterface.register(NAME, offloaded_attention)
