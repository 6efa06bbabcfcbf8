"""`tiercel serve` refuses what no client could use, in one line and before anything is loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiercel import cli

NOWHERE = "/no/such/model"


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """The command sets up the logging of its process, which here is the tests'."""
    root = logging.getLogger()
    handlers, level, raises = list(root.handlers), root.level, logging.raiseExceptions
    yield
    root.handlers[:], logging.raiseExceptions = handlers, raises
    root.setLevel(level)


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert cli.run(["serve", NOWHERE, "--engine", "transformers", "--port", "0", *args]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


@pytest.mark.parametrize("key", ["right\n", " right", "two words", "\t", "clé", os.fsdecode(b"\xff\xfe")])
def test_an_api_key_that_no_header_can_carry(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("TIERCEL_API_KEY", key)
    line = refusal(capsys)
    assert "TIERCEL_API_KEY: holds a character" in line
    assert key.strip() not in line or not key.strip(), "a secret is not shown"


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "a\x1b[31m", "x" * 257, os.fsdecode(b"m\xff")])
def test_a_name_that_no_client_could_ask_for(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert "--name: " in refusal(capsys, "--name", name)


@pytest.mark.parametrize("name", ["llama", "org/model:8b", "großes Modell", "x" * 256])
def test_with_a_good_key_and_name_it_goes_on_to_the_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("TIERCEL_API_KEY", "sk-Right_1~!")
    assert not Path(NOWHERE).exists()
    assert f"{NOWHERE} does not exist" in refusal(capsys, "--name", name)


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://a:4317", "http://user:secret@a/"])
def test_an_address_of_no_collector(capsys: pytest.CaptureFixture[str], url: str) -> None:
    line = refusal(capsys, "--otlp-traces-endpoint", url)
    assert line.startswith("tiercel: error: --otlp-traces-endpoint: is no ")
    assert "secret" not in line
