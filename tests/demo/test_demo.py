"""The whole demo on the real model, small; and the ways in which it refuses to start."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiercel.cli import run as run_cli
from tiercel.demo.place import cache_place
from tiercel.demo.run import _documents
from tiercel.demo.settings import DemoSettings
from tiercel.errors import ConfigError, TierError
from tiercel.tiers import FilesTier


@pytest.mark.model
def test_conversations_come_back_from_ram_from_disk_and_after_a_restart(
    tmp_path: Path, model_dir: Path
) -> None:
    rows_file, page_file, cache = tmp_path / "rows.json", tmp_path / "report.html", tmp_path / "cache"
    done = subprocess.run(
        [sys.executable, "-m", "tiercel", "demo", "--quick", "--model", str(model_dir),
         "--cache-dir", str(cache), "--json", str(rows_file), "--html", str(page_file)],
        capture_output=True, text=True, timeout=540,
        # One thread: on a machine that is busy otherwise, two wait for each other most of the time.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(rows_file.read_text())
    rows = written["rows"]
    assert {tuple(row) for row in rows} == {
        ("name", "prompt_tokens", "reused_tokens", "source", "ttft_cold_s", "ttft_s", "speedup",
         "same_answer", "bytes_ram", "bytes_disk")
    }  # fmt: skip
    assert len(rows) == 4
    assert all(row["same_answer"] for row in rows)
    assert all(row["reused_tokens"] >= row["prompt_tokens"] // 2 for row in rows)
    restarted = [row for row in rows if row["name"].endswith("after restart")]
    live = [row for row in rows if row not in restarted]
    assert {row["source"] for row in live} == {"ram", "disk"}
    assert {row["source"] for row in restarted} == {"disk"}
    for row in rows:
        assert (row["bytes_disk"] > 0) == (row["source"] == "disk")
    assert [turn["reused_tokens"] for turn in written["turns"] if turn["number"] == 1] == [0, 0]
    page = page_file.read_text()
    assert not re.search(r"(src|href)=|url\((?!#)|https?://|<script", page)
    assert "Resumed conversations" in done.stdout
    assert [one.name for one in cache.iterdir()] == ["FORMAT"], "the demo's blocks must go, the cache stays"


@pytest.mark.model
def test_a_ram_tier_that_is_too_small(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = [
        "demo",
        "--quick",
        "--model",
        str(model_dir),
        "--cache-dir",
        str(tmp_path / "c"),
        "--ram",
        "2MiB",
    ]
    assert run_cli(asked) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "accepted is " in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ram", "300"], "--ram: '300' has no unit"),
        (["--tokens", "100"], "--tokens 100 is less than one block; accepted: 256 or more"),
        (["--conversations", "0"], "--conversations"),
        (["--dtype", "int8"], "--dtype"),
        (["--json", "nowhere/rows.json"], "--json: directory 'nowhere' does not exist"),
        (["--html", "."], "--html: '.' is a directory"),
        (["--cache-dir", "full"], "not a Tiercel cache"),
        (["--cache-dir", "full/file"], "cache directory"),
        (["--model", "nowhere"], "model folder nowhere does not exist"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("somebody's")
    monkeypatch.setenv("TIERCEL_CACHE_DIR", str(tmp_path / "tiercel"))
    assert run_cli(["demo", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert (tmp_path / "full" / "file").read_text() == "somebody's"


def test_tokens_beyond_the_models_context() -> None:
    engine: Any = SimpleNamespace(model=SimpleNamespace(context_tokens=8192, name="a model"))
    with pytest.raises(
        ConfigError, match=r"--tokens 8000: .* beyond the 8192 tokens of a model; accepted: up to 7"
    ):
        _documents(DemoSettings(tokens=8000, html=None), engine)


def test_a_directory_of_its_own_goes_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCEL_CACHE_DIR", str(tmp_path))
    with cache_place(None, keep=False) as place:
        FilesTier(place.path).close()
        assert place.path.parent == tmp_path
    assert list(tmp_path.iterdir()) == []
    with cache_place(None, keep=True) as place:
        FilesTier(place.path).close()
    assert [one.name for one in tmp_path.iterdir()] == [place.path.name]


def test_what_others_stored_in_a_directory_stays(tmp_path: Path) -> None:
    FilesTier(tmp_path).close()
    mine, other = tmp_path / ("ab" * 8), tmp_path / ("cd" * 8)
    mine.mkdir()
    other.mkdir()
    with cache_place(tmp_path, keep=False) as place:
        place.tag = bytes.fromhex("ab" * 8)
    assert not mine.exists()
    assert other.exists()


def test_no_room_on_disk(tmp_path: Path) -> None:
    with cache_place(tmp_path / "c", keep=False) as place, pytest.raises(TierError, match="are free"):
        place.require_room(1 << 60)


@pytest.mark.parametrize(
    ("given", "conversations", "tokens", "block_tokens"),
    [
        ([], 4, 5000, 256),
        (["--quick"], 2, 800, 64),
        (["--quick", "--tokens", "500"], 2, 500, 64),
        (["--conversations", "3"], 3, 5000, 256),
        (["--document", "a"] * 5, 5, 5000, 256),
        (["--document", "a"] * 3, 4, 5000, 256),
        (["--quick", *["--document", "a"] * 3], 3, 800, 64),
    ],
)
def test_sizes_that_are_not_given(
    given: list[str], conversations: int, tokens: int, block_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[DemoSettings] = []

    def stop_here(settings: DemoSettings, screen: object) -> None:
        seen.append(settings)
        raise ConfigError("far enough")

    monkeypatch.setattr("tiercel.demo.run_demo", stop_here)
    assert run_cli(["demo", *given]) == 2
    [settings] = seen
    assert (settings.conversations, settings.tokens, settings.block_tokens) == (
        conversations,
        tokens,
        block_tokens,
    )
    assert settings.rows_expected == conversations + 2


@pytest.mark.model
def test_a_demo_that_is_terminated_leaves_nothing(tmp_path: Path, model_dir: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tiercel", "demo", "--quick", "--model", str(model_dir)],
        stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        env={
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
            "TIERCEL_CACHE_DIR": str(tmp_path / "c"),
        },
    ) as demo:  # fmt: skip
        assert demo.stdout is not None
        assert any("reading" in line for line in demo.stdout)
        assert list((tmp_path / "c").glob("demo-*")), "it must have had something to leave"
        demo.terminate()
        demo.stdout.read()
    assert demo.returncode == 128 + signal.SIGTERM
    assert list((tmp_path / "c").glob("demo-*")) == []
