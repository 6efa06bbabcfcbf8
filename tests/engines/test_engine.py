"""The engine's promises: exact reuse, exact isolation, a fault costs a recompute, nothing is left behind."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiercel.engines.transformers import Delta, Request, Result, TransformersEngine
from tiercel.errors import ModelError, RequestError

BLOCK = 16
Prompt = Callable[..., list[int]]


def build(folder: Path, store: Any, **more: Any) -> TransformersEngine:
    how = {"dtype": "float32", "device": "cpu", "block_tokens": BLOCK} | more
    engine = TransformersEngine(folder, store, **how)
    # A random model ends its answer at random; here lengths matter.
    object.__setattr__(engine.model, "eos_ids", frozenset())
    return engine


def answer(engine: TransformersEngine, tokens: list[int], **more: Any) -> Result:
    *_, last = engine.generate(Request(tokens, **more))
    assert isinstance(last, Result)
    return last


def in_turn(engine: TransformersEngine, prompts: list[list[int]], **more: Any) -> list[tuple[int, ...]]:
    """The answers to several prompts that are generated a token each in turn."""
    running = [engine.generate(Request(tokens, **more)) for tokens in prompts]
    got: list[list[int]] = [[] for _ in prompts]
    for events in itertools.zip_longest(*running):
        for index, event in enumerate(events):
            if isinstance(event, Delta):
                got[index].append(event.token)
    return [tuple(tokens) for tokens in got]


@pytest.fixture
def engine(tiny_model: Callable[..., Path], fake_store: Any) -> TransformersEngine:
    return build(tiny_model(), fake_store)


def block_bytes(engine: TransformersEngine, tokens: list[int], index: int) -> bytes:
    """What the engine's cache holds for block `index` after a prefill of `tokens` without any store."""
    cache = engine.take_cache(len(tokens))
    engine._prefill(tokens, None, cache, engine._account(tokens, None))
    payload = bytearray(engine.layout.payload_bytes)
    cache.save_block(index, memoryview(payload))
    return bytes(payload)


def test_stored_bytes_equal_the_prefilled_cache(
    engine: TransformersEngine, fake_store: Any, prompt: Prompt
) -> None:
    tokens = prompt(5 * BLOCK + 3)
    engine.prefill_logits(tokens)
    chain = engine.prefix.chain(tokens, None)  # type: ignore[union-attr]
    assert len(chain) == 5
    for index, key in enumerate(chain.keys):
        assert bytes(fake_store.blocks[key]) == block_bytes(engine, tokens, index)


def test_restored_bytes_equal_stored_ones(
    engine: TransformersEngine, fake_store: Any, prompt: Prompt
) -> None:
    tokens = prompt(5 * BLOCK + 3)
    engine.prefill_logits(tokens)
    chain = engine.prefix.chain(tokens, None)  # type: ignore[union-attr]
    cache = engine.take_cache(len(tokens))
    assert engine.prefix is not None
    engine.prefix.restore(engine.prefix.find(chain, len(tokens), None), cache)
    for index, key in enumerate(chain.keys):
        payload = bytearray(engine.layout.payload_bytes)
        cache.save_block(index, memoryview(payload))
        assert payload == fake_store.blocks[key]


def test_payload_is_layers_kv_heads_tokens_dim(
    engine: TransformersEngine, fake_store: Any, prompt: Prompt
) -> None:
    """The layout is a promise to every reader of stored blocks, so it is checked against its own words."""
    tokens = prompt(2 * BLOCK)
    cache = engine.take_cache(len(tokens))
    engine._prefill(tokens, None, cache, engine._account(tokens, None))
    payload = bytearray(engine.layout.payload_bytes)
    cache.save_block(1, memoryview(payload))
    block = torch.frombuffer(payload, dtype=torch.float32).view(3, 2, 2, BLOCK, 16)
    for index, layer in enumerate(cache.layers):
        keys, values = layer._slab.layer(index)
        assert torch.equal(block[index, 0], keys[0, :, BLOCK : 2 * BLOCK])
        assert torch.equal(block[index, 1], values[0, :, BLOCK : 2 * BLOCK])


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 1])
def test_one_token_is_always_computed_d22_d23(
    engine: TransformersEngine, prompt: Prompt, length: int
) -> None:
    tokens = prompt(length)
    cold = answer(engine, tokens, max_new_tokens=4)
    warm = answer(engine, tokens, max_new_tokens=4)
    assert warm.reused_tokens == (length - 1) // BLOCK * BLOCK
    assert warm.reused_tokens <= length - 1
    assert warm.tokens == cold.tokens


