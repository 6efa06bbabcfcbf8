"""Exact attention for grouped-query models that does not copy the KV for every query head.

With a mask, transformers' `sdpa` repeats keys and values once per query head in a group, for every layer
and step. Here the query heads of a group are stacked along the query axis instead
(`[1, kv_heads, group * new, dim]`), so each key is read where it lies; the arithmetic per query is the same.
Measured on one CPU core at 5,888 tokens of context, 9 query and 3 KV heads, bf16: 256 new tokens 98 -> 41 ms
per layer, one new token 5.5 -> 0.55 ms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "tiercel_grouped_sdpa"
# What transformers passes beside the usual; anything else (sinks, biases) is left to its own function.
_UNDERSTOOD = {"position_ids", "cache_position", "sliding_window", "use_cache", "output_attentions"}


def use_grouped_attention(module: Any) -> None:
    """Let a loaded model that runs transformers' `sdpa` use the grouped form where it applies."""
    if module.config._attn_implementation == "sdpa":
        module.set_attn_implementation(GROUPED)


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend [1, heads, new, dim] to [1, kv_heads, all, dim]; returns [1, new, heads, dim] and no weights."""
    groups = int(getattr(module, "num_key_value_groups", 1))
    new = query.shape[2]
    odd = (
        dropout
        or query.shape[0] != 1
        or any(kwargs[name] is not None for name in kwargs.keys() - _UNDERSTOOD)
    )
    # Without a mask several new tokens are causal among themselves, which stacked rows cannot express.
    if groups == 1 or odd or (attention_mask is None and new > 1):
        attended: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
        return attended
    kv_heads = key.shape[1]
    stacked = query.reshape(1, kv_heads, groups * new, query.shape[3])
    mask = None if attention_mask is None else _stacked_mask(attention_mask, groups, query.dtype)
    output = scaled_dot_product_attention(stacked, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(1, kv_heads * groups, new, value.shape[3]).transpose(1, 2).contiguous(), None


def _stacked_mask(mask: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """The mask [1, 1, new, all] repeated for each query head of a group and made additive, once a step.

    The kernel would turn a boolean one into numbers itself, for every layer anew.
    """
    stacked: torch.Tensor | None = getattr(mask, "_tiercel_stacked", None)
    if stacked is None:
        if mask.dtype == torch.bool:
            numbers = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
        else:
            numbers = mask
        stacked = numbers.expand(1, groups, *mask.shape[2:]).reshape(1, 1, groups * mask.shape[2], -1)
        mask._tiercel_stacked = stacked  # type: ignore[attr-defined]  # lives and dies with the step's mask
    return stacked


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
