"""The same promises on a real model: real text, real answers, in fp32 and bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tiercel.engines.transformers import Request, Result, TransformersEngine
from tiercel.errors import RequestError

pytestmark = pytest.mark.model
BLOCK = 64
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()


def answer(engine: TransformersEngine, tokens: list[int], **more: Any) -> Result:
    *_, last = engine.generate(Request(tokens, **more))
    assert isinstance(last, Result)
    return last


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, model_dir: Path) -> TransformersEngine:
    return TransformersEngine(model_dir, None, dtype=request.param, device="cpu", block_tokens=BLOCK)


@pytest.fixture
def cached(engine: TransformersEngine, fake_store: Any) -> TransformersEngine:
    """The same loaded model with a store of its own."""
    other = object.__new__(TransformersEngine)
    other.__dict__.update(engine.__dict__)
    other.attach(fake_store)
    return other


def test_logits_after_a_restore_equal_a_recompute(
    engine: TransformersEngine, cached: TransformersEngine
) -> None:
    tokens = engine.encode(TEXT)[:500]
    recomputed = engine.prefill_logits(tokens)
    stored = cached.prefill_logits(tokens)
    restored = cached.prefill_logits(tokens)
    assert (stored.reused_tokens, restored.reused_tokens) == (0, 448)
    assert torch.equal(restored.logits, recomputed.logits)
    assert torch.equal(stored.logits, recomputed.logits)


def test_fp32_is_close_to_a_prefill_in_one_step(
    engine: TransformersEngine, cached: TransformersEngine
) -> None:
    """bf16 is left out: there a different split moves logits by half a unit, whoever computes them."""
    if engine.model.dtype != torch.float32:
        pytest.skip("holds in float32 only")
    tokens = engine.encode(TEXT)[:500]
    cached.prefill_logits(tokens)
    with torch.inference_mode():
        whole = engine.model.module(input_ids=torch.tensor([tokens]), logits_to_keep=1).logits[0, -1]
    assert torch.allclose(cached.prefill_logits(tokens).logits, whole, rtol=0, atol=1e-4)


def test_a_conversation_is_answered_alike_and_reuses_its_answers(
    engine: TransformersEngine, cached: TransformersEngine
) -> None:
    messages = [{"role": "user", "content": TEXT[:700] + "\nWrite a long poem about this."}]
    held = asked = 0
    for question in ["And what must I keep?", ""]:
        tokens = engine.chat_prompt(messages)
        got = answer(cached, tokens, max_new_tokens=70)
        assert got.tokens == answer(engine, tokens, max_new_tokens=70).tokens
        assert got.reused_tokens == held // BLOCK * BLOCK
        messages += [{"role": "assistant", "content": got.text}, {"role": "user", "content": question}]
        # An answer cut short may be tokenised differently at its end when it comes back as text.
        held, asked = common_prefix([*tokens, *got.tokens], engine.chat_prompt(messages)), len(tokens)
    assert held - asked >= BLOCK, "the template must append, or answers are never reused"
    assert got.reused_tokens > 0


def common_prefix(one: list[int], other: list[int]) -> int:
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


def test_streamed_text_equals_the_decoded_answer(engine: TransformersEngine) -> None:
    tokens = engine.chat_prompt([{"role": "user", "content": "Write the word naïve and a balloon emoji."}])
    got = answer(engine, tokens, max_new_tokens=40)
    assert got.text == engine.model.tokenizer.decode(got.tokens, skip_special_tokens=True)  # type: ignore[union-attr]


def test_a_stop_string_ends_the_answer(engine: TransformersEngine) -> None:
    tokens = engine.chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
    free = answer(engine, tokens, max_new_tokens=30)
    assert "Paris" in free.text
    stopped = answer(engine, tokens, max_new_tokens=30, stop=("Par",))
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.index("Par")]


@pytest.mark.parametrize(
    "messages", [[{"role": "user"}], [{}], ["text"], [{"role": "user", "content": None}]]
)
def test_messages_that_the_template_refuses(engine: TransformersEngine, messages: Any) -> None:
    with pytest.raises(RequestError, match="chat template refuses"):
        engine.chat_prompt(messages)


def test_prompt_longer_than_the_model_allows(engine: TransformersEngine) -> None:
    with pytest.raises(
        RequestError, match=r"the prompt has 8192 tokens; .* accepts up to 8191 and at least one"
    ):
        engine.generate(Request([5] * 8192))