@pytest.mark.parametrize("shared", [3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1])
def test_only_whole_shared_blocks_are_reused(engine: TransformersEngine, prompt: Prompt, shared: int) -> None:
    first, second = prompt(6 * BLOCK), prompt(6 * BLOCK, seed=1)
    second = first[:shared] + [token for token in second if token != first[shared]][: 5 * BLOCK - shared]
    expected = answer(engine, second, max_new_tokens=6, use_cache=False)
    answer(engine, first, max_new_tokens=1)
    got = answer(engine, second, max_new_tokens=6)
    assert got.reused_tokens == shared // BLOCK * BLOCK
    assert got.tokens == expected.tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_over_turns_are_equal_and_reuse_the_answer(
    tiny_model: Callable[..., Path], fake_store: Any, prompt: Prompt, dtype: str
) -> None:
    """Turn by turn, each prompt is the last one with its answer and some more."""
    cached, plain = build(tiny_model(), fake_store, dtype=dtype), build(tiny_model(), None, dtype=dtype)
    tokens, known = prompt(40), 0
    for turn in range(4):
        got, expected = answer(cached, tokens, max_new_tokens=37), answer(plain, tokens, max_new_tokens=37)
        assert got.tokens == expected.tokens
        assert got.reused_tokens == known // BLOCK * BLOCK
        tokens = [*tokens, *got.tokens]
        known = len(tokens)
        tokens = [*tokens, *prompt(9, seed=turn)]


def test_stored_answer_blocks_are_those_of_a_prefill(
    tiny_model: Callable[..., Path], fake_store: Any, prompt: Prompt
) -> None:
    """Decoded KV differs in its last bits (the control), so what is stored must have been recomputed."""
    engine = build(tiny_model(), fake_store, dtype="bfloat16")
    tokens = prompt(40)
    result = answer(engine, tokens, max_new_tokens=40)
    whole = [*tokens, *result.tokens]
    chain = engine.prefix.chain(whole, None)  # type: ignore[union-attr]
    assert result.stored_blocks == len(chain) == 5
    for index, key in enumerate(chain.keys):
        assert bytes(fake_store.blocks[key]) == block_bytes(engine, whole, index)
    cache = engine.take_cache(len(whole))
    engine._prefill(tokens, None, cache, engine._account(tokens, None))
    for token in result.tokens:
        engine._forward([token], cache)
    decoded = bytearray(engine.layout.payload_bytes)
    cache.save_block(4, memoryview(decoded))
    assert decoded != fake_store.blocks[chain.keys[4]], "settling would prove nothing here"


def test_scopes_are_apart_d01_d02_d04_d05_d06(
    tiny_model: Callable[..., Path], fake_store: Any, prompt: Prompt
) -> None:
    tokens = prompt(4 * BLOCK)
    base = build(tiny_model(), fake_store)
    assert base.prefill_logits(tokens, salt="a").reused_tokens == 0
    assert base.prefill_logits(tokens, salt="b").reused_tokens == 0
    assert base.prefill_logits(tokens).reused_tokens == 0
    for other in (
        build(tiny_model(), fake_store, adapter=b"x" * 32),
        build(tiny_model(), fake_store, adapter=b"a"),
        build(tiny_model(), fake_store, dtype="bfloat16"),
        build(tiny_model(), fake_store, block_tokens=8),
        build(tiny_model(), fake_store, attention="eager"),
        build(tiny_model(seed=1), fake_store),
    ):
        assert other.prefill_logits(tokens, salt="a").reused_tokens == 0
        assert other.prefill_logits(tokens).reused_tokens == 0
    # The control: the same scopes again, from the same folder opened anew, do hit.
    again = build(tiny_model(), fake_store)
    for salt in ("a", "b", None):
        assert again.prefill_logits(tokens, salt=salt).reused_tokens == 3 * BLOCK


