"""Grouped attention gives what transformers' own does, and leaves to it what it does not understand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tiercel.engines.transformers import attention

KV_HEADS, DIM = 2, 16


def tensors(new: int, held: int, groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(new * 1000 + held)
    total = new + held
    return (
        torch.randn(1, KV_HEADS * groups, new, DIM),
        torch.randn(1, KV_HEADS, total, DIM),
        torch.randn(1, KV_HEADS, total, DIM),
    )


def causal(new: int, held: int, window: int | None = None) -> torch.Tensor:
    rows = torch.arange(held, held + new)[:, None]
    columns = torch.arange(held + new)[None, :]
    seen = columns <= rows
    if window is not None:
        seen &= columns > rows - window
    return seen[None, None]


@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize(
    ("new", "held", "window"), [(1, 0, None), (1, 40, None), (7, 33, None), (7, 33, 5), (32, 1, 9)]
)
def test_equals_the_repeating_form(new: int, held: int, window: int | None, groups: int) -> None:
    query, key, value = tensors(new, held, groups)
    module: Any = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    mask = causal(new, held, window)
    ours, weights = attention.grouped_attention(module, query, key, value, mask, scaling=0.3)
    theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    assert weights is None
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    # A mask that were ignored would not go unnoticed.
    if new > 1:
        unmasked, _ = attention.grouped_attention(
            module, query, key, value, torch.ones_like(mask), scaling=0.3
        )
        assert not torch.allclose(unmasked, ours, atol=1e-3)


def test_one_token_without_a_mask_sees_everything() -> None:
    query, key, value = tensors(1, 20, 3)
    module: Any = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    ours, _ = attention.grouped_attention(module, query, key, value, None)
    theirs, _ = sdpa_attention_forward(module, query, key, value, None)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_several_tokens_without_a_mask_stay_causal() -> None:
    query, key, value = tensors(9, 0, 3)
    module: Any = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    ours, _ = attention.grouped_attention(module, query, key, value, None)
    masked, _ = attention.grouped_attention(module, query, key, value, causal(9, 0))
    torch.testing.assert_close(ours, masked, rtol=1e-5, atol=1e-5)


def test_the_mask_is_stacked_once_per_step() -> None:
    mask = causal(4, 6)
    first = attention._stacked_mask(mask, 3, torch.float32)
    assert attention._stacked_mask(mask, 3, torch.float32) is first
    assert first.shape == (1, 1, 12, 10)
    assert attention._stacked_mask(causal(4, 6), 3, torch.float32) is not first


def test_an_argument_it_does_not_know_goes_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def record(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        seen.append(kwargs)
        return torch.zeros(1), None

    monkeypatch.setattr(attention, "sdpa_attention_forward", record)
    query, key, value = tensors(3, 2, 3)
    module: Any = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    attention.grouped_attention(module, query, key, value, causal(3, 2), position_bias=torch.zeros(1))
    assert seen
    seen.clear()
    attention.grouped_attention(module, query, key, value, causal(3, 2), position_ids=torch.zeros(1))
    assert not seen
