"""docs/serve.md names what the server has, and the command says what it lacks."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from tiercel import cli
from tiercel.cli import serve as serve_command
from tiercel.web.api import app, body, fields

PAGE = (Path(__file__).parents[3] / "docs" / "serve.md").read_text()
SOURCE = Path(app.__file__).parent


def named(name: str) -> bool:
    return re.search(rf"`[^`\n]*\b{re.escape(name)}\b[^`\n]*`", PAGE) is not None


def test_every_field_is_on_the_page() -> None:
    handled = {
        one.name for kind in (body.ChatBody, body.CompletionBody) for one in msgspec.structs.fields(kind)
    }
    assert [name for name in sorted({*handled, *fields.HARMLESS}) if not named(name)] == []
    assert not named("no_such_field")


def test_every_path_is_on_the_page() -> None:
    assert [path for path in app.PATHS if path not in PAGE] == []


def test_every_error_code_is_on_the_page() -> None:
    text = "".join(path.read_text() for path in SOURCE.glob("*.py"))
    codes = set(re.findall(r'code(?:: str)? ?= ?"(\w+)"', text)) | set(
        re.findall(r'bad\([^()]*?"[^"]*"\), "(\w+)"', text)
    )
    assert {"queue_full", "invalid_value", "internal_error"} <= codes
    assert [code for code in sorted(codes - {"http_error"}) if not named(code)] == []


def test_missing_packages_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        serve_command, "find_spec", lambda name: None if name == "uvicorn" else find_spec(name)
    )
    assert cli.run(["serve"]) == 2
    assert capsys.readouterr().err == (
        "tiercel: error: serve: uvicorn not installed; accepted: pip install 'tiercel[serve,transformers]'\n"
    )