def test_prefix_that_ends_early_is_continued_by_prefill_d17_d18(
    engine: TransformersEngine, fake_store: Any, prompt: Prompt
) -> None:
    tokens = prompt(5 * BLOCK + 1)
    expected = answer(engine, tokens, max_new_tokens=10)
    for failing in (0, 3, 4):
        fake_store.fail_load_at, fired = failing, fake_store.faults_fired
        got = answer(engine, tokens, max_new_tokens=10)
        assert fake_store.faults_fired == fired + 1
        assert got.reused_tokens == failing * BLOCK
        assert got.tokens == expected.tokens


def test_store_that_refuses_everything_costs_only_a_recompute(
    engine: TransformersEngine, fake_store: Any, prompt: Prompt
) -> None:
    tokens = prompt(5 * BLOCK + 1)
    expected = answer(engine, tokens, max_new_tokens=10)
    fake_store.refuse = True
    got = answer(engine, tokens, max_new_tokens=10)
    assert fake_store.faults_fired > 0
    assert engine.prefix is not None
    assert engine.prefix.faults == fake_store.faults_fired
    assert (got.tokens, got.reused_tokens) == (expected.tokens, 0)


def test_stored_copy_is_unchanged_by_generations_d53(
    engine: TransformersEngine, fake_store: Any, prompt: Prompt
) -> None:
    tokens = prompt(3 * BLOCK + 5)
    cold = answer(engine, tokens, max_new_tokens=30)
    before = {key: bytes(payload) for key, payload in fake_store.blocks.items()}
    for _ in range(2):
        warm = answer(engine, tokens, max_new_tokens=30)
        assert warm.reused_tokens == 3 * BLOCK
        assert warm.tokens == cold.tokens
    assert {key: bytes(payload) for key, payload in fake_store.blocks.items()} == before


def test_interleaved_generations_do_not_mix(engine: TransformersEngine, prompt: Prompt) -> None:
    prompts = [prompt(40, seed=1), prompt(50, seed=2)]
    expected = [answer(engine, tokens, max_new_tokens=12).tokens for tokens in prompts]
    assert in_turn(engine, prompts, max_new_tokens=12) == expected


@pytest.mark.parametrize("events", [1, 2, 5])
def test_client_that_leaves_early_leaves_nothing_open(
    engine: TransformersEngine, fake_store: Any, prompt: Prompt, events: int
) -> None:
    tokens = prompt(3 * BLOCK + 1)
    running = engine.generate(Request(tokens, max_new_tokens=20))
    for _ in range(events):
        next(running)
    running.close()
    assert (fake_store.leases, fake_store.writes) == (0, 0)
    assert len(fake_store.blocks) == 3
    assert engine.prefill_logits(tokens).reused_tokens == 3 * BLOCK


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_prefill_nobody_waits_for_ends_between_blocks_and_is_kept(
    engine: TransformersEngine, fake_store: Any, prompt: Prompt, steps: int
) -> None:
    tokens = prompt(3 * BLOCK + 1)
    asked: list[bool] = []

    def stop() -> bool:
        asked.append(len(asked) >= steps)
        return asked[-1]

    assert list(engine.generate(Request(tokens, max_new_tokens=5), stop)) == []
    assert asked == [False] * steps + [True]
    assert len(fake_store.blocks) == steps
    assert (fake_store.leases, fake_store.writes) == (0, 0)
    assert engine.prefill_logits(tokens).reused_tokens == steps * BLOCK


def test_without_use_of_the_cache_the_store_is_not_touched(
    engine: TransformersEngine, fake_store: Any, prompt: Prompt
) -> None:
    got = answer(engine, prompt(3 * BLOCK + 1), max_new_tokens=20, use_cache=False)
    assert not fake_store.blocks
    assert got.stored_blocks == 0


def test_answer_in_events_equals_the_result(engine: TransformersEngine, prompt: Prompt) -> None:
    *deltas, result = engine.generate(Request(prompt(20), max_new_tokens=7))
    assert isinstance(result, Result)
    assert tuple(delta.token for delta in deltas if isinstance(delta, Delta)) == result.tokens
    assert [getattr(delta, "finish_reason", None) for delta in deltas] == [None] * 6 + ["length"]
    assert result.finish_reason == "length"


def test_answer_ends_at_an_end_token(engine: TransformersEngine, prompt: Prompt) -> None:
    tokens = prompt(20)
    free = answer(engine, tokens, max_new_tokens=8)
    object.__setattr__(engine.model, "eos_ids", frozenset({free.tokens[3]}))
    ended = answer(engine, tokens, max_new_tokens=8)
    assert ended.tokens == free.tokens[: free.tokens.index(free.tokens[3]) + 1]
    assert ended.finish_reason == "stop"


