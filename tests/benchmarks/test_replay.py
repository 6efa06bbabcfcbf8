"""The replay counts through the real store what the simulator counts, and says when there is no trace."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

from benchmarks import replay, replay_page
from tiercel.plan.simulate import Shape, Trace, read_trace, write_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("trace") / "made.jsonl"
    with path.open("w") as out:
        write_trace(out, Shape(requests=120, seed=3))
    return read_trace(path)


def test_the_store_hits_what_the_simulator_says(trace: Trace, tmp_path: Path) -> None:
    results = replay.replay_all(trace, tmp_path, (0.05, 0.3))
    hits = results["hits"]
    assert hits["store"] == hits["tiercel"]
    assert hits["tiers"] == hits["tiercel"]
    assert 0 < hits["store"][0] < hits["store"][1] <= hits["opt"][1]
    assert hits["store"][0] >= hits["fifo"][0]
    assert set(results["tenants"]) == set(replay.TENANTS)
    assert all(0 < count < hits["opt"][1] for count in results["tenants"].values())
    assert set(results["told"]) == {"50%", "75%", "90%", "100%"}
    assert results["told"]["100%"][0] > hits["store"][0]
    untold, told = results["demoted"]["none"], results["demoted"]["100%"]
    assert told[0] > untold[0], "more is found in RAM"
    assert sum(told) == sum(untold) == hits["tiers"][1], "and nothing is lost"
    assert not list(tmp_path.iterdir())


def test_last_prompts_are_those_that_no_later_one_goes_on_with(tmp_path: Path) -> None:
    prompts = [[0, 1, 2, 3], [0, 5, 6], [0, 1, 2, 3, 4], [0, 1, 8, 9, 10], [0, 5, 6]]
    lines = [{"timestamp": 0, "input_length": 512 * len(one), "hash_ids": one} for one in prompts]
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    few = read_trace(path)
    assert replay.last_prompts(few) == [2, 4, 3]
    assert replay.told_prompts(few, 1.0) == {2, 3, 4}
    assert replay.told_prompts(few, 0.0) == set()
    # Told that the first conversation is over, the store has none of it for who comes back all the same.
    assert replay.in_ram(few, 100, over={0}) < replay.in_ram(few, 100)


def test_wrong_bytes_are_not_counted_as_hits(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert replay.in_ram(trace, 500) > 0
    count = itertools.count()
    monkeypatch.setattr(replay, "content", lambda key: next(count).to_bytes(replay.PAYLOAD_BYTES, "big"))
    with pytest.raises(AssertionError, match="wrong bytes"):
        replay.in_ram(trace, 500)


@pytest.mark.parametrize("args", [[], ["--trace", "/nowhere/trace.jsonl"]])
def test_without_a_trace_it_says_so_and_changes_nothing(
    args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["replay", "--page", *args])
    page = replay_page.PAGE.read_text()
    replay.main()
    assert capsys.readouterr().out.startswith("skipped: no trace (")
    assert replay_page.PAGE.read_text() == page


def test_table_plot_and_figures_are_made(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, plot, figures = tmp_path / "page.md", tmp_path / "plot.png", tmp_path / "figures.json"
    page.write_text(f"before\n{replay_page.BEGIN}\nstale\n{replay_page.END}\nafter\n")
    monkeypatch.setattr(replay_page, "PAGE", page)
    made = {name: [10] for name in replay_page.ROWS if name != "half"}
    counts = {"requests": 4, "references": 40, "blocks": 20}
    results = {
        "when": "2026-11-30",
        **counts,
        "shares": [0.5],
        "capacities": [10],
        "hits": made,
        "told": {"90%": [15]},
        "demoted": {"90%": [20, 5]},
        "tenants": {"two": 8},
    }
    monkeypatch.setattr(replay, "replay_all", lambda *_: results)
    source = tmp_path / "trace.jsonl"
    with source.open("w") as out:
        write_trace(out, Shape(requests=3))
    args = ["--trace", str(source), "--page", "--plot", str(plot), "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", ["replay", *args])
    replay.main()
    assert json.loads(figures.read_text()) == results
    assert plot.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "| **Tiercel, RAM** | 25.00% |" in text
    assert "| Tiercel, RAM, told of 90% of the conversations when they are over | 37.50% |" in text
    assert "| 90% | 50.00% | 12.50% |" in text
    assert "| two | 20.00% |" in text
    assert "stale" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
