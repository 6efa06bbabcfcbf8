"""Models whose layers have a sliding window of their own: what a verdict says where no policy can act."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tiercel.attention.registry import policies_named
from tiercel.attention.running import TeacherForced
from tiercel.eval.page import charts_of
from tiercel.eval.run import Judged, evaluate
from tiercel.eval.samples import Sample, Task, Turn
from tiercel.eval.verdict import verdicts

POLICIES = ("full", "window", "landmark", "int8")


class Letters:
    """A tokenizer whose tokens are single characters."""

    all_special_ids: Sequence[int] = ()

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(one) % 60 for one in text]}

    def decode(self, tokens: Any) -> str:
        return "".join(chr(65 + int(token)) for token in tokens)


def judged(*kinds: str) -> Judged:
    """A model with a layer of each of these kinds."""
    torch.manual_seed(1)
    config = Gemma3TextConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=len(kinds), head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, sliding_window=8,
        layer_types=list(kinds), query_pre_attn_scalar=8,
    )  # fmt: skip
    return Judged(TeacherForced(Gemma3ForCausalLM(config).eval()), Letters(), None)


TASK = Task("own", "", True, lambda seed, filler: Sample("a text that is read" * 3, (Turn("who", " me"),)))


@pytest.mark.parametrize("kinds", [("sliding_attention",) * 2, ("sliding_attention", "full_attention")])
def test_where_no_layer_is_left_to_a_policy_it_is_said_to_do_nothing(kinds: tuple[str, ...]) -> None:
    """It is exact there for no merit of its own: nothing that it would do in another model was seen."""
    rows = evaluate(judged(*kinds), policies_named(POLICIES), [0.25], [TASK], [1], lambda *_: "")
    said = verdicts(rows)
    idle = "full_attention" not in kinds
    assert {label: words.startswith("did nothing: every layer has a") for label, words in said.items()} == {
        "full": False, "window @0.25": idle, "landmark @0.25": idle, "int8": idle,
    }  # fmt: skip
    assert said["full"] == "exact: the reference"
    assert bool(charts_of(rows)) is not idle, "nor has it a place among those that save memory"
