"""The tables of tiers: from figures to rows, and only between their markers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tiers_page

MACHINE = {"when": "today", "cpu": "a CPU", "cores": 2, "load_before": 0.5}


def arm(median_s: float, read_bytes: float) -> dict[str, Any]:
    return {
        "median_s": median_s, "min_s": median_s / 2, "max_s": median_s * 2, "read_bytes": read_bytes,
        "faster_than_computing": 4.0 / median_s, "cpu_s": {"engine": 1.0, "daemon": 0.25, "servers": 0.5},
    }  # fmt: skip


def results() -> dict[str, Any]:
    at_length = {"computed": arm(4.0, 0), "own": arm(0.1, 0), "valkey": arm(0.2, 183e6)}
    return {
        "machine": MACHINE, "rounds": 3, "ttft": {"2112": at_length, "8000": at_length}, "hits": 6,
        "short_hits": 0, "same_first_token": 6, "writes_lost": 0, "absent": {"mooncake": "not installed"},
    }  # fmt: skip


def test_a_row_for_each_place() -> None:
    table = tiers_page.of_vllm(results())
    row = next(line for line in table.splitlines() if "Valkey" in line)
    assert "0.200 (0.100–0.400)" in row
    assert "20.0×" in row
    assert "| 183 | 1.00 + 0.25 + 0.50 |" in row
    assert "6 of 6; without mooncake: not installed." in table
    assert "reused" not in table


def test_what_was_not_as_it_should_be_is_said() -> None:
    table = tiers_page.of_vllm(results() | {"short_hits": 2, "writes_lost": 1, "same_first_token": 4})
    assert "4 of 6; whole prefix not reused in 2; writes lost: 1" in table


def test_only_what_is_between_the_markers_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{tiers_page.BEGIN}\n\nold\n{tiers_page.END}\nafter\n")
    (tmp_path / "vllm_tiers.json").write_text(json.dumps(results()))
    monkeypatch.setattr(tiers_page, "PAGE", page)
    monkeypatch.setattr(tiers_page, "FOLDER", tmp_path)
    tiers_page.write_page()
    written = page.read_text()
    assert written.startswith(f"before\n{tiers_page.BEGIN}\n\n| TTFT")
    assert written.endswith(f"\n{tiers_page.END}\nafter\n")
    assert "old" not in written


def test_the_page_has_the_markers() -> None:
    text = tiers_page.PAGE.read_text()
    assert text.count(tiers_page.BEGIN) == text.count(tiers_page.END) == 1
