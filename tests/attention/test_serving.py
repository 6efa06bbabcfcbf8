"""Policies while really generating: the same choices and outputs as when judged, with less on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention.test_policies import DIM, NEW, SELECTIVE, Case, prepare
from tests.attention.test_running import hybrid, ids, llama

from tiercel.attention.call import Call
from tiercel.attention.device import DeviceMemory
from tiercel.attention.generating import Generation
from tiercel.attention.numbers import as_bias, attend, attention_weights
from tiercel.attention.reading import Reading
from tiercel.attention.registry import policies_named, policy_named, servable_policy
from tiercel.attention.running import Prompt, Setting, TeacherForced, seen_by
from tiercel.attention.serving import Served
from tiercel.errors import ConfigError, RequestError

READING = ["quest", "landmark", "landmark-4bit", "oracle"]
CPU = torch.device("cpu")
TOKENS, ANSWER = 70, 7


class Seen(Served):
    """Notes which tokens of the host were asked for, per step and head."""

    def __init__(self, memory: DeviceMemory) -> None:
        super().__init__(memory)
        self.fetched: list[list[set[int]]] = []

    def fetch(self, name: str, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if name in ("keys", "keys codes"):
            self.fetched.append([set(one) for one in index.tolist()])
        return super().fetch(name, rows, index)


def call(given: dict[str, torch.Tensor], new: int) -> Call:
    at = slice(new, new + 1)
    return Call(
        0, given["queries"][..., at, :], given["new_keys"][:, :, at], given["new_values"][:, :, at],
        DIM**-0.5, None, None,
    )  # fmt: skip


def compare(name: str, case: Case, budget: int) -> None:
    """Step by step against all steps at once over a mask, on random KV of one row."""
    given = case.tensors()
    prepared = prepare(name, case, given, torch.full((1, case.kv_heads), budget))
    keys = torch.cat([prepared.keys, given["new_keys"]], 2)
    values = torch.cat([prepared.values, given["new_values"]], 2)
    allowed = seen_by(prepared, given["real"], given["queries"], 0, keys.shape)
    weights = attention_weights(given["queries"], keys, as_bias(allowed)[:, :, None], DIM**-0.5)
    right = attend(weights, values)
    served = Seen(DeviceMemory(CPU))
    served.take(0, prepared)
    for new in range(NEW):
        output = served.attend(call(given, new))
        assert torch.isfinite(output).all()
        assert torch.allclose(output[0, 0], right[0, new], atol=1e-4), f"{name}: output of step {new}"
        if isinstance(prepared, Reading):
            fixed = prepared.recent[0]
            for head in range(case.kv_heads):
                chosen = {int(j) for j in allowed[0, head, new, : case.tokens].nonzero()}
                recent = {int(j) for j in fixed[head].nonzero()}
                assert served.fetched[new][head] == chosen - recent, f"{name}: step {new}, head {head}"


@pytest.mark.parametrize("name", SELECTIVE)
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (2, 3)], ids=["MHA", "GQA"])
def test_chooses_and_answers_as_when_judged(name: str, kv_heads: int, group: int) -> None:
    for budget in (1, 18, 74, 75):
        compare(name, Case((75,), kv_heads, group, 1), budget)


@pytest.mark.parametrize("name", SELECTIVE)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_contexts_of_a_few_tokens(name: str, n: int) -> None:
    for budget in range(1, n + 1):
        compare(name, Case((n,), 1, 2, n), budget)


@settings(max_examples=30)
@given(
    name=st.sampled_from(SELECTIVE), n=st.integers(1, 60), share=st.floats(0.01, 1),
    kv_heads=st.integers(1, 3), group=st.integers(1, 3), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_any_shape_any_budget(name: str, n: int, share: float, kv_heads: int, group: int, seed: int) -> None:
    compare(name, Case((n,), kv_heads, group, seed), max(1, round(n * share)))


@pytest.mark.parametrize("scale", [0.0, 1e-20, 100.0], ids=["zeros", "tiny", "large"])
@pytest.mark.parametrize("name", SELECTIVE)
def test_odd_numbers_give_no_nan(name: str, scale: float) -> None:
    case = Case((20,), 1, 2, 3)
    given = {k: v * scale if v.is_floating_point() else v for k, v in case.tensors().items()}
    served = Served(DeviceMemory(CPU))
    served.take(0, prepare(name, case, given, torch.tensor([[5]])))
    for new in range(NEW):
        assert torch.isfinite(served.attend(call(given, new))).all()


def generate(
    forced: TeacherForced, prompt: Prompt, number: int, new: torch.Tensor, limit: int | None = None
) -> tuple[torch.Tensor, Generation, DeviceMemory]:
    """Logits behind each of `new`, fed one by one."""
    memory = DeviceMemory(CPU, limit)
    generation = Generation(forced, prompt, number, memory)
    logits = torch.stack([generation.step(int(token)) for token in new[0]])
    return logits, generation, memory


@pytest.mark.parametrize("build", [lambda: llama(4), lambda: llama(2), hybrid], ids=["MHA", "GQA", "hybrid"])
def test_a_model_generates_as_it_is_judged(build: Any) -> None:
    forced, text, new = TeacherForced(build()), ids(1, TOKENS), ids(1, ANSWER)
    names = [one for one in SELECTIVE if one != "streaming-rerotated" or build is not hybrid]
    chosen = [Setting(policy, 0.3) for policy in policies_named(names)]
    prompt = forced.prefill(text, chosen)
    before = [(one.keys.clone(), one.values.clone()) for one in prompt.layers]
    for number, setting in enumerate(chosen):
        right = forced.answer(prompt, number, new).logits[0]
        logits, _, _ = generate(forced, prompt, number, new)
        assert (logits - right).abs().max() <= 1e-4, setting.policy.name
    for (keys, values), layer in zip(before, prompt.layers, strict=True):
        assert torch.equal(keys, layer.keys)
        assert torch.equal(values, layer.values)


def new_bytes(prompt: Prompt) -> int:
    """Room for the first 64 new tokens."""
    return sum(
        64 * one.shape[1] * one.shape[-1] * 4 for layer in prompt.layers for one in (layer.keys, layer.values)
    )


@pytest.mark.parametrize("name", SELECTIVE)
def test_the_device_holds_what_the_policy_says_and_not_a_byte_beyond_a_limit(name: str) -> None:
    forced, new = TeacherForced(llama(2)), ids(1, ANSWER)
    prompt = forced.prefill(ids(1, 200), [Setting(policy_named(name), 0.25)])
    _, generation, memory = generate(forced, prompt, 0, new)
    peak, told = memory.peak_bytes, prompt.bytes_of(0)
    # The definition has what a step fetches in every layer at a time; here one buffer is enough.
    assert peak - new_bytes(prompt) <= told.device + (0 if name != "landmark-4bit" else told.fetched * 8)
    if name not in ("full", "fastgen", "oracle"):
        assert peak - new_bytes(prompt) < 0.45 * prompt.full_bytes
    assert generation.served.moved_bytes == told.fetched * ANSWER
    assert (generation.served.moved_bytes > 0) == (name in READING)
    generation.served.close()
    assert memory.held_bytes == 0
    generate(forced, prompt, 0, new, limit=peak)  # the control
    with pytest.raises(RequestError, match=f"accepted: {peak - 1}"):
        generate(forced, prompt, 0, new, limit=peak - 1)


def test_long_answers_keep_every_new_token() -> None:
    forced, text, new = TeacherForced(llama(2)), ids(1, 30), ids(1, 150)
    prompt = forced.prefill(text, [Setting(policy_named("landmark"), 0.3)])
    right = forced.answer(prompt, 0, new).logits[0]
    logits, _, _ = generate(forced, prompt, 0, new)
    assert (logits - right).abs().max() <= 1e-4


def test_codecs_of_tiers_are_no_policies_for_serving() -> None:
    assert servable_policy("landmark").name == "landmark"
    with pytest.raises(ConfigError, match="'int8' is a codec of tiers"):
        servable_policy("int8")
    with pytest.raises(ConfigError, match="'lndmark' is unknown"):
        servable_policy("lndmark")


def test_padded_rows_are_not_generated() -> None:
    forced, real = TeacherForced(llama(2)), torch.tensor([[False, True, True]])
    prompt = forced.prefill(ids(1, 3), [Setting(policy_named("full"), 1.0)], real=real)
    with pytest.raises(ValueError, match="without padding"):
        Generation(forced, prompt, 0, DeviceMemory(CPU))
