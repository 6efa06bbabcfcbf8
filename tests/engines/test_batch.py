"""Answers in a batch: each is what it is alone, whoever comes, goes or fails beside it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engines.conftest import FakeStore
from tests.engines.test_engine import BLOCK, Prompt, answer, build
from tests.engines.test_offload import BUDGETS, FAMILIES, PROMPT, Slow, offloaded, reference, shared

from tiercel.codecs.consent import LossyAttention
from tiercel.engines.transformers import (
    Batch,
    Delta,
    Member,
    Request,
    Result,
    Stopped,
    TransformersEngine,
    rows,
)
from tiercel.engines.transformers.answering import Step
from tiercel.engines.transformers.chunks import ChunkReuse
from tiercel.engines.transformers.kv_cache import KVCache
from tiercel.engines.transformers.offload import lying, resident
from tiercel.engines.transformers.offload.partial import Partial
from tiercel.errors import ModelError, RequestError

# GPT-BigCode's module still compiles a helper by a call that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
# Shorter and longer than the windows of 24 tokens, at a block's edge, and next to nothing.
LENGTHS = (1, 23, 2 * BLOCK, PROMPT)
Model = Callable[..., Path]


def together(folder: Path, store: Any = None, batch: int = 3, **more: Any) -> TransformersEngine:
    return build(folder, store, batch=batch, **more)


def under(plain: TransformersEngine, budget: str | None, batch: int, store: Any = None) -> TransformersEngine:
    """The model of `plain` in a batch, under a budget of `BUDGETS` or none."""
    if budget is None:
        attention = "eager" if plain.model.attention == "eager" else None
        return together(plain.model.folder, store, batch, attention=attention)
    return offloaded(plain, store, budget, batch=batch)


def asked(prompt: Prompt, lengths: Sequence[int], answers: Sequence[int]) -> list[Request]:
    return [
        Request(prompt(length, seed=place), max_new_tokens=more)
        for place, (length, more) in enumerate(zip(lengths, answers, strict=True))
    ]


def said(engine: TransformersEngine, requests: Sequence[Request]) -> list[Result]:
    """The answers to all, taken together."""
    got: dict[int, Result] = {}
    for place, event in engine.generate_together(requests):
        if isinstance(event, Result):
            got[place] = event
    return [got[place] for place in range(len(requests))]


def alone(engine: TransformersEngine, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    got = []
    for request in requests:
        *_, last = engine.generate(request)
        assert isinstance(last, Result)
        got.append(last.tokens)
    return got


def read(engine: TransformersEngine, prompts: Sequence[list[int]]) -> list[KVCache]:
    """A cache for each prompt, that holds it."""
    caches = []
    for tokens in prompts:
        cache = engine._make_cache(engine.layout, engine.model.device)
        engine.run_blocks(tokens, cache)
        caches.append(cache)
    return caches


# ---- as alone


def worst_error(
    plain: TransformersEngine, engine: TransformersEngine, prompts: Sequence[list[int]], steps: int,
    order: Sequence[int] | None = None, off: int = 0,
) -> float:  # fmt: skip
    """The largest difference of logits, together and alone, over forced tokens.

    `order` mixes the rows up, `off` is by how much they mistake where they stand.
    """
    mine, theirs = read(plain, prompts), read(engine, prompts)
    theirs = [theirs[place] for place in order or range(len(prompts))]
    for cache in theirs if off else ():
        cache.get_seq_length = partial(mistaken, cache, off)  # type: ignore[method-assign]  # for one cache
    error = 0.0
    for at in range(steps):
        tokens = [5 + 7 * at + row for row in range(len(prompts))]
        rows = engine.run_together([Step(token, cache) for token, cache in zip(tokens, theirs, strict=True)])
        for token, cache, row in zip(tokens, mine, rows, strict=True):
            error = max(error, float((row - plain._forward([token], cache)).abs().max()))
    return error


def mistaken(cache: KVCache, off: int) -> int:
    return cache.length + off


@pytest.mark.parametrize("budget", [None, "least", "middle"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_tokens_are_those_of_each_alone(
    family: str, budget: str | None, tiny_model: Model, prompt: Prompt
) -> None:
    plain = reference(tiny_model(family), family)
    engine = under(plain, budget, len(LENGTHS))
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    assert worst_error(plain, engine, prompts, 5) < 1e-4
    requests = asked(prompt, [*LENGTHS, 40], [12, 30, 1, 9, 20])
    expected = alone(plain, requests)
    assert len(set(expected[1])) > 3, "a model that repeats itself proves little"
    assert [one.tokens for one in said(engine, requests)] == expected
    if budget is not None:
        assert 0 < shared(engine).memory.peak_bytes <= BUDGETS[budget](plain)


@pytest.mark.parametrize("budget", [None, "middle"])
def test_anothers_kv_or_a_wrong_place_would_be_seen(
    tiny_model: Model, prompt: Prompt, budget: str | None
) -> None:
    """The control of the test before."""
    plain = build(tiny_model(), None)
    engine = under(plain, budget, 3)
    prompts = [prompt(length, seed=1) for length in (20, 30, 31)]  # each the beginning of the next
    assert worst_error(plain, engine, prompts, 2) < 1e-4
    assert worst_error(plain, engine, prompts, 2, order=(0, 2, 1)) > 1e-2
    assert worst_error(plain, engine, prompts, 2, off=1) > 1e-2


@pytest.mark.parametrize(("family", "budget"), [("llama", None), ("gpt-oss", None), ("gemma3", "least")])
def test_one_alone_is_bit_for_bit_that_of_an_engine_without_batches(
    family: str, budget: str | None, tiny_model: Model, prompt: Prompt
) -> None:
    plain = build(tiny_model(family), None, dtype="bfloat16")
    how: dict[str, Any] = {"dtype": "bfloat16"}
    if budget is not None:
        how["kv_device_bytes"] = BUDGETS[budget](plain)
        plain = build(tiny_model(family), None, **how)
    engine = together(tiny_model(family), **how)
    tokens = prompt(PROMPT)
    assert torch.equal(engine.prefill_logits(tokens).logits, plain.prefill_logits(tokens).logits)
    (mine,), (theirs,) = read(plain, [tokens]), read(engine, [tokens])
    for token in (5, 9):
        expected = plain._forward([token], mine)
        assert torch.equal(engine.run_together([Step(token, theirs)])[0], expected)
    assert (
        said(engine, [Request(tokens, max_new_tokens=9)])[0].tokens
        == answer(plain, tokens, max_new_tokens=9).tokens
    )


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("falcon-mqa", "its attention cannot be replaced"),
        ("deepseek-v3", "DeepseekV3Attention attends to more than KV as it is"),
    ],
)
def test_a_model_that_cannot_is_refused_in_one_line(family: str, why: str, tiny_model: Model) -> None:
    with pytest.raises(ModelError) as refused:
        together(tiny_model(family))
    assert str(refused.value) == f"answers of tiny cannot be decoded together: {why}; accepted: batch = 1"
    build(tiny_model(family), None)


def test_a_window_that_the_caches_do_not_have_is_refused(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is attention in chunks, which keeps caches like a window and passes none on."""
    monkeypatch.setattr(rows, "sliding_windows", lambda module: (None, 24, None))
    with pytest.raises(ModelError, match=r"^answers of tiny .* sees None tokens back where 24 are due"):
        together(tiny_model())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_are_mixed_up_or_misplaced_are_seen_when_an_engine_is_made(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    update = rows.RowsLayer.update

    def mixed(self: rows.RowsLayer, keys: torch.Tensor, values: torch.Tensor, *more: Any) -> Any:
        self._layers = self._layers[::-1]
        return update(self, keys, values, *more)

    faults: list[tuple[Any, str, Any]] = [
        (rows.RowsLayer, "update", mixed),
        (rows, "_place", lambda cache: int(cache.get_seq_length()) + 1),
    ]
    for where, name, wrong in faults:
        with monkeypatch.context() as patched:
            patched.setattr(where, name, wrong)
            with pytest.raises(ModelError, match="several sequences say something else than one"):
                together(tiny_model(), dtype=dtype)
    together(tiny_model(), dtype=dtype)


@pytest.mark.parametrize("batch", [0, -1])
def test_a_batch_of_none_is_refused(tiny_model: Model, batch: int) -> None:
    with pytest.raises(ModelError, match=f"batch is {batch}; accepted is 1 or more"):
        together(tiny_model(), batch=batch)


def test_no_larger_batch_than_the_engine_was_made_for(tiny_model: Model) -> None:
    with pytest.raises(ModelError, match=r"a batch of 4 answers; this engine was made for 1 to 3"):
        Batch(together(tiny_model()), 4)


# ---- coming and going


KNOWN: dict[tuple[int, ...], tuple[int, ...]] = {}


@pytest.fixture(scope="module")
def engines(tiny_model: Model) -> dict[str | None, tuple[TransformersEngine, TransformersEngine]]:
    """By budget: an engine of one answer at a time, and one of three."""
    plain = build(tiny_model("gemma3"), None)
    return {budget: (plain, under(plain, budget, 3, FakeStore())) for budget in (None, "middle")}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), budget=st.sampled_from([None, "middle"]))
