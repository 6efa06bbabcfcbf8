"""Policies in the engine: prompts stay exact and shared, answers are as judged, consent comes first."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.test_engine import BLOCK, Prompt, answer, build

from tiercel.attention.registry import POLICIES, policy_named
from tiercel.attention.running import Setting, TeacherForced
from tiercel.codecs.consent import LossyAttention, lossy_attention
from tiercel.codecs.names import LOSSY
from tiercel.config import Config
from tiercel.engines.transformers import Request, Result, TransformersEngine
from tiercel.engines.transformers.model import load_model
from tiercel.engines.transformers.opening import open_engine
from tiercel.errors import ConfigError, EngineError, ModelError, RequestError

SELECTIVE = [name for name in POLICIES if name not in LOSSY and name != "full"]
SHARE, PROMPT, ANSWER = 0.2, 5 * BLOCK + 3, 2 * BLOCK + 4
# With sinks, without our attention function, and with a cache of something else than keys and values.
REFUSED = {"gpt-oss", "falcon-mqa", "deepseek-v3"}
Model = Callable[..., Path]


def selective(folder: Path, store: Any, name: str, **more: Any) -> TransformersEngine:
    return build(folder, store, policy=LossyAttention(name, SHARE), **more)


def judged(folder: Path, tokens: list[int], name: str, said: Sequence[int]) -> list[int]:
    """The likeliest token at each place of an answer by the definition: all in memory, chosen by masks."""
    forced = TeacherForced(load_model(folder, dtype="float32", device="cpu").module)
    prompt = forced.prefill(torch.tensor([tokens]), [Setting(policy_named(name), SHARE)])
    logits = forced.answer(prompt, 0, torch.tensor([list(said[:-1])])).logits[0]
    return [int(prompt.logits[0].argmax()), *(int(one) for one in logits.argmax(-1))]


@pytest.mark.parametrize("name", SELECTIVE)
def test_answers_are_those_of_the_definition_with_and_without_stored_blocks(
    tiny_model: Model, fake_store: Any, prompt: Prompt, name: str
) -> None:
    tokens = prompt(PROMPT)
    engine = selective(tiny_model(), fake_store, name)
    cold = answer(engine, tokens, max_new_tokens=ANSWER)
    assert list(cold.tokens) == judged(tiny_model(), tokens, name, cold.tokens)
    assert cold.reused_tokens == 0
    again = answer(engine, tokens, max_new_tokens=ANSWER)
    assert again.tokens == cold.tokens
    watched = policy_named(name).watches(PROMPT)
    assert again.reused_tokens == (PROMPT - max(1, watched)) // BLOCK * BLOCK
    exact = answer(build(tiny_model(), None), tokens, max_new_tokens=ANSWER)
    assert name == "fastgen" or exact.tokens != cold.tokens, "the control: the policy changes this answer"


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-window", "gemma3", "gpt2", "gpt-neox"])
def test_families_answer_as_by_the_definition(tiny_model: Model, prompt: Prompt, family: str) -> None:
    tokens, folder = prompt(PROMPT), tiny_model(family)
    engine = selective(folder, None, "landmark")
    said = answer(engine, tokens, max_new_tokens=12).tokens
    assert list(said) == judged(folder, tokens, "landmark", said)


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_attention_of_another_kind_is_refused_in_one_line(tiny_model: Model, family: str) -> None:
    with pytest.raises(ModelError) as caught:
        selective(tiny_model(family), None, "landmark")
    assert "\n" not in str(caught.value)


def test_what_a_policy_lacks_in_a_model_is_said_at_the_start(tiny_model: Model) -> None:
    with pytest.raises(ConfigError, match=r"cannot be re-rotated; accepted: streaming"):
        selective(tiny_model("gpt2"), None, "streaming-rerotated")
    assert selective(tiny_model("llama"), None, "streaming-rerotated").selecting is not None


@pytest.mark.parametrize("name", ["h2o", "landmark"])
def test_a_prompts_blocks_are_exact_and_shared_and_an_answers_are_not_stored(
    tiny_model: Model, fake_store: Any, prompt: Prompt, name: str
) -> None:
    tokens, folder = prompt(PROMPT), tiny_model()
    engine = selective(folder, fake_store, name)
    told = answer(engine, tokens, max_new_tokens=ANSWER)
    after = [*tokens, *told.tokens]
    chain = engine.chain(after)
    assert chain is not None
    assert set(fake_store.blocks) == set(chain.keys[: PROMPT // BLOCK])
    assert told.stored_blocks == PROMPT // BLOCK

    class Other(type(fake_store)):  # type: ignore[misc]
        """A store of its own."""

    exact = build(folder, Other())
    assert exact.identity == engine.identity
    answer(exact, tokens, max_new_tokens=ANSWER)
    kept = exact.prefix._store.blocks  # type: ignore[union-attr]
    assert len(kept) > PROMPT // BLOCK, "the control: an exact engine settles its answer's blocks"
    for key, payload in fake_store.blocks.items():
        assert kept[key] == payload
    shared = build(folder, fake_store)
    hit = answer(shared, tokens, max_new_tokens=ANSWER)
    assert hit.reused_tokens == PROMPT // BLOCK * BLOCK
    assert hit.tokens == answer(build(folder, None), tokens, max_new_tokens=ANSWER).tokens


def test_an_answer_that_becomes_a_prompt_is_computed_and_stored_exactly(
    tiny_model: Model, fake_store: Any, prompt: Prompt
) -> None:
    engine = selective(tiny_model(), fake_store, "landmark")
    tokens = prompt(PROMPT)
    after = [*tokens, *answer(engine, tokens, max_new_tokens=ANSWER).tokens]
    answer(engine, after, max_new_tokens=2)
    exact = build(tiny_model(), fake_store)
    warm = exact.prefill_logits(after)
    assert warm.reused_tokens == (len(after) - 1) // BLOCK * BLOCK
    assert torch.equal(warm.logits, build(tiny_model(), None).prefill_logits(after).logits)


def test_nothing_of_one_answer_is_in_the_next(tiny_model: Model, prompt: Prompt) -> None:
    for name in ("window", "landmark"):
        engine = selective(tiny_model(), None, name)
        first, second = prompt(PROMPT), prompt(3 * BLOCK, seed=1)
        alone = answer(engine, second, max_new_tokens=8).tokens
        left = engine.generate(Request(first, max_new_tokens=8))
        next(left), next(left)
        left.close()
        assert answer(engine, second, max_new_tokens=8).tokens == alone
        assert engine.selecting is not None
        assert engine.selecting.memory.held_bytes == 0


@pytest.mark.parametrize("name", ["h2o", "landmark"])
def test_answers_in_turn_are_those_of_one_after_the_other(
    tiny_model: Model, prompt: Prompt, name: str
) -> None:
    engine = selective(tiny_model(), None, name)
    prompts = [prompt(PROMPT), prompt(4 * BLOCK, seed=1), prompt(7 * BLOCK + 9, seed=2)]
    right = [answer(engine, one, max_new_tokens=8).tokens for one in prompts]
    running = [engine.generate(Request(one, max_new_tokens=8)) for one in prompts]
    for events in zip(*running, strict=True):
        last = events
    assert [one.tokens for one in last if isinstance(one, Result)] == right
    assert engine.selecting is not None
    assert engine.selecting.memory.held_bytes == 0


def test_the_device_is_counted_and_a_limit_holds(tiny_model: Model, prompt: Prompt) -> None:
    tokens, longer = prompt(14 * BLOCK), prompt(30 * BLOCK)
    engine = selective(tiny_model(), None, "landmark")
    answer(engine, tokens, max_new_tokens=8)
    figures = engine.selecting
    assert figures is not None
    assert figures.steps == 7
    assert figures.moved_bytes > 0
    tight = selective(tiny_model(), None, "landmark", kv_device_bytes=figures.device_peak_bytes)
    assert answer(tight, tokens, max_new_tokens=8).tokens
    with pytest.raises(RequestError, match="is needed on the device"):
        answer(tight, longer, max_new_tokens=8)
    assert answer(tight, tokens, max_new_tokens=8).tokens
    tighter = selective(tiny_model(), None, "landmark", kv_device_bytes=figures.device_peak_bytes - 1)
    with pytest.raises(RequestError, match="is needed on the device"):
        answer(tighter, tokens, max_new_tokens=8)
    assert tighter.selecting is not None
    assert tighter.selecting.memory.held_bytes == 0
    answer(engine, longer, max_new_tokens=8)
    assert figures.device_peak_bytes < engine.layout.token_bytes * len(longer) / 1.5


# ---- consent


def config(tmp_path: Path, **settings: object) -> Config:
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return Config.load(
        None, {}, {"ram.size": "8MiB", "model.dtype": "float32", "model.device": "cpu",
                   "model.block_tokens": str(BLOCK)} | named,
    )  # fmt: skip


def report(tmp_path: Path, model: str, rows: list[dict[str, object]]) -> str:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"model": model, "rows": rows}))
    return str(path)


def test_a_policy_starts_only_when_it_was_accepted(tiny_model: Model, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"attention\.policy = landmark changes answers; accepted: --accept"
    ):
        open_engine(tiny_model(), config(tmp_path, attention__policy="landmark"))
    made = config(tmp_path, attention__policy="landmark", store__accept_lossy="yes")
    engine, store = open_engine(tiny_model(), made)
    store.close()
    assert engine.lossy == ("landmark@0.25",)
    engine, store = open_engine(tiny_model(), config(tmp_path))
    store.close()
    assert engine.lossy == ()


def test_a_report_speaks_for_its_model_its_policies_and_their_budgets(
    tiny_model: Model, tmp_path: Path
) -> None:
    rows: list[dict[str, object]] = [{"policy": "landmark", "budget": 0.25}, {"policy": "h2o", "budget": 0.1}]
    mine = report(tmp_path, "tiny", rows)
    told = {"attention__policy": "landmark", "store__accept_lossy": mine}
    engine, store = open_engine(tiny_model(), config(tmp_path, **told))
    store.close()
    assert engine.lossy
    for wrong in ({"attention__policy": "quest"}, {"attention__budget": "0.1"}):
        with pytest.raises(ConfigError, match="says nothing of policy"):
            lossy_attention(config(tmp_path, **told | wrong))
    other = report(tmp_path, "another", rows)
    with pytest.raises(EngineError, match="was judged for another, not for model 'tiny'"):
        open_engine(tiny_model(), config(tmp_path, **told | {"store__accept_lossy": other}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"attention__policy": "lndmark"}, "policy 'lndmark' is unknown"),
        ({"attention__policy": "int8"}, "policy 'int8' is a codec of tiers"),
        ({"attention__budget": "0"}, "a share above 0, up to 1"),
        ({"attention__budget": "1.5"}, "a share above 0, up to 1"),
        ({"attention__budget": "1.2.3"}, "a share above 0, up to 1"),
    ],
)
def test_mistakes_are_named_before_a_model_is_loaded(
    tmp_path: Path, settings: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        open_engine(tmp_path / "no-model", config(tmp_path, store__accept_lossy="yes", **settings))
