"""Figures of traffic that never repeats: the ratio, its interval, and the rows made of them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks import no_reuse, page


def test_equal_arms_are_one_with_no_doubt() -> None:
    assert no_reuse.interval([1.0] * 9, [1.0] * 9) == {"of_no_cache": 1.0, "low": 1.0, "high": 1.0}


def test_the_interval_holds_the_ratio_and_grows_with_the_noise() -> None:
    pick = random.Random(1)

    def measured(noise: float) -> dict[str, float]:
        base = [pick.uniform(1 - noise, 1 + noise) for _ in range(50)]
        return no_reuse.interval(base, [1.25 * pick.uniform(1 - noise, 1 + noise) for _ in range(50)])

    calm, busy = measured(0.01), measured(0.3)
    assert calm["of_no_cache"] == pytest.approx(0.8, abs=0.01)
    for one in (calm, busy):
        assert one["low"] < one["of_no_cache"] < one["high"]
    assert calm["high"] - calm["low"] < (busy["high"] - busy["low"]) / 5


def test_prompts_are_unique() -> None:
    assert len({tuple(no_reuse.unique(264, number)) for number in range(-3, 200)}) == 203


def test_a_row_for_each_admission() -> None:
    arm: dict[str, Any] = {
        "throughput": {"of_no_cache": 0.991, "low": 0.985, "high": 0.997},
        "written_bytes": 5.9e9, "admitted_bytes": 5.9e9, "repeated": {"prompts": 20, "found": [20, 20]},
    }  # fmt: skip
    seldom = arm | {"written_bytes": 0, "admitted_bytes": 0, "repeated": {"prompts": 20, "found": [0, 20]}}
    results = {
        "machine": {"when": "today", "cpu": "a CPU", "cores": 2, "load_before": 0.5},
        "prompts": 1000, "tokens": 264, "prompts_per_s": 6.5,
        "arms": {"at-once": arm, "second-sight": seldom},
    }  # fmt: skip
    table = no_reuse.table(results)
    assert "| `at-once` | 99.1% (98.5%–99.7%) | 5.90 GB | 5.90 GB | 20 of 20, 20 of 20 |" in table
    assert "| `second-sight` | 99.1% (98.5%–99.7%) | 0.00 GB | 0.00 GB | 0 of 20, 20 of 20 |" in table
    assert "1,000 prompts of 264 tokens, 6.5 a second without cache; goal: 98%." in table


def test_the_page_has_the_markers() -> None:
    text = page.PAGE.read_text()
    assert text.count(no_reuse.BEGIN) == text.count(no_reuse.END) == 1
