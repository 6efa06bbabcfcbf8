"""Hints do what they say, steering acts on a prompt, and every decision is told as it was."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.store.support import FaultyTier, drop_ram

from tiercel.blocks import BlockKey, record_bytes
from tiercel.engines.transformers import Delta, Request, Result, TransformersEngine
from tiercel.memory import Arena
from tiercel.store import LaneOptions, SecondSight, TieredStore
from tiercel.store.policy import Decision, Hints
from tiercel.tiers import FilesTier, Outcome

BLOCK = 16
Prompt = Callable[..., list[int]]
Open = Callable[..., TransformersEngine]


class Slow(FaultyTier):
    delay_s = 0.0

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        time.sleep(self.delay_s)
        return super().read(keys, records)


@pytest.fixture
def tier(tmp_path: Path) -> Slow:
    return Slow(FilesTier(tmp_path / "disk"))


@pytest.fixture
def open_engine(tiny_model: Callable[..., Path], tier: Slow) -> Iterator[Open]:
    """A function (admission, engine's options) -> an engine over a store with one tier."""
    with ExitStack() as opened:

        def make(admission: SecondSight | None = None, **more: Any) -> TransformersEngine:
            arena = Arena(record_bytes(3 * 2 * 2 * BLOCK * 16 * 4), 64, reserved=8)
            store = TieredStore(arena, [(tier, LaneOptions(read_workers=1))], admission)
            opened.callback(store.close)
            assert store.scanned(10)
            engine = TransformersEngine(
                tiny_model(), store, dtype="float32", device="cpu", block_tokens=BLOCK, **more
            )
            object.__setattr__(engine.model, "eos_ids", frozenset())
            return engine

        yield make


def store_of(engine: TransformersEngine) -> TieredStore:
    assert engine.prefix is not None
    assert isinstance(engine.prefix._store, TieredStore)
    return engine.prefix._store


def answer(engine: TransformersEngine, tokens: list[int], **hints: Any) -> tuple[Decision, Result]:
    request = Request(tokens, max_new_tokens=20, hints=Hints(**hints))
    first, *_, last = engine.generate(request)
    assert isinstance(first, Delta)
    assert isinstance(last, Result)
    assert first.decision is not None
    assert first.decision is last.decision
    return first.decision, last


def test_what_was_found_loaded_and_computed_is_told(open_engine: Open, prompt: Prompt) -> None:
    engine = open_engine(load_always=True)
    tokens = prompt(5 * BLOCK + 3)
    cold, _ = answer(engine, tokens)
    assert (cold.found, cold.loaded, cold.computed_tokens) == ({}, {}, len(tokens))
    assert cold.reason == "all is computed: nothing of it is stored"
    warm, result = answer(engine, tokens)
    assert warm.found == warm.loaded == {"ram": 5}
    assert (warm.prompt_tokens, warm.computed_tokens, result.reused_tokens) == (83, 3, 80)
    assert warm.reason == "5 blocks found (5 in ram) and loaded without comparing"
    assert warm.done
    assert warm.prefill_s > 0
    assert warm.lookup_s > 0
    short, _ = answer(engine, prompt(BLOCK))
    assert short.reason == "all is computed: no full block of 16 tokens lies before the last token"
    assert [one.number for one in store_of(engine).decisions()] == [3, 2, 1]
    assert store_of(engine).decisions(1) == [short]
    assert time.time() - 60 < short.at_s <= time.time()


def test_a_choice_is_told_with_what_was_expected(open_engine: Open, tier: Slow, prompt: Prompt) -> None:
    engine = open_engine()
    tokens = prompt(8 * BLOCK + 3)
    for _ in range(2):  # what computing costs is learned
        engine.cost.observe(8 * BLOCK + 3, 0, 0.2)
    _, result = answer(engine, tokens)
    assert result.stored_blocks >= 8
    warm, _ = answer(engine, tokens)
    assert warm.choice is not None
    assert (
        "8 blocks found (8 in ram): loading them and computing the rest is expected to take " in warm.reason
    )
    assert "computing all 2" in warm.reason
    store = store_of(engine)
    assert store.flush(10)
    drop_ram(store)
    tier.delay_s = 0.5
    chain = engine.chain(tokens)
    assert chain is not None
    for _ in range(3):
        store.prefetch(chain[:1]).result(20)
        drop_ram(store)
    priced_out, _ = answer(engine, tokens)
    assert (priced_out.loaded, priced_out.found) == ({}, {"disk": 8})
    assert priced_out.choice is not None
    assert priced_out.choice.all_s > 3.0
    assert "8 blocks found (8 in disk), all is computed: loading all is expected to take 4." in (
        priced_out.reason
    )


def test_what_came_otherwise_than_planned_is_told(open_engine: Open, tier: Slow, prompt: Prompt) -> None:
    engine = open_engine(load_always=True)
    tokens = prompt(6 * BLOCK + 3)
    answer(engine, tokens)
    store = store_of(engine)
    assert store.flush(10)
    chain = engine.chain(tokens)
    assert chain is not None
    drop_ram(store)
    store.prefetch(chain[:2]).result(10)
    tier.faults["read"] = lambda *_: (_ for _ in ()).throw(OSError("gone"))
    told, _ = answer(engine, tokens)
    assert tier.fired
    assert (told.found, told.loaded, told.computed_tokens) == ({"ram": 2, "disk": 4}, {"ram": 2}, 67)
    assert told.reason.endswith("loaded without comparing; 2 blocks of 6 came in time")


def test_what_came_while_computing_is_told(open_engine: Open, tier: Slow, prompt: Prompt) -> None:
    engine = open_engine()
    tokens = prompt(8 * BLOCK + 3)
    forward = engine._forward

    def slowly(*args: Any) -> torch.Tensor:
        time.sleep(0.02)
        return forward(*args)

    engine._forward = slowly  # type: ignore[method-assign]
    answer(engine, tokens)
    store = store_of(engine)
    assert store.flush(10)
    drop_ram(store)
    chain = engine.chain(tokens)
    assert chain is not None
    tier.delay_s = 0.04
    for _ in range(4):
        store.prefetch(chain[:1]).result(10)
        drop_ram(store)
    told, result = answer(engine, tokens)
    assert told.loaded == {}
    assert told.met["disk"] * BLOCK == result.reused_tokens > 0
    assert "loading from the end while computing from the beginning is expected to take" in told.reason
    assert "came while the others were computed" in told.reason


def test_explaining_tells_what_would_be_done_and_does_nothing(
    open_engine: Open, tier: Slow, prompt: Prompt
) -> None:
    engine = open_engine(load_always=True)
    tokens = prompt(4 * BLOCK + 3)
    answer(engine, tokens)
    store = store_of(engine)
    assert store.flush(10)
    drop_ram(store)
    reads = len(tier.reads)
    told = engine.explain(tokens)
    assert (told.found, told.done, told.computed_tokens) == ({"disk": 4}, False, 0)
    assert len(tier.reads) == reads
    assert store.stats().ram_blocks == 0
    assert len(store_of(engine).decisions()) == 1, "only what was done is kept"
    assert engine.explain(tokens, salt="other").reason == "all is computed: nothing of it is stored"


def test_no_decision_holds_anything_of_a_prompt(open_engine: Open, prompt: Prompt) -> None:
    engine = open_engine()
    answer(engine, prompt(3 * BLOCK), session="the name of a session")
    shown = repr(store_of(engine).decisions())
    assert "name of a session" not in shown
    assert not [name for name in Decision.__slots__ if name in ("tokens", "text", "keys", "salt", "session")]


def test_no_store_keeps_nothing_and_no_load_reuses_nothing(open_engine: Open, prompt: Prompt) -> None:
    engine = open_engine(load_always=True)
    tokens = prompt(4 * BLOCK + 3)
    _, result = answer(engine, tokens, store=False)
    assert result.stored_blocks == 0
    assert store_of(engine).stats().ram_blocks == 0
    _, control = answer(engine, tokens)
    assert control.stored_blocks == 5
    unloaded, alone = answer(engine, tokens, load=False)
    assert unloaded.reason == "all is computed: the request asks to load nothing"
    assert alone.reused_tokens == 0
    assert alone.tokens == control.tokens
    _, warm = answer(engine, tokens)
    assert warm.reused_tokens == 4 * BLOCK
    assert warm.tokens == control.tokens


def test_a_pinned_request_stays_with_its_answer(open_engine: Open, prompt: Prompt) -> None:
    engine = open_engine()
    tokens = prompt(4 * BLOCK + 3)
    answer(engine, tokens)
    assert store_of(engine).stats().pins == 0
    _, result = answer(engine, tokens, pin_s=60.0)
    assert store_of(engine).stats().pins == 5
    chain = engine.chain([*tokens, *result.tokens])
    assert chain is not None
    assert engine.prefix is not None
    engine.prefix.unpin(chain)
    assert store_of(engine).stats().pins == 0


def test_second_sight_in_the_engine(open_engine: Open, tier: Slow, prompt: Prompt) -> None:
    engine = open_engine(admission=SecondSight())
    tokens = prompt(4 * BLOCK + 3)
    forwards: list[int] = []
    forward = engine._forward
    engine._forward = lambda part, cache: forwards.append(len(part)) or forward(part, cache)  # type: ignore[func-returns-value,method-assign]
    _, first = answer(engine, tokens)
    assert first.stored_blocks == 0
    assert store_of(engine).stats().ram_blocks == 0, "trying again in the same request is no second sight"
    assert forwards[-1] == 1, "and no answer is settled in vain"
    _, second = answer(engine, tokens)
    assert second.stored_blocks == 5
    _, third = answer(engine, tokens)
    assert third.reused_tokens == 4 * BLOCK
    assert first.tokens == second.tokens == third.tokens


def test_what_is_pinned_or_asked_for_by_name_needs_no_second_sight(open_engine: Open, prompt: Prompt) -> None:
    engine = open_engine(admission=SecondSight())
    _, pinned = answer(engine, prompt(2 * BLOCK, seed=1), pin_s=60.0)
    assert pinned.stored_blocks >= 2
    engine.prefill_logits(prompt(2 * BLOCK, seed=2))
    assert store_of(engine).lookup(engine.chain(prompt(2 * BLOCK, seed=2))).blocks == 2  # type: ignore[arg-type]


def test_an_agents_pause(open_engine: Open, prompt: Prompt) -> None:
    engine = open_engine(load_always=True)
    tokens = prompt(4 * BLOCK + 3)
    cold = engine.prefill_logits(tokens)
    assert engine.prefix is not None
    chain = engine.chain(tokens)
    assert chain is not None
    assert engine.prefix.demote(chain) == 4
    assert store_of(engine).stats().ram_blocks == 0
    assert engine.prefix.prefetch(chain) == 4
    assert store_of(engine).stats().ram_blocks == 4
    warm = engine.prefill_logits(tokens)
    assert warm.decision.loaded == {"ram": 4}
    assert torch.equal(warm.logits, cold.logits)
    assert engine.prefix.pin(chain, 60) == 4
    assert engine.prefix.drop(chain) == 4
    assert engine.prefill_logits(tokens).reused_tokens == 0


def test_steering_a_store_that_is_closed_does_nothing(open_engine: Open, prompt: Prompt) -> None:
    engine = open_engine()
    engine.prefill_logits(prompt(3 * BLOCK))
    chain, prefix = engine.chain(prompt(3 * BLOCK)), engine.prefix
    assert chain is not None
    assert prefix is not None
    store_of(engine).close()
    assert (prefix.prefetch(chain, 0.5), prefix.demote(chain, 0.5), prefix.drop(chain, 0.5)) == (0, 0, 3)
    assert prefix.pin(chain, 10) == 0