def test_members_that_come_and_go_leave_the_others_as_they_are(
    engines: dict[str | None, tuple[TransformersEngine, TransformersEngine]],
    prompt: Prompt, data: st.DataObject, budget: str | None,
) -> None:  # fmt: skip
    plain, engine = engines[budget]
    store = engine.prefix._store  # type: ignore[union-attr]
    store.blocks.clear()  # type: ignore[attr-defined]  # what is stored changes how many steps it takes
    batch, got, ended = engine.batch(), {}, set()
    with closing(batch):
        for _ in range(data.draw(st.integers(1, 30))):
            if not batch.full and data.draw(st.integers(0, 2)) == 0:
                length, more = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 12))
                seed = data.draw(st.integers(0, 3))
                got[batch.admit(Request(prompt(length, seed=seed), max_new_tokens=more))] = []
            elif len(batch) and data.draw(st.integers(0, 9)) == 0:
                member = data.draw(st.sampled_from(batch._members))
                batch.drop(member)
            for member, event in batch.step():
                assert not isinstance(event, Exception)
                if isinstance(event, Delta):
                    got[member].append(event.token)
                else:
                    ended.add(member)
    for member, tokens in got.items():
        request = member.request
        key = (*request.tokens, -request.max_new_tokens)
        if key not in KNOWN:
            KNOWN[key] = alone(plain, [request])[0]
        expected = KNOWN[key]
        assert tuple(tokens) == expected[: len(tokens)]
        assert member not in ended or len(tokens) == len(expected)
        assert member.ended
    assert (len(batch), store.leases, store.writes) == (0, 0, 0)


