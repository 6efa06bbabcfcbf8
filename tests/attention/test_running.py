"""A model under policies: full attention is the model's own, prompts stay as they are, layers keep their
kinds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from tiercel.attention.registry import POLICIES, policies_named
from tiercel.attention.running import Setting, TeacherForced
from tiercel.attention.stored import Stored
from tiercel.attention.window import Full, SlidingWindow
from tiercel.codecs.names import LOSSY
from tiercel.errors import ModelError

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip


def llama(kv_heads: int) -> Any:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=kv_heads)).eval()


def hybrid() -> Any:
    """Sliding and full layers in turn, a sliding one last: it trips who counts layers by number."""
    torch.manual_seed(2)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        **SIZES, num_key_value_heads=2, sliding_window=8, layer_types=kinds, query_pre_attn_scalar=8
    )
    return Gemma3ForCausalLM(config).eval()


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(1, 60, shape, generator=torch.Generator().manual_seed(3))


SELECTIVE = policies_named(name for name in POLICIES if name not in LOSSY)
STORED = [Stored(codec, block_tokens=16) for codec in LOSSY.values()]
EVERY = [Setting(policy, 0.4) for policy in [*SELECTIVE, *STORED]]


@pytest.mark.parametrize("build", [lambda: llama(4), lambda: llama(2), hybrid], ids=["MHA", "GQA", "hybrid"])
def test_full_attention_is_the_models_own(build: Any) -> None:
    module, text = build(), ids(1, 50)
    with torch.inference_mode():
        right = module(input_ids=text).logits[:, 40:]
    forced = TeacherForced(module)
    prompt = forced.prefill(text[:, :40], [Setting(Full(), 1.0)])
    answer = forced.answer(prompt, 0, text[:, 40:])
    assert (answer.logits - right).abs().max() <= 1e-4
    assert answer.read_share == 1.0


@pytest.mark.parametrize("kv_heads", [4, 2], ids=["MHA", "GQA"])
def test_rows_of_a_padded_batch_answer_as_they_do_alone(kv_heads: int) -> None:
    forced, text, new = TeacherForced(llama(kv_heads)), ids(2, 40), ids(2, 6)
    settings = [one for one in EVERY if one.policy.name != "streaming-rerotated"]
    real = torch.ones(2, 40, dtype=torch.bool)
    real[1, :17] = False
    both = forced.prefill(text, settings, real=real)
    alone = [forced.prefill(text[:1], settings), forced.prefill(text[1:, 17:], settings)]
    for number, setting in enumerate(settings):
        together = forced.answer(both, number, new).logits
        assert torch.isfinite(together).all()
        for row in range(2):
            single = forced.answer(alone[row], number, new[row : row + 1]).logits
            assert (together[row] - single[0]).abs().max() <= 1e-3, f"{setting.policy.name}, row {row}"


def test_a_policy_changes_the_answer_and_the_prompt_survives_every_answer() -> None:
    """D53: a stored prompt that is handed out must not grow or change."""
    forced, text, new = TeacherForced(llama(2)), ids(1, 40), ids(1, 6)
    settings = [Setting(Full(), 1.0), *EVERY]
    prompt = forced.prefill(text, settings)
    before = [(one.keys.clone(), one.values.clone()) for one in prompt.layers]
    first = [forced.answer(prompt, number, new).logits for number in range(len(settings))]
    again = [forced.answer(prompt, number, new).logits for number in range(len(settings))]
    for (keys, values), layer in zip(before, prompt.layers, strict=True):
        assert torch.equal(keys, layer.keys)
        assert torch.equal(values, layer.values)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    cold = forced.answer(forced.prefill(text, settings), 0, new).logits
    assert torch.equal(first[0], cold)
    changed = {
        s.policy.name for s, one in zip(settings, first, strict=True) if not torch.equal(one, first[0])
    }
    assert {"window", "h2o", "quest", "landmark", "oracle", "int8"} <= changed


def test_a_models_own_window_layers_stay_and_the_others_obey() -> None:
    """D54: what belongs to a layer is found by its own number, whichever layers are left out."""
    forced, text = TeacherForced(hybrid()), ids(1, 40)
    prompt = forced.prefill(text, [Setting(SlidingWindow(), 0.25), Setting(Full(), 1.0)])
    assert [sorted(one) for one in prompt.prepared] == [[1], [1]]
    assert forced.answer(prompt, 0, ids(1, 3)).read_share == 0.25
    share = prompt.bytes_of(0).device / prompt.full_bytes
    assert share == pytest.approx((1 + 1 + 0.25) / 3)


def test_rerotated_sinks_are_keys_of_their_new_positions() -> None:
    module = llama(2)
    forced, text = TeacherForced(module), ids(1, 30)
    prompt = forced.prefill(text, [Setting(policies_named(["streaming-rerotated"])[0], 1 / 3)])
    moved = prompt.prepared[0][0].keys[0, :, :4]  # layer 0: keys depend on token and position alone
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache()
    with torch.inference_mode():
        places = torch.arange(20, 24)[None]
        module(input_ids=text[:, :4], position_ids=places, past_key_values=cache, use_cache=True)
    right: torch.Tensor = next(iter(cache.layers)).keys  # type: ignore[attr-defined]
    assert (moved - right[0]).abs().max() <= 1e-4


def test_the_model_still_runs_by_itself_afterwards() -> None:
    module, text = llama(2), ids(1, 12)
    with torch.inference_mode():
        right = module(input_ids=text).logits
        TeacherForced(module)
        assert (module(input_ids=text).logits - right).abs().max() <= 1e-4


def test_attention_of_another_kind_is_refused() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(**SIZES, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(ModelError, match="cannot be judged"):
        TeacherForced(GptOssForCausalLM(config).eval())


def test_padding_on_the_right_is_refused() -> None:
    with pytest.raises(ValueError, match="padded on the left"):
        TeacherForced(llama(2)).prefill(ids(1, 4), [], real=torch.tensor([[True, True, True, False]]))