def test_equal_seeds_give_equal_samples(engine: TransformersEngine, prompt: Prompt) -> None:
    tokens = prompt(3 * BLOCK)
    how: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.5, "top_p": 0.95}
    first, second = answer(engine, tokens, seed=7, **how), answer(engine, tokens, seed=7, **how)
    assert second.reused_tokens == 2 * BLOCK
    assert first.tokens == second.tokens
    assert answer(engine, tokens, seed=8, **how).tokens != first.tokens
    assert answer(engine, tokens, max_new_tokens=12).tokens != first.tokens


def test_top_p_close_to_zero_is_greedy(engine: TransformersEngine, prompt: Prompt) -> None:
    tokens = prompt(20)
    narrow = answer(engine, tokens, max_new_tokens=6, temperature=2.0, top_p=1e-6, seed=1)
    assert narrow.tokens == answer(engine, tokens, max_new_tokens=6).tokens


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-38, 1e-30, 1e-7, 1e-6])
def test_a_temperature_close_to_zero_is_greedy(
    engine: TransformersEngine, prompt: Prompt, temperature: float
) -> None:
    tokens = prompt(20)
    cold = answer(engine, tokens, max_new_tokens=6, temperature=temperature, seed=1)
    assert cold.tokens == answer(engine, tokens, max_new_tokens=6).tokens


def test_answer_stops_where_the_context_ends(engine: TransformersEngine, prompt: Prompt) -> None:
    got = answer(engine, prompt(505), max_new_tokens=100)
    assert len(got.tokens) == 512 - 505
    assert got.finish_reason == "length"


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], "the prompt is empty"),
        ([5] * 512, "the prompt has 512 tokens; tiny accepts up to 511"),
        ([5, 128], "token id 128 is outside the model's 0..127"),
        ([5, -1], "token id -1 is outside"),
    ],
)
def test_prompts_that_cannot_be_served(engine: TransformersEngine, tokens: list[int], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        engine.generate(Request(tokens))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0}, {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf},
        {"top_p": 0.0}, {"top_p": 1.1}, {"seed": -1}, {"seed": 2**63}, {"stop": ("",)}, {"stop": ("x",) * 17},
    ],
)  # fmt: skip
def test_parameters_that_make_no_sense(wrong: dict[str, Any]) -> None:
    name = next(iter(wrong))
    with pytest.raises(RequestError, match=name if name != "stop" else "stop string"):
        Request([1], **wrong)


def test_without_a_tokenizer_only_token_ids_are_served(engine: TransformersEngine) -> None:
    with pytest.raises(ModelError, match="has no tokenizer"):
        engine.encode("text")
    with pytest.raises(ModelError, match="has no tokenizer"):
        engine.chat_prompt([{"role": "user", "content": "text"}])
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        engine.generate(Request([5], stop=("x",)))


def test_blocks_without_room_are_stored_once_the_answer_is_out(
    engine: TransformersEngine, fake_store: Any, prompt: Prompt
) -> None:
    tokens = prompt(3 * BLOCK + 1)
    fake_store.crowded = True
    running = engine.generate(Request(tokens, max_new_tokens=20))
    for event in running:
        if isinstance(event, Delta) and event.finish_reason is not None:
            break
        assert not fake_store.blocks, "a token waited for room"
    result = next(running)
    assert isinstance(result, Result)
    assert fake_store.faults_fired > 0
    assert result.stored_blocks == len(fake_store.blocks) == (len(tokens) + 20) // BLOCK


def test_an_answer_that_is_stored_already_is_not_settled_again(
    engine: TransformersEngine, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(2 * BLOCK + 1)
    first = answer(engine, tokens, max_new_tokens=40)
    assert first.stored_blocks == (len(tokens) + 40) // BLOCK
    runs = []
    forward = engine._forward
    monkeypatch.setattr(
        engine, "_forward", lambda part, cache: (runs.append(len(part)), forward(part, cache))[1]
    )
    second = answer(engine, tokens, max_new_tokens=40)
    assert (second.tokens, second.stored_blocks) == (first.tokens, 0)
    assert runs == [1] * 40, "one prefill step of one token, then decoding, then nothing"
