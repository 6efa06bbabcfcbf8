"""The numbers made from hits and outcomes, and how they are shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.errors import ConfigError
from tiercel.plan.simulate import (
    POLICIES,
    Fleet,
    PrefillCost,
    Prices,
    Report,
    Request,
    TierSpec,
    Trace,
    join_runs,
    policy_hits,
    simulate,
)
from tiercel.plan.simulate.charts import charts
from tiercel.plan.simulate.page import page_html, write_page
from tiercel.plan.simulate.summary import capacity_for_shares, reuse_intervals
from tiercel.plan.simulate.text import interval_text, print_report, tokens_text
from tiercel.report.charts import log_ticks

Make = Callable[..., Trace]
BLOCK = 10**9
PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=25)


@pytest.fixture(scope="module")
def report(make_trace: Make) -> Report:
    """20 prompts of 3 blocks, twice, 10 s apart; one host that stores 90 blocks below a RAM of 6."""
    trace = make_trace([[i, 1, 2] for i in range(20)] * 2, arrivals=[10.0 * i for i in range(40)])
    tiers = (TierSpec("ram", 6 * BLOCK, 1e12), TierSpec("ssd", 90 * BLOCK, 1e12))
    fleet = Fleet(BLOCK, tiers, PrefillCost(0.01), gpus_per_engine=8)
    prices = Prices("2026-11-30", 3.6, {"ssd": 0.2})
    return simulate(
        trace,
        Request(
            block_bytes=BLOCK,
            fleet=fleet,
            prices=prices,
            endurance_bytes={"ssd": 10**15},
            assumptions={"a": "b"},
        ),
    )


def test_the_report_is_json(report: Report) -> None:
    assert json.loads(json.dumps(report.data)) == report.data


def test_trace_facts(report: Report) -> None:
    facts = report.data["trace"]
    assert facts["requests"] == 40
    assert facts["duration_s"] == 390.0
    assert facts["block_references"] == 120
    assert facts["unique_blocks"] == 60
    assert facts["blocks_used_once"] == 0
    assert facts["infinite_cache_block_hit_ratio"] == 0.5


def test_curves_have_all_policies_and_both_ratios(report: Report) -> None:
    assert list(report.data["curves"]) == list(POLICIES)
    for points in report.data["curves"].values():
        assert points[-1]["capacity_bytes"] == 60 * BLOCK
        assert points[-1]["capacity_tokens"] == 240
        for point in points:
            assert point["block_hit_ratio"] + point["block_miss_ratio"] == pytest.approx(1)
            assert point["token_hit_ratio"] == pytest.approx(point["block_hit_ratio"])


def test_drive_wear(report: Report) -> None:
    ssd = report.data["arms"]["admit all"]["tiers"]["ssd"]
    assert ssd["written_bytes"] == 60 * BLOCK
    per_day = 60 * BLOCK / 390 * 86_400
    assert ssd["drive_writes_per_day"] == pytest.approx(per_day / (90 * BLOCK))
    assert ssd["terabytes_written_per_year_per_place"] == pytest.approx(per_day * 365.25 / 1e12)
    assert ssd["years_until_rated_endurance"] == pytest.approx(1e15 / per_day / 365.25)


def test_seen_twice_writes_at_the_second_sight(report: Report) -> None:
    arms = report.data["arms"]
    assert arms["seen twice"]["tiers"]["ssd"]["written_bytes"] == 60 * BLOCK
    assert arms["seen twice"]["block_hit_ratio_by_tier"]["ssd"] == 0
    assert arms["admit all"]["block_hit_ratio_by_tier"]["ssd"] == 0.5


def test_gpu_time_and_money(report: Report) -> None:
    arm = report.data["arms"]["admit all"]
    # Without a cache 40 prompts of 12 tokens at 10 ms; with it, 20 of them only their last token.
    assert report.data["arms"]["no cache"]["gpu_s"] == pytest.approx(8 * 40 * 0.12)
    assert arm["gpu_s_saved"] == pytest.approx(8 * 20 * 0.11)
    assert arm["engine_utilisation"] == pytest.approx(arm["gpu_s"] / 8 / 390)
    money = arm["money"]
    assert money["gpu_saved"] == pytest.approx(8 * 20 * 0.11 / 3600 * 3.6)
    assert money["storage"] == pytest.approx(90 * 0.2 * 390 / (365.25 / 12 * 86_400))
    assert money["saved_after_storage"] == pytest.approx(money["gpu_saved"] - money["storage"])
    assert money["per_million_input_tokens"] == pytest.approx((money["gpu"] + money["storage"]) / (480 / 1e6))
    assert money["tiers_without_price"] == ["ram"]


def test_percentiles_come_from_the_samples(report: Report) -> None:
    assert report.data["arms"]["no cache"]["ttft_s"] == pytest.approx({"p50": 0.12, "p90": 0.12, "p99": 0.12})
    assert report.data["arms"]["admit all"]["ttft_s"]["p90"] == pytest.approx(0.12)


@given(prompts=PROMPTS)
def test_reuse_intervals_count_every_reuse(make_trace: Make, prompts) -> None:
    trace = make_trace(prompts, arrivals=[40.0 * i for i in range(len(prompts))])
    last: dict[int, float] = {}
    waits = []
    for i, now in enumerate(trace.arrival_s.tolist()):
        for block in trace.blocks[trace.offsets[i] : trace.offsets[i + 1]].tolist():
            if block in last:
                waits.append(now - last[block])
            last[block] = now
    rows = reuse_intervals(trace, join_runs(trace))
    for row in rows:
        inside = [w for w in waits if row["from_s"] <= w < (row["to_s"] or float("inf"))]
        assert row["reuses"] == len(inside)
    assert sum(row["share"] for row in rows) == pytest.approx(1 if waits else 0)


@given(prompts=PROMPTS)
def test_shares_are_reached_and_not_with_less(make_trace: Make, prompts) -> None:
    trace = make_trace(prompts)
    runs = join_runs(trace)
    best = len(trace.blocks) - trace.block_count
    rows = capacity_for_shares(trace, lambda sizes: policy_hits("tiercel", trace, runs, sizes), 7)
    assert bool(rows) == bool(best)
    for row in rows:
        enough = row["capacity_blocks"]
        at, below = policy_hits("tiercel", trace, runs, [enough, max(enough - 1, 0)])
        assert at.blocks >= row["share_of_achievable_hits"] * best > below.blocks
        assert row["capacity_bytes"] == 7 * enough


def test_asked_capacities_are_used(make_trace: Make) -> None:
    trace = make_trace([[1], [1]])
    asked = simulate(trace, Request(block_bytes=10, capacities_bytes=[25, 10]))
    assert [p["capacity_blocks"] for p in asked.data["curves"]["opt"]] == [1, 2]
    with pytest.raises(ConfigError, match="the size of a block is unknown"):
        simulate(trace, Request(capacities_bytes=[25]))


@pytest.mark.parametrize("prompts", [[], [[]], [[1]]])
def test_traces_with_nothing_in_them(make_trace: Make, prompts, capsys: pytest.CaptureFixture[str]) -> None:
    trace = make_trace(prompts)
    tiers = (TierSpec("ram", 10, 1.0), TierSpec("ssd", 10, 1.0))
    report = simulate(
        trace,
        Request(block_bytes=1, fleet=Fleet(1, tiers, PrefillCost(0.1)), prices=Prices("2026-11-30", 1, {})),
    )
    json.dumps(report.data, allow_nan=False)
    assert "</html>" in page_html(report.data, report.ttft_s)
    print_report(report.data)
    assert "requests" in capsys.readouterr().out


def test_the_terminal_shows_every_arm_and_assumption(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    print_report(report.data)
    shown = capsys.readouterr().out
    for word in ("no cache", "admit all", "seen", "2026-11-30", "a: b", "s3-fifo"):
        assert word in shown


def test_the_page_needs_nothing_else_and_names_all_it_draws(report: Report) -> None:
    page = page_html(report.data, report.ttft_s)
    for outside in ("<script", "src=", "href=", "url(", "@import"):
        assert outside not in page
    assert page.count('<svg viewBox="0 0 420') == len(charts(report.data, report.ttft_s)) == 4
    assert 'name="viewport"' in page
    for word in ("seconds", "capacity, TB", "share of reuses", "TB per hour"):
        assert word in page


def test_the_page_escapes_what_the_file_was_called(make_trace: Make) -> None:
    data = simulate(make_trace([[1]]), Request()).data
    data["trace"]["source"] = "<b>&.jsonl"
    page = page_html(data, {})
    assert "<b>&" not in page
    assert "&lt;b&gt;&amp;.jsonl" in page


def test_a_page_that_cannot_be_written(report: Report, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--html: .* cannot be written"):
        write_page(tmp_path / "no" / "page.html", report.data, report.ttft_s)


def test_png(report: Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    from tiercel.plan.simulate.png import write_png

    for only in (None, "miss-ratio"):
        path = tmp_path / f"{only}.png"
        write_png(path, report.data, report.ttft_s, only=only)
        assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_png(tmp_path / "no" / "x.png", report.data, report.ttft_s)


@pytest.mark.parametrize(("low", "high", "most"), [(0.03, 30, 8), (1, 2, 3), (5, 5.5, 1), (1e-4, 1e4, 9)])
def test_ticks_lie_on_the_axis(low: float, high: float, most: int) -> None:
    ticks = log_ticks(low, high)
    assert 0 < len(ticks) <= most
    assert all(low * 0.99 <= tick <= high * 1.01 for tick in ticks)


def test_words() -> None:
    assert interval_text({"from_s": 30, "to_s": 60}) == "30 s – 1 min"
    assert interval_text({"from_s": 604800, "to_s": None}) == "over 7 d"
    assert tokens_text(4_250_000) == "4.25M"
    assert tokens_text(12) == "12"
