"""`tiercel demo` says in one line what it lacks."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tiercel import cli
from tiercel.cli import demo as demo_command


def test_a_missing_library_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_command, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    assert cli.run(["demo"]) == 2
    assert capsys.readouterr().err == (
        "tiercel: error: demo: torch not installed; accepted: pip install 'tiercel[transformers]'\n"
    )
