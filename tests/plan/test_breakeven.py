"""Break-even: the published and the measured figures come out, and the formulas behave as they must."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.errors import ConfigError
from tiercel.geometry import kv_dtype
from tiercel.plan import breakeven as be
from tiercel.plan.hardware import GPUS, LINKS, Link, gpu_named, link_named
from tiercel.plan.planner_model import load_model, model_cost

PREFIXES = (1024, 8192, 32768, 131072)
# model, active parameters assumed, GB/s needed per H100 at PREFIXES, and per B200 at 8k (bf16, MFU 0.5)
TABLE = [
    ("Llama-2-7B", 6.74e9, (19.0, 16.7, 11.8, 5.4), 37.9),
    ("Llama-3.1-8B", 8.03e9, (4.0, 3.6, 2.6, 1.3), 8.1),
    ("Llama-3.1-70B", 70.6e9, (1.1, 1.1, 0.9, 0.5), 2.4),
    ("Qwen3-30B-A3B", 3.3e9, (6.9, 5.0, 2.5, 0.8), 11.3),
    ("gpt-oss-120b", 5.1e9, (1.8, 1.6, 1.2, 0.6), 3.6),
    ("DeepSeek-V3", 37e9, (0.45, 0.37, 0.22, 0.09), 0.84),
    ("Qwen3.5-27B", 27e9, (0.60, 0.58, 0.54, 0.41), 1.3),
]


def cost_of(name: str, active: float) -> be.ModelCost:
    """The model from the catalogue, recurrent state left out as the table does."""
    cost = model_cost(load_model(name, active_params=active), kv_dtype("bfloat16"))
    return replace(cost, kv_fixed_bytes=0.0)


def h100(tp: int = 1) -> be.Compute:
    return be.Compute(GPUS["h100"].flops["bf16"], 0.5, tp)


@pytest.mark.parametrize(("name", "active", "needed", "b200"), TABLE, ids=[row[0] for row in TABLE])
def test_the_table_of_break_even_bandwidths(
    name: str, active: float, needed: tuple[float, ...], b200: float
) -> None:
    cost = cost_of(name, active)
    for prefix, expected in zip(PREFIXES, needed, strict=True):
        # The table rounds to a tenth (small ones to a hundredth): half of the last digit, beside the 10 %.
        rounding = 0.05 if expected >= 0.5 else 0.005
        found = be.breakeven_bytes_per_s(cost, h100(), prefix) / 1e9
        assert found == pytest.approx(expected, rel=0.1, abs=rounding)
    compute = be.Compute(GPUS["b200"].flops["bf16"])
    assert be.breakeven_bytes_per_s(cost, compute, 8192) / 1e9 == pytest.approx(b200, rel=0.1, abs=0.05)


def test_mooncakes_inequality_for_a_70b_llama_on_eight_a800() -> None:
    node = 8 * GPUS["a800"].flops["bf16"]
    published = be.mooncake_bytes_per_s(hidden=8192, gqa_ratio=8, prefix_tokens=8192, node_flops=node)
    assert published / 1e9 == pytest.approx(6.0, rel=0.05)
    ours = be.breakeven_bytes_per_s(
        cost_of("Llama-3.1-70B", 70.6e9), be.Compute(GPUS["a800"].flops["bf16"], 1.0, 8), 8192
    )
    assert ours / 1e9 == pytest.approx(5.38, rel=0.01)
    assert ours == pytest.approx(published, rel=0.1)


@pytest.mark.parametrize(
    ("name", "active", "link", "expected"),
    [
        ("DeepSeek-V3", 37e9, "10gbe", 16),
        ("Qwen3.5-27B", 27e9, "10gbe", 32),
        ("Llama-3.1-70B", 70.6e9, "10gbe", 5120),
        ("Llama-3.1-8B", 8.03e9, "10gbe", 164_000),
        ("Qwen3-30B-A3B", 3.3e9, "nvme", 4096),
        ("Llama-2-7B", 6.74e9, "nvme", 114_000),
        ("DeepSeek-V3", 37e9, "s3", 384),
        ("Qwen3.5-27B", 27e9, "s3", 688),
        ("Llama-3.1-70B", 70.6e9, "s3", 16_896),
    ],
)
def test_the_shortest_prefix_worth_loading(name: str, active: float, link: str, expected: int) -> None:
    """The table steps through multiples of 16 (short) to 1,024; ours finds the token."""
    found = be.least_prefix_tokens(cost_of(name, active), h100(), LINKS[link])
    step = 16 if expected < 1000 else 1024
    assert found <= expected * 1.01
    assert found == pytest.approx(expected, rel=0.1, abs=step)


def test_llama_2_never_gains_from_ten_gigabits_within_its_context() -> None:
    assert be.least_prefix_tokens(cost_of("Llama-2-7B", 6.74e9), h100(), LINKS["10gbe"]) > 4096


@pytest.mark.parametrize(
    ("name", "active", "first_share", "whole_s"),
    [("Llama-3.1-8B", 8.03e9, 0.36, 0.457), ("Llama-3.1-70B", 70.6e9, 0.15, 1.51)],
)
def test_computing_the_near_part_while_the_far_part_loads(
    name: str, active: float, first_share: float, whole_s: float
) -> None:
    cost, link = cost_of(name, active), Link("x", "6 GB/s", 6e9, 0.0, "host", "")
    first, took_s = be.split(cost, h100(), link, 32768)
    assert first / 32768 == pytest.approx(first_share, abs=0.01)
    assert took_s == pytest.approx(whole_s, rel=0.01)
    assert took_s <= min(be.prefill_s(cost, h100(), 32768), be.load_s(cost, link, 32768)) * 1.001


@pytest.mark.parametrize(
    ("name", "active", "hours"),
    [("Llama-3.1-8B", 8.03e9, 1.0), ("Llama-3.1-70B", 70.6e9, 3.3), ("DeepSeek-V3", 37e9, 9.5)],
)
def test_how_long_keeping_is_cheaper_than_computing(name: str, active: float, hours: float) -> None:
    kept_s = be.keep_s(cost_of(name, active), h100(), 8192, gpu_hour=3.5, gb_month=0.2)
    assert kept_s / 3600 == pytest.approx(hours, rel=0.05)


@given(
    prefix=st.integers(1, 10**6),
    more=st.integers(1, 10**6),
    active=st.floats(1e8, 1e12),
    attention=st.floats(0, 1e8),
    token_bytes=st.floats(1, 1e7),
)
def test_the_needed_bandwidth_never_grows_with_the_prefix(
    prefix: int, more: int, active: float, attention: float, token_bytes: float
) -> None:
    cost = be.ModelCost(active, attention, token_bytes)
    at, later = (be.breakeven_bytes_per_s(cost, h100(), n) for n in (prefix, prefix + more))
    assert later <= at * (1 + 1e-9)


@given(first=st.integers(0, 10**5), second=st.integers(0, 10**5), window=st.integers(1, 10**5))
def test_prefilling_in_two_steps_costs_as_much_as_in_one(first: int, second: int, window: int) -> None:
    cost = be.ModelCost(7e9, 5e5, 1.0, attn_window_flops=3e5, attn_window_tokens=window)
    whole = be.prefill_flops(cost, first + second)
    assert be.prefill_flops(cost, first) + be.prefill_flops(cost, second, first) == pytest.approx(whole)


@given(tokens=st.integers(0, 300), window=st.integers(1, 300))
def test_windowed_attention_counts_the_pairs(tokens: int, window: int) -> None:
    """Against counting one by one: token i sees min(i, window) before it, and half of itself."""
    cost = be.ModelCost(0, 0, 1.0, attn_window_flops=1.0, attn_window_tokens=window)
    counted = sum(min(i, window) for i in range(tokens))
    assert be.prefill_flops(cost, tokens) == pytest.approx(counted, abs=tokens / 2 + 0.51)


@given(rate=st.floats(1e7, 1e12), latency=st.floats(0, 1))
def test_the_least_prefix_is_where_loading_begins_to_win(rate: float, latency: float) -> None:
    cost, link = be.ModelCost(8e9, 5e5, 131072.0), Link("x", "x", rate, latency, "host", "")
    least = be.least_prefix_tokens(cost, h100(), link)
    if math.isinf(least):
        limit = be.PREFIX_LIMIT_TOKENS
        assert be.load_s(cost, link, limit) >= be.prefill_s(cost, h100(), limit)
        return
    tokens = int(least)
    assert be.load_s(cost, link, tokens) < be.prefill_s(cost, h100(), tokens)
    if tokens > 1:
        assert be.load_s(cost, link, tokens - 1) >= be.prefill_s(cost, h100(), tokens - 1)


def test_the_mfu_that_a_measured_time_implies() -> None:
    cost = cost_of("Llama-3.1-8B", 8.03e9)
    time_s = be.prefill_s(cost, be.Compute(989e12, 0.37), 8192)
    assert be.calibrated_mfu(cost, 989e12, 1, 8192, time_s) == pytest.approx(0.37)
    with pytest.raises(ConfigError, match="peak"):
        be.calibrated_mfu(cost, 989e12, 1, 8192, time_s / 10)


def test_unknown_hardware_names_the_nearest() -> None:
    assert gpu_named("NVIDIA H100") is GPUS["h100"]
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        gpu_named("h1000")
    with pytest.raises(ConfigError, match="did you mean '10gbe'"):
        link_named("10gb")


@pytest.mark.parametrize("mfu", [0.0, -0.5, 1.5, math.nan])
def test_an_impossible_mfu_is_refused(mfu: float) -> None:
    with pytest.raises(ConfigError, match="mfu"):
        be.Compute(1e15, mfu)
