"""Every family: the engine answers as transformers' own generate, and a restored prefix changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tiercel.engines.transformers import Request, Result, TransformersEngine

# GPT-BigCode's module still compiles a helper by a call that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
BLOCK = 16
FAMILIES = [
    "llama", "qwen3", "mistral-window", "gemma3", "gpt2", "gpt-neox", "falcon-mqa", "gpt-bigcode", "gpt-oss",
    "deepseek-v3",
]  # fmt: skip


def answer(engine: TransformersEngine, tokens: list[int], **more: Any) -> Result:
    *_, last = engine.generate(Request(tokens, **more))
    assert isinstance(last, Result)
    return last


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_as_generate_does(
    family: str, tiny_model: Callable[..., Path], prompt: Callable[..., list[int]], fake_store: Any
) -> None:
    folder = tiny_model(family)
    engine = TransformersEngine(folder, fake_store, dtype="float32", device="cpu", block_tokens=BLOCK)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = prompt(75)
    expected = reference.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, 75, dtype=torch.long),
        max_new_tokens=40,
        do_sample=False,
    )[0, 75:].tolist()

    cold = answer(engine, tokens, max_new_tokens=40)
    warm = answer(engine, tokens, max_new_tokens=40)

    assert list(cold.tokens) == expected
    assert list(warm.tokens) == expected
    assert (cold.reused_tokens, warm.reused_tokens) == (0, 64)
    assert len(set(expected)) > 3, "a model that repeats itself proves little"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_restored_logits_equal_recomputed_ones_bit_for_bit(
    family: str,
    dtype: str,
    tiny_model: Callable[..., Path],
    prompt: Callable[..., list[int]],
    fake_store: Any,
) -> None:
    engine = TransformersEngine(tiny_model(family), fake_store, dtype=dtype, device="cpu", block_tokens=BLOCK)
    tokens = prompt(75)
    engine.prefill_logits(tokens)

    restored = engine.prefill_logits(tokens)
    recomputed = engine.prefill_logits(tokens, use_cache=False)

    assert restored.reused_tokens == 64
    assert recomputed.reused_tokens == 0
    assert torch.equal(restored.logits, recomputed.logits)
