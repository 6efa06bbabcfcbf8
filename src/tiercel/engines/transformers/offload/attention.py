"""What a transformers model calls for attention when its cache is an offloaded one.

No mask function bears this name, so transformers builds no mask: causality and windows are ours, by position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from tiercel.engines.transformers.offload.cache import MARK, OffloadedLayer
from tiercel.engines.transformers.offload.partial import Asking, sunk
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


def offloaded_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend [1, heads, new, dim] to the cache of `key` [1, kv_heads, new, dim]; gives [1, new, heads, dim].

    `s_aux` [heads] are scores of sinks. Raises ModelError for a kind of attention that is not known.
    """
    layer = getattr(key, MARK, None)
    odd = sorted(name for name in kwargs.keys() - _UNDERSTOOD if kwargs[name] is not None)
    if not isinstance(layer, OffloadedLayer) or dropout or attention_mask is not None:
        odd.append("more than KV as it is")
    elif sliding_window != layer.window:
        odd.append(f"a window of {sliding_window} tokens where {layer.window} are kept")
    if odd or not isinstance(layer, OffloadedLayer):
        raise ModelError(f"{type(module).__name__} attends to {', '.join(odd)}")
    heads, new, dim = query.shape[1:]
    asking = Asking(
        rows=query.reshape(key.shape[1], -1, dim),
        first=layer.length - new,
        new=new,
        scale=dim**-0.5 if scaling is None else scaling,
        softcap=softcap,
        window=sliding_window,
    )
    attended = layer.attend(asking, key[0], value[0])
    if s_aux is not None:
        attended = sunk(attended, s_aux, new)
    output = attended.result().to(query.dtype).view(1, heads, new, -1)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, offloaded_attention)