def test_a_step_reads_one_prompt_at_most_and_what_has_ended_makes_room_first(
    tiny_model: Model, prompt: Prompt, fake_store: FakeStore
) -> None:
    engine = together(tiny_model(), fake_store)
    requests = asked(prompt, [10, 11, 12], [2, 30, 30])
    batch = engine.batch()
    members = [batch.admit(one) for one in requests]
    assert batch.full
    with pytest.raises(RequestError, match=r"3 requests are being answered; accepted are 3 at a time"):
        batch.admit(requests[0])

    def seen() -> list[tuple[int, str]]:
        return [(members.index(who), type(one).__name__) for who, one in batch.step()]

    assert seen() == [(0, "Delta")]
    assert seen() == [(1, "Delta"), (0, "Delta")]  # the first one's answer is out
    assert seen() == [(0, "Result"), (1, "Delta")]
    assert members[0].ended
    members.append(batch.admit(requests[0]))
    assert seen() == [(2, "Delta"), (1, "Delta")]
    assert seen() == [(3, "Delta"), (1, "Delta"), (2, "Delta")]
    assert len(seen()) == 3
    batch.close()


def test_a_prompt_is_read_a_block_a_step_beside_the_others(
    tiny_model: Model, prompt: Prompt, fake_store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = together(tiny_model(), fake_store)
    requests = asked(prompt, [10, 3 * BLOCK + 5], [9, 5])
    run_together = engine.run_together

    def slowly(steps: Sequence[Step]) -> Any:
        time.sleep(0.1)
        return run_together(steps)

    monkeypatch.setattr(engine, "run_together", slowly)
    batch = engine.batch()
    members, tokens = steps_until_all_decode(batch, requests[:1])
    members.append(batch.admit(requests[1]))
    tokens.append([])
    for read_blocks in range(1, 4):
        note(batch, members, tokens)
        assert (len(tokens[0]), tokens[1]) == (1 + read_blocks, [])
    note(batch, members, tokens)
    assert (len(tokens[0]), len(tokens[1])) == (5, 1)
    while len(batch):
        note(batch, members, tokens)
    assert [tuple(one) for one in tokens] == alone(build(tiny_model(), None), requests)
    told = fake_store.reports[-1]
    assert told.prefill_s <= told.ttft_s - 0.3, "three steps of the other one were none of its prefill"


def test_the_next_request_is_taken_as_soon_as_one_has_ended(tiny_model: Model, prompt: Prompt) -> None:
    engine = together(tiny_model(), batch=2)
    requests = asked(prompt, [10, 11, 12, 13], [3, 30, 3, 3])
    events = list(engine.generate_together(requests))
    results = [place for place, event in events if isinstance(event, Result)]
    assert results == [0, 2, 3, 1]
    assert sorted({place for place, _ in events}) == [0, 1, 2, 3]


def test_a_request_that_cannot_be_served_is_told_before_anything_runs(
    tiny_model: Model, prompt: Prompt
) -> None:
    engine = together(tiny_model())
    with pytest.raises(RequestError, match="token id 128 is outside"):
        engine.generate_together([Request(prompt(5)), Request([128])])
    assert engine._idle_caches == []
    batch = engine.batch()
    batch.admit(Request(prompt(5), max_new_tokens=2))
    with pytest.raises(RequestError, match="token id 128 is outside"):
        batch.admit(Request([128]))
    assert len(batch) == 1
    batch.close()


def test_caches_are_kept_for_as_many_as_run_at_once(tiny_model: Model, prompt: Prompt) -> None:
    engine = together(tiny_model(), batch=2)
    said(engine, asked(prompt, [10] * 5, [4] * 5))
    first = set(engine._idle_caches)
    assert len(first) == 2
    said(engine, asked(prompt, [10] * 2, [4] * 2))
    assert set(engine._idle_caches) == first


# ---- with a store


@pytest.mark.parametrize("budget", [None, "middle"])
def test_what_is_stored_is_byte_for_byte_what_one_at_a_time_stores(
    tiny_model: Model, prompt: Prompt, budget: str | None
) -> None:
    plain, single, several = build(tiny_model(), None), FakeStore(), FakeStore()
    if budget is None:
        one, engine = build(tiny_model(), single), together(tiny_model(), several)
    else:
        one, engine = offloaded(plain, single, budget), under(plain, budget, 3, several)
    assert one.identity == engine.identity
    requests = asked(prompt, [40, 3 * BLOCK, PROMPT, 5], [40, 20, 30, 30])
    results = said(engine, requests)
    assert [result.tokens for result in results] == alone(one, requests)
    assert len(single.blocks) >= 15
    assert several.blocks == single.blocks
    # The control: what decoding left behind is other bytes.
    tokens = list(requests[0].tokens)
    (cache,) = read(engine, [tokens])
    for token in results[0].tokens:
        engine.run_together([Step(token, cache), *[Step(5, other) for other in read(engine, [[7, 8]])]])
    payload = bytearray(engine.layout.payload_bytes)
    cache.save_block(3, memoryview(payload))
    chain = engine.chain([*tokens, *results[0].tokens])
    assert chain is not None
    assert payload != several.blocks[chain.keys[3]]

    again = said(engine, requests)
    assert [result.reused_tokens for result in again] == [32, 32, 64, 0]
    assert [result.tokens for result in again] == [result.tokens for result in results]
    assert several.blocks == single.blocks


def test_a_member_that_is_dropped_leaves_its_prefill_and_nothing_open(
    tiny_model: Model, prompt: Prompt, fake_store: FakeStore
) -> None:
    engine = together(tiny_model(), fake_store)
    requests = asked(prompt, [3 * BLOCK + 1, 40, 30], [20, 20, 20])
    batch = engine.batch()
    members = [batch.admit(one) for one in requests]
    for _ in range(4):  # a block each
        batch.step()
    batch.drop(members[0])  # with its first token
    batch.drop(members[0])  # once is enough
    assert len(fake_store.blocks) == 3
    for _ in range(4):
        batch.step()
    batch.drop(members[1])  # in the midst of its answer
    batch.close()  # the third in the midst of its prompt
    assert (fake_store.leases, fake_store.writes, len(batch)) == (0, 0, 0)
    assert all(member.ended for member in members)
    assert len(fake_store.blocks) == 3 + 2 + 1
    assert len(engine._idle_caches) == 2, "the third took the first one's"
    events = engine.generate_together(requests)
    next(events), next(events)
    events.close()  # type: ignore[attr-defined]  # it is a generator
    assert (fake_store.leases, fake_store.writes) == (0, 0)
    assert [one.tokens for one in said(engine, requests)] == alone(build(tiny_model(), None), requests)


def test_nobody_waits_for_room_beside_others(
    tiny_model: Model, prompt: Prompt, fake_store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = together(tiny_model(), fake_store)
    begin_store, deadlines = fake_store.begin_store, []

    def begun(*given: Any, deadline_s: float, **more: Any) -> Any:
        deadlines.append(deadline_s)
        return begin_store(*given, deadline_s=deadline_s, **more)

    monkeypatch.setattr(fake_store, "begin_store", begun)
    fake_store.crowded = True
    batch = engine.batch()
    requests = asked(prompt, [2 * BLOCK, 5], [2 * BLOCK, 90])
    members, tokens = steps_until_all_decode(batch, requests)
    while not members[0].ended:
        note(batch, members, tokens)
    assert deadlines == [0.0, 0.0], "the prompt at once, and again; what cannot be reached is not settled"
    assert fake_store.faults_fired == 2
    fake_store.crowded = False
    batch.close()
    # The prompt is stored by now, so that its answer is settled.
    engine.prefill_logits(requests[0].tokens)
    deadlines.clear()
    batch = engine.batch()
    members, tokens = steps_until_all_decode(batch, requests)
    while not members[0].ended:
        note(batch, members, tokens)
    assert len(deadlines) > 0
    assert set(deadlines) == {0.0}
    batch.close()
    # The control: who is alone does wait.
    fake_store.blocks.clear()
    deadlines.clear()
    fake_store.crowded = True
    assert said(engine, requests[:1])[0].stored_blocks == 4
    assert max(deadlines) > 0


def test_an_answer_is_settled_a_block_a_step_beside_the_others(
    tiny_model: Model, prompt: Prompt, fake_store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = together(tiny_model(), fake_store)
    requests = asked(prompt, [10, 20], [4 * BLOCK, 90])
    run_together = engine.run_together

    def slowly(steps: Sequence[Step]) -> Any:
        if len(steps) == 1:
            time.sleep(0.1)
        return run_together(steps)

    batch = engine.batch()
    members, tokens = steps_until_all_decode(batch, requests)
    while len(tokens[0]) < requests[0].max_new_tokens:
        note(batch, members, tokens)
    monkeypatch.setattr(engine, "run_together", slowly)
    before, results = len(tokens[1]), []
    while not results:
        for member, event in batch.step():
            if isinstance(event, Result):
                results.append(event)
            elif member is members[1]:
                assert isinstance(event, Delta)
                tokens[1].append(event.token)
    assert len(tokens[1]) - before == 4, "four blocks, each beside a step of the other one"
    assert results[0].timing.settle_s < 0.3, "three steps of the other one were none of its settling"
    assert results[0].stored_blocks == 4
    batch.close()
    single = FakeStore()
    alone(build(tiny_model(), single), requests[:1])
    assert single.blocks.items() <= fake_store.blocks.items()


def test_who_leaves_while_its_answer_is_settled_stores_nothing_of_it(
    tiny_model: Model, prompt: Prompt, fake_store: FakeStore
) -> None:
    engine = together(tiny_model(), fake_store)
    requests = asked(prompt, [BLOCK + 3, 20], [4 * BLOCK, 90])
    for settled_blocks in range(1, 4):
        batch = engine.batch()
        members, tokens = steps_until_all_decode(batch, requests)
        while len(tokens[0]) < requests[0].max_new_tokens:
            note(batch, members, tokens)
        stored = dict(fake_store.blocks)
        for _ in range(settled_blocks):
            note(batch, members, tokens)
        assert not members[0].ended
        batch.drop(members[0])
        assert fake_store.blocks == stored
        assert len(stored) == 2, "the prompts' own"
        assert len(engine._idle_caches) == 1
        assert engine._idle_caches[0].length == 0
        batch.close()
        assert (fake_store.leases, fake_store.writes, engine.prefix.faults) == (0, 0, 0)  # type: ignore[union-attr]
    assert [one.tokens for one in said(engine, requests)] == alone(build(tiny_model(), None), requests)
    assert len(fake_store.blocks) > 2, "the control: who stays has it stored"


def test_chunks_are_reused_in_a_batch_as_alone(tiny_model: Model, prompt: Prompt) -> None:
    def made(batch: int) -> TransformersEngine:
        return build(tiny_model(), FakeStore(), load_always=True, chunks=ChunkReuse(2), batch=batch)

    first, second = prompt(48, 2), prompt(40, 3)
    requests = []
    for before in (5, 9, 12):
        tokens = [*prompt(before, before), *first, 7, *second, *prompt(9, 4)]
        spans = ((before, before + 48), (before + 49, before + 89))
        requests.append(Request(tokens, max_new_tokens=12, chunks=spans))
    expected = alone(made(1), requests)
    results = said(made(3), requests)
    assert [result.tokens for result in results] == expected
    assert results[2].reused_tokens > 0
    exact = alone(build(tiny_model(), None), requests)
    assert exact != expected, "the control: what is reused is near, not exact"


# ---- under a policy


@pytest.mark.parametrize("name", ["h2o", "landmark", "quest"])
def test_policies_answer_in_a_batch_as_alone(tiny_model: Model, prompt: Prompt, name: str) -> None:
    def made(batch: int) -> TransformersEngine:
        return build(tiny_model("gemma3"), None, policy=LossyAttention(name, 0.2), batch=batch)

    requests = asked(prompt, [83, 64, 90], [9, 70, 12])
    requests.append(requests[0])
    engine = made(3)
    assert [one.tokens for one in said(engine, requests)] == alone(made(1), requests)
    assert alone(build(tiny_model("gemma3"), None), requests) != alone(engine, requests), "the control"
    assert engine.selecting is not None
    assert engine.selecting.memory.held_bytes == 0


@pytest.mark.parametrize("name", ["h2o", "landmark"])
def test_a_member_for_which_the_device_has_no_room_ends_alone(
    tiny_model: Model, prompt: Prompt, name: str
) -> None:
    """In its first step, where the policy decides, and later, where its answer needs more room."""
    policy = LossyAttention(name, 0.2)
    requests = asked(prompt, [83, 90, 300], [100, 80, 30])
    unlimited = build(tiny_model(), None, policy=policy, batch=3)
    expected = alone(unlimited, requests[:2])
    assert unlimited.selecting is not None
    most = unlimited.selecting.device_peak_bytes
    reasons = set()
    engine = build(tiny_model(), None, policy=policy, batch=3, kv_device_bytes=4 * most)
    assert engine.selecting is not None
    for limit in range(most, 3 * most, most // 3):
        engine.selecting.memory.limit_bytes = limit
        batch = engine.batch()
        members = [batch.admit(one) for one in requests]
        tokens: dict[Member, list[int]] = {member: [] for member in members}
        faults: dict[Member, Exception] = {}
        while len(batch):
            for member, event in batch.step():
                if isinstance(event, Delta):
                    tokens[member].append(event.token)
                elif isinstance(event, Exception):
                    faults[member] = event
        for member, fault in faults.items():
            assert isinstance(fault, RequestError)
            assert "is needed on the device" in str(fault)
            reasons.add("at first" if len(tokens[member]) == 1 else "later")
        for member, right in zip(members, expected, strict=False):
            assert tuple(tokens[member]) == right[: len(tokens[member])]
            assert member in faults or len(tokens[member]) == len(right)
        assert engine.selecting.memory.held_bytes == 0
        assert engine.selecting.memory.peak_bytes <= limit
    assert reasons == {"at first", "later"}


# ---- faults


def steps_until_all_decode(batch: Batch, requests: Sequence[Request]) -> tuple[list[Member], list[list[int]]]:
    members = [batch.admit(one) for one in requests]
    tokens: list[list[int]] = [[] for _ in members]
    while not all(tokens):
        note(batch, members, tokens)
    return members, tokens


def note(batch: Batch, members: list[Member], tokens: list[list[int]]) -> dict[int, Exception]:
    """Take a step; keep the tokens, return the faults."""
    faults = {}
    for member, event in batch.step():
        if isinstance(event, Exception):
            faults[members.index(member)] = event
        elif isinstance(event, Delta):
            tokens[members.index(member)].append(event.token)
    return faults


def test_a_fault_in_the_shared_step_ends_all_of_it_and_nobody_else(
    tiny_model: Model, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    for budget in (None, "least"):
        plain = build(tiny_model(), None)
        engine = under(plain, budget, 3)
        requests = asked(prompt, [40, 20, 33], [12, 12, 12])
        batch = engine.batch()
        members, tokens = steps_until_all_decode(batch, requests[:2])
        members.append(batch.admit(requests[2]))
        tokens.append([])
        # In the midst of the model, when a layer has got its tokens and others not.
        fail_in_layer(monkeypatch, engine, 1)
        faults = note(batch, members, tokens)
        assert set(faults) == {0, 1}
        assert all(str(fault) == "in the midst" for fault in faults.values())
        assert [member.ended for member in members] == [True, True, False]
        monkeypatch.undo()
        while len(batch):
            assert note(batch, members, tokens) == {}
        expected = alone(plain, requests)
        assert tuple(tokens[2]) == expected[2]
        assert [one.tokens for one in said(engine, requests)] == expected


def fail_in_layer(monkeypatch: pytest.MonkeyPatch, engine: TransformersEngine, number: int) -> None:
    """Let several tokens of one step fail there, and not those of a prompt."""
    attention = engine.model.module.model.layers[number].self_attn
    forward = attention.forward

    def failing(*given: Any, **named: Any) -> Any:
        if named["hidden_states"].shape[0] > 1:
            raise RuntimeError("in the midst")
        return forward(*given, **named)

    monkeypatch.setattr(attention, "forward", failing)


def failing_at(tokens: int) -> Callable[[KVCache], None]:
    """Room for a token is there as long as there are fewer."""

    def make_room(cache: KVCache) -> None:
        if cache.length == tokens:
            raise MemoryError("no more")

    return make_room


def test_memory_that_runs_out_for_one_ends_that_one(
    tiny_model: Model, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, plain = together(tiny_model()), build(tiny_model(), None)
    requests = asked(prompt, [40, 20, 33], [12, 12, 12])
    batch = engine.batch()
    members, tokens = steps_until_all_decode(batch, requests)
    monkeypatch.setattr(KVCache, "make_room", failing_at(34))
    faults: dict[int, Exception] = {}
    while len(batch):
        faults |= note(batch, members, tokens)
    assert {place: str(fault) for place, fault in faults.items()} == {2: "no more"}
    expected = alone(plain, requests[:2])
    assert [tuple(one) for one in tokens[:2]] == expected


def test_a_fault_is_raised_once_the_others_are_answered(
    tiny_model: Model, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, plain = together(tiny_model()), build(tiny_model(), None)
    requests = asked(prompt, [40, 20, 33], [12, 12, 12])
    monkeypatch.setattr(KVCache, "make_room", failing_at(34))
    got: list[tuple[int, tuple[int, ...]]] = []

    def take() -> None:
        for place, event in engine.generate_together(requests):
            if isinstance(event, Result):
                got.append((place, event.tokens))

    with pytest.raises(MemoryError, match="no more"):
        take()
    monkeypatch.undo()
    assert sorted(got) == list(enumerate(alone(plain, requests[:2])))


def test_a_prompt_that_is_given_up_is_told_and_stored(
    tiny_model: Model, prompt: Prompt, fake_store: FakeStore
) -> None:
    engine = together(tiny_model(), fake_store)
    requests = asked(prompt, [40, 5 * BLOCK], [12, 12])
    batch = engine.batch()
    members, tokens = [batch.admit(requests[0])], [[], []]
    asked_for = itertools.count()
    members.append(batch.admit(requests[1], stop=lambda: next(asked_for) >= 2))
    faults: dict[int, Exception] = {}
    while len(batch):
        faults |= note(batch, members, tokens)
    assert [(place, type(fault)) for place, fault in faults.items()] == [(1, Stopped)]
    assert members[1].ended
    assert tuple(tokens[0]) == alone(build(tiny_model(), None), requests[:1])[0]
    assert engine.prefill_logits(requests[1].tokens).reused_tokens == 2 * BLOCK
    assert (fake_store.leases, fake_store.writes) == (0, 0)


# ---- what is on the device


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_the_budget_holds_for_all_together(tiny_model: Model, prompt: Prompt, batch: int) -> None:
    plain = build(tiny_model(), None)
    requests = asked(prompt, [75, 60, 20, 75, 33, 90, 40], [10] * 7)
    expected = alone(plain, requests)
    for budget in ("least", "middle"):
        engine = offloaded(plain, None, budget, batch=batch)
        offload = shared(engine)
        assert [one.tokens for one in said(engine, requests)] == expected
        held = [one for share in offload.residents.shares for pair in share.buffers if pair for one in pair]
        assert sum(one.nbytes for one in [*held, *offload.stream._staging]) == offload.memory.peak_bytes
        assert offload.memory.peak_bytes <= BUDGETS[budget](plain)
        assert len(offload.residents.shares) == batch
    assert offload.residents.tokens > 0, "some of each stays"


def test_members_keep_their_share_of_the_device_over_the_steps(
    tiny_model: Model, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = build(tiny_model(), None)
    brought = count_brought(monkeypatch)

    def run(batch: int, at_once: int) -> int:
        """Tokens brought per step once all decode."""
        engine = offloaded(plain, None, "middle", batch=batch)
        assert shared(engine).residents.tokens >= 10
        running = read(engine, [prompt(50, seed=seed) for seed in range(at_once)])
        for turn in range(6):
            if turn == 2:
                brought.clear()
            for first in range(0, at_once, batch):
                engine.run_together([Step(7, cache) for cache in running[first : first + batch]])
        return sum(brought) // 4

    assert run(2, 2) == 0
    assert run(2, 4) > 0, "the control: with more sequences than shares they bring theirs anew"


def count_brought(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    brought: list[int] = []
    copy_rows = resident.copy_rows

    def counting(target: torch.Tensor, source: torch.Tensor) -> None:
        brought.append(source.shape[1])
        copy_rows(target, source)

    monkeypatch.setattr(resident, "copy_rows", counting)
    return brought


def test_a_new_members_prompt_leaves_the_shares_of_the_others(
    tiny_model: Model, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = build(tiny_model(), None)
    engine = offloaded(plain, None, "middle", batch=2)
    brought = count_brought(monkeypatch)
    batch = engine.batch()
    batch.admit(Request(prompt(50, seed=1), max_new_tokens=20))
    batch.step(), batch.step()
    batch.admit(Request(prompt(50, seed=2), max_new_tokens=20))
    batch.step()
    brought.clear()
    batch.step(), batch.step()
    batch.close()
    # The new one's share was filled by its prompt, the first one's is as it was.
    assert sum(brought) <= 2 * len(plain.model.shapes) * BLOCK
    residents = shared(engine).residents
    assert len(residents._free) == 2, "whoever has gone has given its share back"


def test_queries_of_all_rows_move_at_once(
    tiny_model: Model, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = build(tiny_model(), None)
    engine = offloaded(plain, None, "least", batch=3)
    caches = read(engine, [prompt(length, seed=length) for length in (40, 50, 60)])
    moved: list[int] = []

    def counting(tensors: Sequence[torch.Tensor], device: torch.device) -> Any:
        moved.append(len(tensors))
        return list(torch.stack(list(tensors)).clone())  # as if it had gone elsewhere

    def brought(parts: Sequence[Partial], device: torch.device) -> Any:
        return [lying.unpacked(one) for one in counting([lying.packed(one) for one in parts], device)]

    monkeypatch.setattr(lying, "_moved", counting)
    monkeypatch.setattr(lying, "_brought", brought)
    rows = engine.run_together([Step(7, cache) for cache in caches])
    assert moved == [3, 3] * len(plain.model.shapes), "there and back, once a layer"
    mine = read(plain, [prompt(length, seed=length) for length in (40, 50, 60)])
    for cache, row in zip(mine, rows, strict=True):
        torch.testing.assert_close(row, plain._forward([7], cache), atol=1e-4, rtol=0)


@pytest.mark.parametrize("seconds", [0.0, 0.001])
def test_a_streamed_step_brings_pieces_by_layer_and_then_by_sequence(
    tiny_model: Model, prompt: Prompt, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = build(tiny_model(), None)
    engine = offloaded(plain, None, "least", batch=3)
    offload = shared(engine)
    offload.stream_from_tokens = 1
    offload.stream.copier = slow = Slow(seconds)  # spoils what is read too early
    prompts = [prompt(length, seed=length) for length in (20, 50, 35)]
    assert worst_error(plain, engine, prompts, 3) < 1e-4
    assert slow.log.count("copy") > 20
    pieces = offload.stream._pieces
    assert [piece.layer for piece in pieces] == sorted(piece.layer for piece in pieces)
    in_first = [piece.source for piece in pieces if piece.layer == 0]
    assert [len(list(group)) for _, group in itertools.groupby(in_first, key=id)] == [2, 4, 3]
    assert offload.stream.pieces >= len(pieces) * 3
    if not seconds:
        assert offload.stream.ready > 0


def test_a_part_comes_back_from_the_host_as_it_was() -> None:
    part = Partial(torch.randn(2, 3, 5), torch.rand(2, 3, 1), torch.randn(2, 3, 1))
    back = lying.unpacked(lying.packed(part).clone())
    for name in ("total", "weight", "peak"):
        assert torch.equal(getattr(back, name), getattr(part, name))


@pytest.mark.model
def test_the_real_model_answers_in_a_batch_as_alone(model_dir: Path) -> None:
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    how: dict[str, Any] = {"dtype": "float32", "device": "cpu", "block_tokens": 64}
    plain = TransformersEngine(model_dir, None, **how)
    tokens = plain.encode(text)
    requests = [Request(tokens[at : at + length], max_new_tokens=4) for at, length in ((0, 70), (300, 20))]
    budget = plain.layout.token_bytes * 40
    engine = TransformersEngine(model_dir, None, kv_device_bytes=budget, batch=2, **how)
    assert [one.tokens for one in said(engine, requests)] == alone(plain, requests)
    assert worst_error(plain, engine, [list(one.tokens) for one in requests], 1) < 1e-4
    assert 0 < shared(engine).memory.peak_bytes <= budget
