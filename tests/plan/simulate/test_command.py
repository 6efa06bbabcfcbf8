"""`tiercel simulate` as typed: what is printed, and one line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiercel.cli import run

FLEET = [
    "--block-bytes",
    "1MB",
    "--prefill",
    "8192=0.9s",
    "--tier",
    "ram=10MB,1GB/s",
    "--tier",
    "ssd=1GB,100MB/s",
]


@pytest.fixture
def trace_file(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    assert run(["simulate", "synth", "--requests", "300", "-o", str(path)]) == 0
    return str(path)


def test_synth_prints_the_same_trace(trace_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "synth", "--requests", "300"]) == 0
    assert capsys.readouterr().out == Path(trace_file).read_text()


def test_without_a_model_there_are_tokens_but_no_bytes(
    trace_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", trace_file, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    point = data["curves"]["tiercel"][-1]
    assert point["capacity_bytes"] is None
    assert point["capacity_tokens"] == data["trace"]["unique_blocks"] * 512
    assert "arms" not in data


def test_with_tiers_hosts_are_simulated(
    trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    assert run(["simulate", trace_file, *FLEET, "--hosts", "3", "--json", "--html", str(page)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data["arms"]) == ["no cache", "admit all", "seen twice"]
    assert data["fleet"]["hosts"] == 3
    assert page.read_text().endswith("</html>\n")


def test_tables_for_people(trace_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", trace_file, *FLEET, "--policies", "tiercel,opt"]) == 0
    shown = capsys.readouterr().out
    assert "hit ratio of an infinite cache" in shown
    assert "s3-fifo" not in shown


def test_rate_compresses_time(trace_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    durations = []
    for rate in ("1", "2"):
        assert run(["simulate", trace_file, "--rate", rate, "--json"]) == 0
        durations.append(json.loads(capsys.readouterr().out)["trace"]["duration_s"])
    assert durations[0] == pytest.approx(2 * durations[1])


def test_bad_lines_skipped_are_reported(trace_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Path(trace_file).open("a") as stream:
        stream.write("{broken\n")
    assert run(["simulate", trace_file]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "line 302: not JSON" in told
    assert run(["simulate", trace_file, "--skip-bad-lines"]) == 0
    assert "bad lines: 1 skipped" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--policies", "lru,arc"], "'arc' is unknown; accepted: tiercel, lru"),
        (["--capacities", "1TB"], "the size of a block is unknown"),
        (["--tier", "ram=1GB,1GB/s"], "--tier needs the size of a block"),
        (["--tier", "ram=1GB,1GB/s", "--block-bytes", "1MB"], "--tier needs the time of prefill"),
        (["--block-bytes", "1000000"], "has no unit"),
        (["--price", "gpu-hour=3", "--prices-as-of", "2026-11-30"], "--price needs at least one --tier"),
        ([*FLEET, "--endurance", "sdd=1TB"], "'sdd=1TB' names no tier; accepted: ram, ssd"),
        (["--hosts", "2000"], "2000"),
        (["--model", "no-such-model"], "no-such-model"),
    ],
)
def test_mistakes_are_one_line(
    trace_file: str, args: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", trace_file, *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert told in captured.err


def test_help_names_both_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--help"]) == 0
    assert "simulate synth" in capsys.readouterr().out
    assert run(["simulate", "synth", "--help"]) == 0
    assert "--zipf" in capsys.readouterr().out
    assert run(["simulate"]) == 2
    assert "Missing argument 'TRACE'" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_file_that_cannot_be_written_costs_no_table(
    trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", trace_file, "--html", "/dev/full"]) == 2
    told = capsys.readouterr()
    assert told.out.startswith("Trace\n")
    assert told.err == "tiercel: error: --html: '/dev/full' cannot be written: No space left on device\n"
    assert run(["simulate", trace_file, "--html", str(tmp_path / "no" / "page.html")]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1), "what can be seen before the work is"
