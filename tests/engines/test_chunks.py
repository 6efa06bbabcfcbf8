"""Chunks reused anywhere: equal to a full recompute where all is computed, near it else, never mixed up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch
from tests.engines.conftest import FakeStore

from tiercel.blocks import parse
from tiercel.config import Config
from tiercel.engines.transformers import Request, Result, TransformersEngine
from tiercel.engines.transformers.chunk_cache import MARK, beginning_of_text
from tiercel.engines.transformers.chunk_prefill import Blend
from tiercel.engines.transformers.chunks import (
    ChunkReuse,
    Placed,
    places_that_may_deviate,
    places_to_compute,
)
from tiercel.engines.transformers.kv_cache import KVCache
from tiercel.engines.transformers.opening import open_engine
from tiercel.errors import ConfigError, ModelError, RequestError
from tiercel.store.policy import Hints

BLOCK = 16
FIRST, SECOND, QUESTION = 48, 40, 9
Make = Callable[..., TransformersEngine]
Prompt = Callable[..., list[int]]
MOVABLE = ("llama", "qwen3", "gpt-neox", "falcon-mqa")


@pytest.fixture
def engine_of(tiny_model: Callable[..., Path], fake_store: FakeStore) -> Make:
    """A function (family, head, ratio) -> an engine on the fake store that reuses chunks."""

    def make(
        family: str = "llama", head: int = 2, ratio: float = 0.0, store: FakeStore | None = fake_store
    ) -> TransformersEngine:
        return TransformersEngine(
            tiny_model(family), store,  # type: ignore[arg-type]
            dtype="float32", device="cpu", block_tokens=BLOCK, load_always=True,
            chunks=ChunkReuse(head, ratio),
        )  # fmt: skip

    return make


def asked(prompt: Prompt, before: int = 5, more: int = 1, **given: object) -> Request:
    """A prompt of something before, two chunks with a token between them, and a question."""
    tokens = [*prompt(before, 1), *prompt(FIRST, 2), 7, *prompt(SECOND, 3), *prompt(QUESTION, 4)]
    second = before + FIRST + 1
    spans = ((before, before + FIRST), (second, second + SECOND))
    return Request(tokens, max_new_tokens=more, chunks=spans, **given)  # type: ignore[arg-type]


def blended(engine: TransformersEngine, request: Request) -> tuple[Blend, KVCache]:
    """The prompt's KV as a request would have it."""
    assert engine.chunks is not None
    cache = KVCache(engine.layout, engine.model.device)
    first = request.chunks[0][0]
    cache.reserve(len(request.tokens))
    if first:
        engine.run_blocks(request.tokens[:first], cache)
    return engine.chunks.blend(request, request.chunks, cache, lambda: False, None), cache


def full(engine: TransformersEngine, tokens: Sequence[int]) -> tuple[torch.Tensor, KVCache]:
    cache = KVCache(engine.layout, engine.model.device)
    return engine.run_blocks(tokens, cache), cache


def answer(engine: TransformersEngine, request: Request) -> Result:
    *_, result = engine.generate(request)
    assert isinstance(result, Result)
    return result


def off(one: KVCache, other: KVCache) -> float:
    """The largest difference of any key or value."""
    assert one.length == other.length
    return max(
        float((a[:, :, : one.length] - b[:, :, : one.length]).abs().max())
        for layer in range(len(one.layout.shapes))
        for a, b in zip(one.buffers(layer), other.buffers(layer), strict=True)
    )


@pytest.mark.parametrize("family", MOVABLE)
@pytest.mark.parametrize(("head", "ratio"), [(0, 1.0), (1000, 0.0), (3, 1.0)])
def test_with_all_computed_anew_it_is_a_full_recompute(
    engine_of: Make, prompt: Prompt, family: str, head: int, ratio: float
) -> None:
    engine, request = engine_of(family, head, ratio), asked(prompt)
    control, _ = blended(engine_of(family, 0, 0.0), request)
    blend, cache = blended(engine, request)
    logits, exact = full(engine, request.tokens)
    assert blend.loaded == 2, "the control stored both"
    assert torch.allclose(blend.logits, logits, atol=1e-4, rtol=1e-4)
    assert off(cache, exact) < 1e-4
    assert not torch.allclose(control.logits, logits, atol=1e-4, rtol=1e-4), "else this shows nothing"


