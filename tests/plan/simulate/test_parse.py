"""What people type about machines."""

from __future__ import annotations

import pytest

from tiercel.errors import ConfigError
from tiercel.plan.simulate import PrefillCost, TierSpec
from tiercel.plan.simulate.machine import machine_of
from tiercel.plan.simulate.parse import fit_prefill, parse_endurance, parse_prices, parse_sizes, parse_tier


def test_tiers() -> None:
    assert parse_tier("ram=1TB,100GB/s") == TierSpec("ram", 10**12, 1e11)
    assert parse_tier("s3=90TB, 1GB/s, 30ms, shared") == TierSpec("s3", 90 * 10**12, 1e9, 0.03, True)


@pytest.mark.parametrize(
    "text",
    "ram ram= =1TB,1GB/s ram=1TB ram=1,1GB/s ram=1TB,1GB ram=1TB,1GB/s,5 ram=-1TB,1GB/s ram=1TB,0GB/s "
    "ram=1TB,1GB/s,1s,private 9=1TB,1GB/s".split(),
)
def test_tiers_that_are_not(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tier(text)
    assert "ram" in str(caught.value) or text in str(caught.value)
    assert "accepted" in str(caught.value)


def test_prices() -> None:
    prices = parse_prices(["gpu-hour=3.50", "ssd=0.2"], "2026-11-30")
    assert prices is not None
    assert (prices.as_of, prices.gpu_hour, prices.gb_month) == ("2026-11-30", 3.5, {"ssd": 0.2})
    assert parse_prices([], None) is None


@pytest.mark.parametrize(
    ("texts", "as_of", "told"),
    [
        (["gpu-hour=3"], None, "--prices-as-of"),
        (["gpu-hour=3"], "yesterday", "'yesterday' is not a date"),
        (["ssd=1"], "2026-11-30", "gpu-hour is missing"),
        (["gpu-hour=-3"], "2026-11-30", "is no amount"),
        (["gpu-hour=nan"], "2026-11-30", "is no amount"),
        (["gpu-hour"], "2026-11-30", "is not understood"),
    ],
)
def test_prices_that_are_not(texts: list[str], as_of: str | None, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_prices(texts, as_of)


def test_sizes_need_units() -> None:
    assert parse_sizes("--capacities", "1GB,2GB") == [10**9, 2 * 10**9]
    with pytest.raises(ConfigError, match=r"--capacities 1GB,2: '2' has no unit"):
        parse_sizes("--capacities", "1GB,2")
    with pytest.raises(ConfigError, match="has no unit"):
        parse_endurance(["ssd=14000"])


def test_prefill_points_are_met() -> None:
    truth = PrefillCost(1e-4, 2e-9)
    points = [f"{n}={truth.seconds(n, 0):.9f}s" for n in (1000, 8000, 32000)]
    found = fit_prefill(points)
    assert found.linear_s == pytest.approx(truth.linear_s, rel=1e-3)
    assert found.quadratic_s == pytest.approx(truth.quadratic_s, rel=1e-3)


def test_few_or_odd_points_never_give_negative_costs() -> None:
    assert fit_prefill(["1000=0.5s"]) == PrefillCost(5e-4)
    assert fit_prefill(["1000=0.5s", "1000=0.5s"]).quadratic_s == 0
    assert fit_prefill(["1000=1s", "2000=1s"]).quadratic_s == 0
    assert fit_prefill(["1000=1s", "2000=16s"]).linear_s == 0


@pytest.mark.parametrize("text", ["1000", "x=1s", "0=1s", "1000=0s", "1000=1", "-5=1s"])
def test_prefill_points_that_are_not(text: str) -> None:
    with pytest.raises(ConfigError, match="--prefill"):
        fit_prefill([text])


def test_a_model_weighs_its_blocks_and_a_gpu_times_them() -> None:
    machine = machine_of(512, model="llama-3.1-70b", gpu="h100", tp=8)
    assert machine.block_bytes == 512 * 327_680
    assert machine.prefill is not None
    # 2 FLOPs per parameter over 8 × 989 TFLOP/s × 0.5, and 4 × 80 layers × 64 heads × 128 per causal pair.
    assert machine.prefill.linear_s == pytest.approx(2 * 70.55e9 / (8 * 989e12 * 0.5), rel=1e-3)
    assert machine.prefill.quadratic_s == pytest.approx(4 * 80 * 64 * 128 / (8 * 989e12 * 0.5))
    assert "h100" in machine.assumptions["prefill"].lower()


def test_layers_with_a_window_are_stored_too_and_states_are_named() -> None:
    assert machine_of(16, model="mistral-7b-v0.1").block_bytes == 16 * 131_072
    hybrid = machine_of(16, model="qwen3.5-27b")
    assert hybrid.block_bytes == 16 * 65_536
    assert "recurrent state" in hybrid.assumptions["block"]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"model": "llama-3.1-8b", "block_bytes": 5}, "--model and --block-bytes"),
        ({"block_bytes": 5, "gpu": "h100"}, "--gpu h100 needs --model"),
        ({"model": "llama-3.1-8b", "gpu": "h100", "prefill_points": ("8=1s",)}, "--gpu and --prefill"),
        ({"model": "llama-3.1-8b", "gpu": "h1000"}, "unknown GPU"),
    ],
)
def test_machines_that_contradict_themselves(said: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        machine_of(16, **said)  # type: ignore[arg-type]
