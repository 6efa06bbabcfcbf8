"""Exact attention with less device memory than the KV needs: as full attention says, never over budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.test_engine import BLOCK, Prompt, answer, build, in_turn

from tiercel.attention.device import Lot
from tiercel.config import Config
from tiercel.engines.device import Copier
from tiercel.engines.transformers import TransformersEngine, open_engine
from tiercel.engines.transformers.offload import Offload, lying
from tiercel.engines.transformers.offload.resident import Residents
from tiercel.errors import ModelError

# GPT-BigCode's module still compiles a helper by a call that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
FAMILIES = [
    "llama", "qwen3", "mistral-window", "gemma2", "gemma3", "gpt2", "gpt-neox", "gpt-bigcode", "gpt-oss",
]  # fmt: skip
EVERYTHING = 2**28
PROMPT = 75
LENGTHS = [1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1, PROMPT]


def least(engine: TransformersEngine) -> int:
    """Two pieces of 16 tokens of the widest layer."""
    return 2 * 16 * max(shape.elements for shape in engine.layout.shapes) * engine.layout.dtype.itemsize


def middle(engine: TransformersEngine) -> int:
    """Half of a prompt's KV: some of each layer stays, the rest comes in pieces."""
    return max(least(engine), PROMPT // 2 * engine.layout.token_bytes)


BUDGETS: dict[str, Callable[[TransformersEngine], int]] = {
    "least": least, "middle": middle, "everything": lambda engine: EVERYTHING
}  # fmt: skip


def offloaded(plain: TransformersEngine, store: Any, budget: str, **more: Any) -> TransformersEngine:
    """The model of `plain` under a budget."""
    return build(plain.model.folder, store, kv_device_bytes=BUDGETS[budget](plain), **more)


def shared(engine: TransformersEngine) -> Offload:
    assert engine.offload is not None
    return engine.offload


def reference(folder: Path, family: str, **more: Any) -> TransformersEngine:
    # transformers' sdpa leaves Gemma 2's soft cap out.
    return build(folder, None, attention="eager" if family == "gemma2" else None, **more)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_full_attention(
    family: str, budget: str, tiny_model: Callable[..., Path], prompt: Prompt
) -> None:
    plain = reference(tiny_model(family), family)
    engine = offloaded(plain, None, budget)
    for length in LENGTHS:
        expected = plain.prefill_logits(prompt(length, seed=length)).logits
        got = engine.prefill_logits(prompt(length, seed=length)).logits
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert 0 < shared(engine).memory.peak_bytes <= BUDGETS[budget](plain)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_full_attention(
    family: str, budget: str, tiny_model: Callable[..., Path], prompt: Prompt
) -> None:
    """Decoding where KV lies, and streaming it."""
    plain = reference(tiny_model(family), family)
    expected = answer(plain, prompt(PROMPT), max_new_tokens=30).tokens
    assert len(set(expected)) > 3, "a model that repeats itself proves little"
    engine = offloaded(plain, None, budget)
    for stream_from_tokens in (1, 2):
        shared(engine).stream_from_tokens = stream_from_tokens
        assert answer(engine, prompt(PROMPT), max_new_tokens=30).tokens == expected
    assert shared(engine).memory.peak_bytes <= BUDGETS[budget](plain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_hit_equals_a_cold_run_bit_for_bit(
    family: str, budget: str, dtype: str, tiny_model: Callable[..., Path], prompt: Prompt, fake_store: Any
) -> None:
    plain = build(tiny_model(family), None, dtype=dtype)
    engine = offloaded(plain, fake_store, budget, dtype=dtype)
    tokens = prompt(PROMPT)
    cold = engine.prefill_logits(tokens, store_blocks=False)
    stored = answer(engine, tokens, max_new_tokens=22)
    warm, again = engine.prefill_logits(tokens), answer(engine, tokens, max_new_tokens=22)
    assert (cold.reused_tokens, warm.reused_tokens, again.reused_tokens) == (0, 64, 64)
    assert torch.equal(cold.logits, warm.logits)
    assert again.tokens == stored.tokens
    # The next turn begins with the answer, whose blocks were settled.
    longer = [*tokens, *stored.tokens, *prompt(5, seed=9)]
    warm = engine.prefill_logits(longer)
    assert warm.reused_tokens == 96
    assert torch.equal(engine.prefill_logits(longer, use_cache=False).logits, warm.logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_bytes_do_not_depend_on_what_stays_on_the_device(
    tiny_model: Callable[..., Path], prompt: Prompt, fake_store: Any, dtype: str
) -> None:
    """Pieces of one size give one identity, so the bits had better be equal."""
    plain = build(tiny_model(), None, dtype=dtype)
    payloads = []
    for resident in (0, 40, 512):
        engine = offloaded(plain, fake_store, "least", dtype=dtype)
        give_residents(engine, resident)
        engine.prefill_logits(prompt(PROMPT))
        payloads.append({key: bytes(payload) for key, payload in fake_store.blocks.items()})
        fake_store.blocks.clear()
    assert len(payloads[0]) == PROMPT // BLOCK
    assert payloads[0] == payloads[1] == payloads[2]


def give_residents(engine: TransformersEngine, tokens: int) -> None:
    """Other pieces would be another identity, so only what stays is changed."""
    offload = shared(engine)
    offload.memory.limit_bytes = EVERYTHING
    offload.residents = Residents(engine.layout, offload.windows, Lot(offload.memory), tokens)


def test_pieces_of_another_size_are_another_identity(tiny_model: Callable[..., Path]) -> None:
    plain = build(tiny_model(), None)
    names = [offloaded(plain, None, budget).identity.layout for budget in ("least", "least", "everything")]
    assert names[0] == names[1]
    assert len({plain.identity.layout, *names}) == 3
    # Blocks of one token are cut where what stays on the device ends.
    budgets = (10_000, 11_000)
    single = {
        build(tiny_model(), None, block_tokens=1, kv_device_bytes=one).identity.layout for one in budgets
    }
    blocks = {build(tiny_model(), None, kv_device_bytes=one).identity.layout for one in budgets}
    assert (len(single), len(blocks)) == (2, 1)


def test_too_small_a_budget_is_refused_in_one_line(tiny_model: Callable[..., Path]) -> None:
    plain = build(tiny_model(), None)
    with pytest.raises(ModelError, match=r"^KV device budget 1KiB is too small.*accepted is 8KiB or more$"):
        build(tiny_model(), None, kv_device_bytes=1024)
    with pytest.raises(ModelError, match="too small"):
        build(tiny_model(), None, kv_device_bytes=least(plain) - 1)
    assert least(plain) == 8192
    build(tiny_model(), None, kv_device_bytes=least(plain))


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("falcon-mqa", "KV of tiny cannot be offloaded: its attention cannot be replaced"),
        # It expands what its cache holds before it attends.
        (
            "deepseek-v3",
            "KV of tiny cannot be offloaded: DeepseekV3Attention attends to more than KV as it is",
        ),
    ],
)
def test_a_model_whose_attention_is_its_own_is_refused_in_one_line(
    family: str, said: str, tiny_model: Callable[..., Path]
) -> None:
    with pytest.raises(ModelError) as refused:
        build(tiny_model(family), None, kv_device_bytes=EVERYTHING)
    assert str(refused.value) == said


@pytest.mark.parametrize("budget", BUDGETS)
def test_hits_of_prompts_in_turn_do_not_mix(
    tiny_model: Callable[..., Path], prompt: Prompt, fake_store: Any, budget: str
) -> None:
    """What stays on the device is the running prompt's, also where no step of it filled it."""
    plain = build(tiny_model(), None)
    engine = offloaded(plain, fake_store, budget)
    prompts = [prompt(PROMPT, seed=seed) for seed in range(3)]
    expected = [plain.prefill_logits(tokens).logits for tokens in prompts]
    for turn in range(3):
        for tokens, logits in zip(prompts, expected, strict=True):
            got = engine.prefill_logits(tokens)
            assert got.reused_tokens == (64 if turn else 0)
            torch.testing.assert_close(got.logits, logits, atol=1e-4, rtol=0)


def test_no_tensor_of_kv_lies_on_the_device_uncounted(
    tiny_model: Callable[..., Path], prompt: Prompt
) -> None:
    """All a cache keeps is host memory, asked for as such; the counter counts every other buffer."""
    plain = build(tiny_model(), None)
    engine = offloaded(plain, None, "middle")
    tokens, offload = prompt(PROMPT), shared(engine)
    answer(engine, tokens, max_new_tokens=5)
    buffers = [
        *offload.stream._staging,
        *[one for share in offload.residents.shares for pair in share.buffers if pair for one in pair],
    ]
    assert sum(one.nbytes for one in buffers) == offload.memory.peak_bytes <= middle(plain)
    assert offload.memory.peak_bytes < plain.layout.token_bytes * PROMPT


class Slow(Copier):
    """Takes its time, and notes what it does."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(torch.device("cpu"))
        self.seconds = seconds
        self.log: list[str] = []

    @torch.inference_mode()
    def copy(self, pairs: Any) -> None:
        self.log.append("copy")
        for target, _ in pairs:
            target.fill_(torch.nan)  # whoever looks too early sees it
        time.sleep(self.seconds)
        super().copy(pairs)


@pytest.mark.parametrize("stream_from_tokens", [1, 2])
def test_a_stalled_copy_gives_no_wrong_data(
    tiny_model: Callable[..., Path], prompt: Prompt, stream_from_tokens: int
) -> None:
    """Targets are spoiled first: a read before the copy has ended, or a write under a reader, shows."""
    plain = build(tiny_model(), None)
    engine = offloaded(plain, None, "least")
    shared(engine).stream_from_tokens = stream_from_tokens  # 1: decoding streams, too
    shared(engine).stream.copier = slow = Slow(0.003)
    tokens = prompt(PROMPT)
    got = engine.prefill_logits(tokens).logits
    torch.testing.assert_close(got, plain.prefill_logits(tokens).logits, atol=1e-4, rtol=0)
    expected = answer(plain, tokens, max_new_tokens=8).tokens
    assert answer(engine, tokens, max_new_tokens=8).tokens == expected
    assert slow.log.count("copy") > 20


def test_what_comes_next_is_copied_while_this_is_computed(
    tiny_model: Callable[..., Path], prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every computation on a piece begins after the copy of the following one."""
    engine = offloaded(build(tiny_model(), None), None, "least")
    offload = shared(engine)
    offload.stream.copier = slow = Slow()
    attend = lying.attend

    def waiting(asking: Any, keys: Any, values: Any, start: int) -> Any:
        if start < asking.first and offload.stream._next < len(offload.stream._pieces):
            seen.append(offload.stream._arrival is not None)
            while not offload.stream._arrival.done():  # type: ignore[union-attr]  # it is there
                time.sleep(0.001)
        return attend(asking, keys, values, start)

    seen: list[bool] = []
    monkeypatch.setattr(lying, "attend", waiting)
    before = offload.stream.pieces, offload.stream.ready
    engine.prefill_logits(prompt(4 * BLOCK))
    pieces, ready = offload.stream.pieces - before[0], offload.stream.ready - before[1]
    # Steps of 16 tokens behind 16, 32 and 48, in pieces of 16 tokens, three layers.
    assert (pieces, len(slow.log)) == (3 * (1 + 2 + 3), 18)
    assert seen == [True] * (18 - 3)
    assert ready >= 15


@pytest.mark.parametrize("budget", BUDGETS)
def test_interleaved_answers_do_not_mix(tiny_model: Callable[..., Path], prompt: Prompt, budget: str) -> None:
    plain = build(tiny_model(), None)
    engine = offloaded(plain, None, budget)
    prompts = [prompt(40, seed=1), prompt(50, seed=2)]
    expected = [answer(plain, tokens, max_new_tokens=12).tokens for tokens in prompts]
    assert in_turn(engine, prompts, max_new_tokens=12) == expected
    assert shared(engine).memory.peak_bytes <= BUDGETS[budget](plain)


def test_a_step_that_failed_leaves_nothing_behind(
    tiny_model: Callable[..., Path], prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = build(tiny_model(), None)
    engine = offloaded(plain, None, "least")
    tokens = prompt(PROMPT)
    expected = plain.prefill_logits(tokens).logits
    failing = shared(engine).stream
    take, calls = failing.take, []

    def fail() -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("in the middle of a step")
        return take()

    monkeypatch.setattr(failing, "take", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        engine.prefill_logits(tokens)
    torch.testing.assert_close(engine.prefill_logits(tokens).logits, expected, atol=1e-4, rtol=0)


def test_the_setting_reaches_the_engine(tiny_model: Callable[..., Path]) -> None:
    settings = {"model.kv_device_budget": "64KiB", "model.block_tokens": "16", "ram.size": "8MiB"}
    engine, store = open_engine(tiny_model(), Config.load(environ={}, overrides=settings))
    with store:
        assert shared(engine).memory.limit_bytes == 2**16


@pytest.mark.model
def test_the_real_model_reads_and_answers_alike(model_dir: Path) -> None:
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    how: dict[str, Any] = {"dtype": "float32", "device": "cpu", "block_tokens": 64}
    plain = TransformersEngine(model_dir, None, **how)
    tokens = plain.encode(text)[:260]
    budget = plain.layout.token_bytes * len(tokens) // 4
    engine = TransformersEngine(model_dir, None, kv_device_bytes=budget, **how)
    got, expected = engine.prefill_logits(tokens).logits, plain.prefill_logits(tokens).logits
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    short = {"max_new_tokens": 6}
    assert answer(engine, tokens, **short).tokens == answer(plain, tokens, **short).tokens
    assert 0 < shared(engine).memory.peak_bytes <= budget
    assert shared(engine).stream.pieces > 0