@pytest.mark.parametrize("family", MOVABLE)
def test_moved_keys_of_the_first_layer_are_those_computed_there(
    engine_of: Make, prompt: Prompt, family: str
) -> None:
    engine, request = engine_of(family, 0), asked(prompt)
    _, cache = blended(engine, request)
    _, exact = full(engine, request.tokens)
    count = len(request.tokens)
    for moved, right in zip(cache.buffers(0), exact.buffers(0), strict=True):
        assert torch.allclose(moved[:, :, :count], right[:, :, :count], atol=1e-5)
    assert engine.chunks is not None
    engine.chunks.rotate = lambda keys, by: keys
    _, unmoved = blended(engine, request)
    assert not torch.allclose(
        unmoved.buffers(0)[0][:, :, :count], exact.buffers(0)[0][:, :, :count], atol=1e-2
    )


def test_a_chunk_at_the_very_beginning_is_bit_equal_to_prefix_reuse(engine_of: Make, prompt: Prompt) -> None:
    engine = engine_of("llama", 4, 0.5)
    tokens = [*prompt(FIRST, 2), *prompt(QUESTION, 4)]
    stored = engine.prefill_logits(tokens)
    exact = engine.prefill_logits(tokens)
    assert exact.reused_tokens == FIRST
    assert torch.equal(exact.logits, stored.logits)
    request = Request(tokens, chunks=((0, FIRST),))
    for loaded in (0, 1):
        blend, cache = blended(engine, request)
        assert blend.loaded == loaded
        assert torch.equal(blend.logits, exact.logits)
        assert off(cache, full(engine, tokens)[1]) == 0.0


def test_every_chunk_is_found_again_wherever_it_stands_and_answers_do_not_depend_on_that(
    engine_of: Make, prompt: Prompt
) -> None:
    request = asked(prompt, more=8)
    cold = answer(engine_of(), request)
    warm = answer(engine_of(), request)
    assert cold.sources == {}
    assert warm.tokens == cold.tokens
    blocks = FIRST // BLOCK + -(-SECOND // BLOCK)
    assert warm.sources == {"ram": blocks}, "also the block that the second chunk fills in part"
    assert warm.reused_tokens == FIRST + SECOND - 2 * 2
    assert warm.decision is not None
    assert warm.decision.computed_tokens == len(request.tokens) - warm.reused_tokens
    assert "chunks: 2 loaded, 0 computed alone" in warm.decision.reason
    elsewhere = asked(prompt, before=23)
    assert answer(engine_of(), elsewhere).sources == {"ram": blocks}
    first, second = request.chunks
    swapped = [*request.tokens[slice(*second)], *request.tokens[slice(*first)], 9]
    both = Request(swapped, max_new_tokens=1, chunks=((0, SECOND), (SECOND, SECOND + FIRST)))
    assert answer(engine_of(), both).sources == {"ram": blocks}


def test_d55_many_prompts_of_the_same_chunks_in_one_engine_are_as_in_fresh_ones(
    engine_of: Make, prompt: Prompt
) -> None:
    """Nothing is left over from one request in the next, and a full hit in any order of chunks works."""
    pieces = [prompt(length, number) for number, length in enumerate((40, 33, 50), 2)]

    def request(order: Sequence[int]) -> Request:
        tokens, spans = prompt(5, 1), []
        for number in order:
            spans.append((len(tokens), len(tokens) + len(pieces[number])))
            tokens = [*tokens, *pieces[number]]
        return Request([*tokens, *prompt(QUESTION, 4)], max_new_tokens=6, chunks=tuple(spans))

    orders = [request(order) for order in permutations(range(len(pieces)))]
    one = engine_of()
    answer(one, orders[0])
    together = [answer(one, asked) for asked in orders]
    assert [found.tokens for found in together] == [answer(engine_of(), asked).tokens for asked in orders]
    assert all(found.sources["ram"] >= len(pieces) for found in together)
    assert len({found.tokens for found in together}) > 1, "the order makes a difference"


