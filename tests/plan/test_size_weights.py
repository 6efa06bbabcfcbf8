"""Parameter counts against published ones, and bytes by format with the overhead of groups."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tiercel.errors import ConfigError
from tiercel.plan.catalogue import find_model
from tiercel.plan.weights import Parameters, count_parameters, weight_format


def counted(name: str) -> int | None:
    model = find_model(name)
    assert model is not None
    found = count_parameters(name, model.config)
    return None if found is None else found.total


# Parameters as their authors give them, in billions.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.74),
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("llama-3.1-405b", 405.85),
        ("llama-3.2-1b", 1.24),
        ("mistral-7b-v0.1", 7.24),
        ("mixtral-8x7b-v0.1", 46.70),
        ("qwen2.5-7b", 7.62),
        ("qwen3-8b", 8.19),
        ("qwen3-30b-a3b", 30.53),
        ("qwen3-235b-a22b", 235.09),
        ("deepseek-v3", 671.03),
        ("gpt-oss-120b", 116.83),
        ("gemma-2-9b", 9.24),
        ("smollm2-135m", 0.135),
        ("bloom-176b", 176.25),
        ("opt-1.3b", 1.32),
    ],
)
def test_counts_are_the_published_ones(name: str, billions: float) -> None:
    assert (counted(name) or 0) / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_family_without_a_layer_plan_is_not_guessed() -> None:
    assert counted("nemotron-h-56b-base-8k") is None


def test_group_overhead() -> None:
    assert weight_format("awq-int4").bits_per_parameter() == 4 + Fraction(20, 128)
    assert weight_format("nvfp4").bits_per_parameter() == Fraction(9, 2)
    assert weight_format("mxfp4").bits_per_parameter() == Fraction(17, 4)


def test_quantisation_leaves_embeddings_in_16_bits() -> None:
    parameters = Parameters(total=1_280, embedding=256, how="given")
    assert weight_format("bf16").nbytes(parameters) == 2_560
    assert weight_format("fp32").nbytes(parameters) == 5_120
    assert weight_format("awq-int4").nbytes(parameters) == 256 * 2 + 8 * (128 * 4 + 20) // 8


def test_llama_2_7b_in_awq_weighs_what_the_published_files_weigh() -> None:
    model = find_model("llama-2-7b")
    assert model is not None
    parameters = count_parameters("llama", model.config)
    assert parameters is not None
    assert weight_format("awq-int4").nbytes(parameters) / 1e9 == pytest.approx(3.89, rel=0.01)


def test_an_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'int3'; accepted: fp32, bf16"):
        weight_format("int3")
