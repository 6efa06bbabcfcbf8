"""`tiercel doctor` as people and scripts meet it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.service.running import environ

from tiercel.cli import run

BASE = ["doctor", "--set", "ram.size=16MiB", "--set", "ram.slot=132KiB"]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def tier(path: Path) -> list[str]:
    return ["--set", f"tiers.0.path={path}", "--set", "tiers.0.size=64MiB"]


def test_it_prints_groups_and_a_sum(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run([*BASE, *tier(tmp_path / "cache")]) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert lines[0] == "host"
    assert f"tier disk: {tmp_path / 'cache'}" in lines
    assert any(line.startswith("  ok    self-test") for line in lines)
    assert " 0 fail" in lines[-1]
    assert told.err == ""


def test_json_has_every_finding_and_the_exit_code_says_whether_one_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    args = [*BASE, "--quick", "--json", "--prefill", "4200", "--model", "llama-3.1-8b"]
    assert run([*args, *tier(tmp_path / "cache")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] in ("ok", "warn")
    assert {"group", "name", "verdict", "value", "unit", "figures", "said", "advice", "took_s"} == set(
        told["checks"][0]
    )
    (tmp_path / "file").write_text("")
    assert run([*args, *tier(tmp_path / "file")]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "fail"


def test_break_even_is_judged_by_what_is_given(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for prefill, verdict in (("1", "ok"), ("1e12", "warn")):
        args = ["--json", "--prefill", prefill, "--model", "llama-3.1-8b"]
        assert run([*BASE, *args, *tier(tmp_path / "cache")]) == 0
        checks = {one["name"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
        assert checks["break-even"]["verdict"] == verdict
        assert "128.0 KiB a token of" in checks["break-even"]["said"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--deadline", "5"], "has no unit"),
        (["--deadline", "0s"], "--deadline: '0s'; accepted: from 100ms to 1h"),
        (["--prefill", "0"], "--prefill"),
        (["--prefill", "nan"], "--prefill: nan"),
        (["--prefill", "inf"], "--prefill: inf"),
        (["--model", "lama-3.1-8b"], "near: "),
        (["--set", "ram.sice=1GiB"], "ram.size"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], args: list[str], said: str) -> None:
    assert run([*BASE, *args]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert said in told.err


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    command = [sys.executable, "-m", "tiercel", *BASE, *tier(cache)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ()) as process:
        until_s = time.monotonic() + 60
        while not list(cache.rglob("*.kv")):
            assert time.monotonic() < until_s
            assert process.poll() is None
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert [name for name in os.listdir(cache) if name != "FORMAT"] == []


def test_a_model_without_attention_and_a_tiny_slot_are_no_accidents(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16,
             "intermediate_size": 128, "conv_kernel": 4, "time_step_rank": 4, "vocab_size": 100}
        )
    )  # fmt: skip
    assert run([*BASE, "--quick", "--model", str(tmp_path / "config.json")]) == 2
    assert "keeps no KV per token" in capsys.readouterr().err
    assert run([*BASE, "--set", "ram.slot=1B", "--json", *tier(tmp_path / "cache")]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] in ("ok", "warn")