def test_exact_requests_never_find_chunks_nor_chunks_exact_prefixes(
    engine_of: Make, prompt: Prompt, fake_store: FakeStore
) -> None:
    request = asked(prompt, before=0, more=BLOCK + 3)
    answer(engine_of(), request)
    assert len(fake_store.blocks) == FIRST // BLOCK + -(-SECOND // BLOCK), "chunks only: no prompt, no answer"
    plain = replace(request, chunks=())
    exact = answer(engine_of(), plain)
    assert exact.reused_tokens == 0
    assert exact.tokens == answer(TransformersEngine(
        engine_of().model.folder, dtype="float32", device="cpu", block_tokens=BLOCK
    ), plain).tokens  # fmt: skip
    assert answer(engine_of(), plain).reused_tokens >= FIRST, "the control: exact finds exact"
    fake_store.blocks = {
        key: block for key, block in fake_store.blocks.items() if key[:8] == _tag(engine_of())
    }
    assert fake_store.blocks
    alone = Request([*request.tokens[:FIRST], 5], max_new_tokens=1, chunks=((0, FIRST),))
    moved = Request([3, *request.tokens[:FIRST], 5], max_new_tokens=1, chunks=((1, 1 + FIRST),))
    assert answer(engine_of(), moved).sources == {}, "a chunk is not served from an exact prefix"
    assert answer(engine_of(), moved).sources == {"ram": FIRST // BLOCK}, "the control: chunks find chunks"
    before = answer(engine_of(), alone)
    assert before.sources == {"ram": FIRST // BLOCK}
    assert before.decision is not None
    assert "chunks" not in before.decision.reason, "an exact prefix goes before any chunk"


def _tag(engine: TransformersEngine) -> bytes:
    chain = engine.chain([3] * BLOCK)
    assert chain is not None
    return chain.keys[0][:8]


def test_the_exact_prefix_is_reused_and_stored_as_ever(
    engine_of: Make, prompt: Prompt, fake_store: FakeStore
) -> None:
    request = asked(prompt, before=2 * BLOCK + 3)
    answer(engine_of(), request)
    warm = answer(engine_of(), request)
    assert warm.sources["ram"] == 2 + FIRST // BLOCK + -(-SECOND // BLOCK)
    only = Request(request.tokens[: 2 * BLOCK + 3], max_new_tokens=1)
    assert answer(engine_of(), only).reused_tokens == 2 * BLOCK


def test_tenants_do_not_share_chunks_and_hints_hold(
    engine_of: Make, prompt: Prompt, fake_store: FakeStore
) -> None:
    request = asked(prompt)
    for kept_out in (
        replace(request, hints=Hints(store=False)),
        replace(request, use_cache=False),
    ):
        assert answer(engine_of(), kept_out).sources == {}
        assert not fake_store.blocks
    answer(engine_of(), replace(request, salt="a"))
    assert answer(engine_of(), replace(request, salt="b")).sources == {}
    assert answer(engine_of(), replace(request, salt="a")).sources, "the control"
    assert answer(engine_of(), replace(request, salt="a", hints=Hints(load=False))).sources == {}


def test_chunks_that_would_leave_most_of_a_block_empty_take_none(
    engine_of: Make, prompt: Prompt, fake_store: FakeStore
) -> None:
    """However many there are, they are text. The least that is worth a block is the control."""
    for length, blocks in ((BLOCK // 4 - 1, 0), (BLOCK // 4, 30)):
        tokens, spans = prompt(5, 1), []
        for number in range(30):
            spans.append((len(tokens), len(tokens) + length))
            tokens = [*tokens, *prompt(length, 10 + number), 7]
        request = Request([*tokens, *prompt(QUESTION, 4)], max_new_tokens=3, chunks=tuple(spans))
        engine = engine_of("llama", 0)
        said = answer(engine, request)
        assert sum(key[:8] != _tag(engine) for key in fake_store.blocks) == blocks
        exact = answer(engine, replace(request, chunks=(), use_cache=False))
        assert (said.tokens == exact.tokens) or blocks, "what is not reused is exact"


def test_without_being_switched_on_chunks_are_tokens_like_all(
    tiny_model: Callable[..., Path], prompt: Prompt, fake_store: FakeStore
) -> None:
    request = asked(prompt, more=4)
    plain = TransformersEngine(
        tiny_model(), fake_store, dtype="float32", device="cpu", block_tokens=BLOCK,  # type: ignore[arg-type]
    )  # fmt: skip
    assert answer(plain, request).tokens == answer(plain, replace(request, chunks=(), use_cache=False)).tokens
    assert answer(plain, request).reused_tokens == (len(request.tokens) - 1) // BLOCK * BLOCK
    assert plain.lossy == ()


def test_faults_of_the_store_cost_a_recompute(engine_of: Make, prompt: Prompt, fake_store: FakeStore) -> None:
    request = asked(prompt, more=4)
    right = answer(engine_of(), request)
    fake_store.fail_load_at = 1
    assert answer(engine_of(), request).tokens == right.tokens
    assert fake_store.faults_fired == 2
    fake_store.refuse = True
    assert answer(engine_of(), request).tokens == right.tokens
    assert fake_store.faults_fired > 2


def test_what_is_given_up_leaves_exact_blocks_only(
    engine_of: Make, prompt: Prompt, fake_store: FakeStore
) -> None:
    request, engine = asked(prompt, before=2 * BLOCK), engine_of()
    asks = iter([False] * 8)
    assert not list(engine.generate(request, stop=lambda: next(asks, True)))
    exact = {key for key in fake_store.blocks if key[:8] == _tag(engine)}
    assert len(exact) == 2
    assert len(fake_store.blocks) > 2, "it was given up after the first chunk"
    again = TransformersEngine(engine.model.folder, dtype="float32", device="cpu", block_tokens=BLOCK)
    assert answer(engine, replace(request, chunks=())).tokens == answer(again, request).tokens


def test_a_chunk_stands_behind_what_begins_every_text(engine_of: Make, prompt: Prompt) -> None:
    engine, tokens = engine_of(), [2, *prompt(FIRST, 2), *prompt(QUESTION, 4)]

    class Begins:
        bos_token_id = 2

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [2, 3]}

    assert beginning_of_text(engine.model) == ()
    assert beginning_of_text(replace(engine.model, tokenizer=Begins())) == (2,)
    assert engine.chunks is not None
    engine.chunks._chunks.beginning = (2,)
    request = Request(tokens, chunks=((1, 1 + FIRST),))
    blend, cache = blended(engine, request)
    logits, exact = full(engine, tokens)
    assert torch.allclose(blend.logits, logits, atol=1e-4)
    assert off(cache, exact) < 1e-5, "it stands where it was computed"
    assert blended(engine, Request([5, *tokens], chunks=((2, 2 + FIRST),)))[0].loaded == 1


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("mistral-window", "sliding window"),
        ("gpt2", "moved"),
        ("deepseek-v3", "moved"),
        ("gemma3", "sliding"),
    ],
)
def test_models_whose_chunks_cannot_be_moved_are_refused_in_one_line(
    engine_of: Make, family: str, why: str
) -> None:
    with pytest.raises(ModelError, match=f"chunks of model 'tiny' cannot be reused: .*{why}") as refused:
        engine_of(family)
    assert "\n" not in str(refused.value)


def test_which_places_are_computed() -> None:
    reuse = ChunkReuse(2)
    placed = [Placed(3, 10), Placed(12, 20, at_home=True)]
    assert places_to_compute(1, 24, placed, reuse) == [1, 2, 3, 4, 10, 11, 20, 21, 22, 23]
    assert places_to_compute(3, 20, placed, reuse) == [3, 4, 10, 11, 19], "the last one, for its logits"
    assert places_that_may_deviate(placed, [3, 4]) == [5, 6, 7, 8, 9]
    assert ChunkReuse(8).worth((0, 17), 16)
    assert not ChunkReuse(8).worth((0, 16), 16)


@pytest.mark.parametrize("spans", [((0, 0),), ((3, 2),), ((0, 5), (4, 6)), ((2, 9),), ((-1, 2),)])
def test_spans_that_are_none_are_refused(spans: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(RequestError, match=r"accepted are spans in order within 0..8"):
        Request([3] * 8, chunks=spans)
    assert Request([3] * 8, chunks=((0, 5), (5, 8))).chunks, "the control"


def test_the_setting_is_read_or_refused() -> None:
    assert ChunkReuse.parse("no") is None
    assert ChunkReuse.parse("16") == ChunkReuse(16)
    assert ChunkReuse.parse("0+0.15") == ChunkReuse(0, 0.15)
    assert str(ChunkReuse(16, 0.05)) == "16+0.05"
    for wrong in ("yes", "", "16+2", "-1", "16+", "1.5", "16 + 0.1"):
        with pytest.raises(ConfigError, match=r"attention.chunks: is .*accepted: no, how many"):
            ChunkReuse.parse(wrong)


def test_a_store_of_its_own_kind_keeps_chunks_under_their_mark(
    tiny_model: Callable[..., Path], prompt: Prompt, tmp_path: Path
) -> None:
    settings = {
        "ram.size": "8MiB", "tiers.0.path": str(tmp_path / "disk"), "tiers.0.size": "64MiB",
        "model.dtype": "float32", "model.device": "cpu", "model.block_tokens": str(BLOCK),
        "store.load": "always", "store.accept_lossy": "yes", "attention.chunks": "2",
    }  # fmt: skip
    request = asked(prompt)
    for found in ({}, {"disk": FIRST // BLOCK + -(-SECOND // BLOCK)}):
        engine, store = open_engine(tiny_model(), Config.load(None, {}, settings))
        with closing(store):
            assert store.scanned(10)
            assert engine.lossy == ("chunks-2",)
            assert answer(engine, request).sources == found
            assert store.flush(10)
    marks = {
        header.info.get("lossy")
        for path in (tmp_path / "disk").rglob("*")
        if path.is_file() and not isinstance(header := parse(path.read_bytes()[:4096]), str)
    }
    assert marks == {MARK}
