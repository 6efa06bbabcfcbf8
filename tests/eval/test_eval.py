"""`tiercel eval` on the real model: what is known about the methods shows, and gates decide the exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from tiercel.cli import run
from tiercel.cli.eval import command
from tiercel.errors import ConfigError
from tiercel.eval.results import Report, read_report

pytestmark = pytest.mark.model


def judged(model_dir: Path, folder: Path, *flags: str) -> tuple[int, Report, str]:
    report = folder / "report.json"
    ran = CliRunner().invoke(
        command,
        [str(model_dir), "--json", str(report), *flags],
        standalone_mode=False,
        catch_exceptions=False,
    )
    return int(ran.return_value or 0), read_report(report), ran.output


def figures(report: Report, task: str, field: str) -> dict[str, Any]:
    return {row.policy: getattr(row, field) for row in report.rows if row.task == task}


def test_many_facts_tell_methods_apart(model_dir: Path, tmp_path: Path) -> None:
    """One text, one budget: the order and rough size that longer runs have."""
    code, report, said = judged(
        model_dir, tmp_path, "--policies", "full,window,streaming,h2o,quest,landmark,oracle,int8",
        "--tasks", "json-records", "--seeds", "1", "--max-kl", "0.01", "--html", str(tmp_path / "page.html"),
    )  # fmt: skip
    kl = figures(report, "json-records", "kl")
    assert kl["full"] == 0
    assert kl["window"] > max(kl["streaming"], kl["h2o"])
    assert min(kl["streaming"], kl["h2o"]) > kl["quest"] > 10 * kl["landmark"]
    assert kl["oracle"] <= 0.01
    assert kl["landmark"] <= 0.01
    assert kl["int8"] <= 0.003
    assert figures(report, "json-records", "read_share")["quest"] == pytest.approx(0.25, abs=0.01)
    assert figures(report, "json-records", "accuracy")["full"] > 0.3
    assert code == 1, "four of them do not pass the gate"
    assert len(report.failed) == 4
    assert "landmark @0.25: safe" in said
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    plain = msgspec.json.decode((tmp_path / "report.json").read_bytes())
    assert {row["policy"] for row in plain["rows"]} == set(kl)


def test_own_tasks_and_gates_that_hold(model_dir: Path, tmp_path: Path) -> None:
    task = tmp_path / "mine.jsonl"
    line = {
        "context": "The code of the door is 4711. " * 5,
        "question": "The code of the door is",
        "answer": " 4711",
    }
    task.write_bytes(msgspec.json.encode(line))
    code, report, _ = judged(
        model_dir, tmp_path, "--tasks", "", "--task-file", str(task), "--policies", "full,int8",
        "--seeds", "1,2", "--max-kl", "0.05", "--min-accuracy-drop", "0.5", "--dtype", "float32",
    )  # fmt: skip
    assert figures(report, "mine", "ttft_s") == {"full": None, "int8": None}, (
        "speed is measured when asked for"
    )
    assert code == 0
    assert figures(report, "mine", "accuracy") == {"full": 1.0, "int8": 1.0}
    assert (report.dtype, report.seeds, report.failed) == ("float32", [1, 2], [])
    assert len(report.revision) >= 16


def test_speed_is_of_a_real_generation_with_what_the_policy_keeps(model_dir: Path, tmp_path: Path) -> None:
    task, page = tmp_path / "mine.jsonl", tmp_path / "page.html"
    line = {"context": "The code of the door is 4711. " * 20, "question": "The code is", "answer": " 4711"}
    task.write_bytes(msgspec.json.encode(line))
    _, report, said = judged(
        model_dir, tmp_path, "--tasks", "", "--task-file", str(task), "--policies", "full,h2o,landmark",
        "--seeds", "1", "--speed", "--html", str(page),
    )  # fmt: skip
    rows = {row.policy: row for row in report.rows}
    assert all((row.ttft_s or 0) > 0 and (row.tpot_s or 0) > 0 for row in rows.values())
    token_bytes = 30 * 2 * 3 * 64 * 2
    full, new = token_bytes * rows["full"].context_tokens, token_bytes * 64
    held = figures(report, "mine", "device_bytes")
    assert held["full"] == full + new, "all of the text, and room for new tokens"
    assert held["h2o"] - new < 0.3 * full
    assert held["landmark"] - new < 0.4 * full
    moved = figures(report, "mine", "moved_bytes_per_token")
    assert moved["full"] == moved["h2o"] == 0
    assert moved["landmark"] == rows["landmark"].fetched_bytes_per_token * rows["landmark"].context_tokens
    for column in ("TTFT", "TPOT", "device KV", "moved a token"):
        assert column in said
        assert f">{column}</th>" in page.read_text()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--policies", "qest"], "policy 'qest' is unknown"),
        (["--policies", ","], "--policies: names none"),
        (["--tasks", "nedle"], "--tasks: 'nedle' is unknown"),
        (["--tasks", ""], "--tasks: names none"),
        (["--budget", "0"], "--budget: '0' is not accepted"),
        (
            ["--url", "http://a", "--baseline-url", "http://b", "--speed"],
            "accepted: without MODEL, --max-kl and",
        ),
        (["--budget", "x"], "--budget: 'x' is not accepted"),
        (["--seeds", "1,b"], "--seeds: '1,b' is not accepted"),
        (["--json", "/nowhere/at/all.json"], "--json: directory '/nowhere/at' does not exist"),
        (["--task-file", "/nowhere.jsonl"], "--task-file: '/nowhere.jsonl' cannot be read"),
    ],
)
def test_mistakes_are_named_before_any_work(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CliRunner().invoke(command, flags, standalone_mode=False, catch_exceptions=False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("flag", ["--json", "--html"])
def test_a_file_that_cannot_be_written_costs_no_table(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    """What took minutes to measure is shown before anything else can go wrong."""
    task = tmp_path / "mine.jsonl"
    task.write_bytes(msgspec.json.encode({"context": "A door.", "question": "A", "answer": " door"}))
    asked = ["--tasks", "", "--task-file", str(task), "--policies", "full,int8", "--seeds", "1"]
    assert run(["eval", str(model_dir), *asked, flag, "/dev/full"]) == 2
    told = capsys.readouterr()
    assert "mine: 1 texts" in told.out
    assert "int8: " in told.out
    complaint = f"tiercel: error: {flag}: '/dev/full' cannot be written: No space left on device"
    assert told.err.splitlines()[-1] == complaint


@pytest.mark.soak
@pytest.mark.timeout(1800)  # minutes of one core: longer than most where others use it too
def test_the_measured_values_come_back(model_dir: Path, tmp_path: Path) -> None:
    """Three texts of each task: what docs/eval.md says of them."""
    _, report, _ = judged(
        model_dir, tmp_path, "--tasks", "json-records,kv-list,needle,text-nll",
        "--policies", "full,window,streaming,h2o,snapkv,quest,landmark,landmark-4bit,oracle,int8,int4",
    )  # fmt: skip
    for task in ("json-records", "kv-list"):
        kl = figures(report, task, "kl")
        evicting = [kl[name] for name in ("window", "streaming", "h2o", "snapkv")]
        assert kl["window"] >= max(evicting)
        assert min(evicting) > kl["landmark-4bit"] > kl["landmark"]
        assert kl["quest"] > 10 * kl["landmark"]
        assert kl["landmark"] < 2 * kl["oracle"] + 0.002
        assert kl["int8"] <= 0.003 < kl["int4"]
        right = figures(report, task, "accuracy")
        assert right["landmark"] >= right["full"] - 0.1
        assert right["h2o"] < right["full"] / 2
    records, needle = (figures(report, task, "kl") for task in ("json-records", "needle"))
    assert records["quest"] < min(records[name] for name in ("window", "streaming", "h2o", "snapkv"))
    assert needle["quest"] < records["quest"], "the needle hides what quest loses"
    assert figures(report, "text-nll", "nll_rise")["landmark"] < 0.05
