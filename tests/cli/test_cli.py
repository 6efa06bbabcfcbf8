"""The command itself: quick to start, one line per error, and an exit code a script can rely on."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import click
import pytest

import tiercel
from tiercel import cli
from tiercel.errors import ConfigError, TiercelError

# Loaded by any of these, the help would take seconds.
HEAVY = ("torch", "transformers", "vllm", "starlette", "uvicorn", "numpy", "tiercel.config", "rich")


def stands_in(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException | None = None) -> None:
    """Make `name` a command that raises `error`."""

    @click.command(name)
    @click.option("--number", type=int)
    def command(number: int | None) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(sys.modules[__name__], "stand_in", command, raising=False)
    monkeypatch.setitem(sys.modules, "stand_in_module", sys.modules[__name__])
    monkeypatch.setitem(cli.COMMANDS, name, cli.Row("stand_in_module:stand_in", "A stand-in.", cli.TRY))


def python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_row_of_the_table_resolves(name: str) -> None:
    command = cli.load_command(name)
    assert isinstance(command, click.Command)
    assert command.help, "a command explains itself in its docstring"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_that_prints(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([name, "--help"]) == 0
    assert f"Usage: tiercel {name}" in capsys.readouterr().out


@pytest.mark.parametrize("row", cli.COMMANDS.values())
def test_every_row_has_a_heading_and_a_line_that_fits(row: cli.Row) -> None:
    assert row.heading in (cli.TRY, cli.SIZE, cli.RUN)
    assert re.fullmatch(r"[A-Z].{5,58}\.", row.summary)


@pytest.mark.parametrize("args", [["--help"], ["-h"], []])
def test_the_help_lists_every_command_with_its_line(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(args) == 0
    shown = capsys.readouterr()
    for name, row in cli.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(row.summary)}$", shown.out, re.MULTILINE)
    assert shown.err == ""


def test_the_help_loads_no_command_and_nothing_heavy() -> None:
    script = (
        "import sys\nfrom tiercel.cli import run\nassert run(['--help']) == 0\n"
        f"print([m for m in sys.modules if m in {HEAVY!r} or m.startswith('tiercel.cli.')])"
    )
    assert python(script).stdout.splitlines()[-1] == "[]"
    control = python(script.replace("assert", "import tiercel.cli.options\nassert"))
    assert "tiercel.config" in control.stdout.splitlines()[-1]


def test_a_row_whose_module_is_absent_does_not_break_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "later", cli.Row("tiercel.no_such:command", "Comes later.", cli.RUN))
    assert cli.run(["--help"]) == 0
    assert "later" in capsys.readouterr().out
    with pytest.raises(ModuleNotFoundError):
        cli.load_command("later")


def test_a_row_that_names_no_command_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "odd", cli.Row("tiercel.cli:run", "Odd one out.", cli.RUN))
    with pytest.raises(TypeError, match="not a click command"):
        cli.load_command("odd")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"tiercel {tiercel.__version__}\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["stand-inn"], "no such command 'stand-inn'; did you mean 'stand-in'?"),
        (["zzz"], "no such command 'zzz'; see 'tiercel --help'"),
        (["--zzz"], "'tiercel --help'"),
        (["stand-in", "--zzz"], "'tiercel stand-in --help'"),
        (["stand-in", "--number", "x"], "'x' is not a valid integer"),
        (["stand-in", "extra"], "extra"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_exit_code_2(
    args: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stands_in(monkeypatch, "stand-in")
    assert cli.run(args) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("tiercel: error: ")
    assert shown.err.count("\n") == 1
    assert said in shown.err
    assert cli.run(["stand-in", "--number", "1"]) == 0


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("flag: x: wrong"), 2, "tiercel: error: flag: x: wrong\n"),
        (TiercelError("two\nlines"), 2, "tiercel: error: two lines\n"),
        (click.ClickException("stop"), 1, "tiercel: error: stop\n"),
        (KeyboardInterrupt(), 130, None),
        (click.Abort(), 130, None),
        (click.exceptions.Exit(7), 7, ""),
    ],
)
def test_an_error_becomes_a_line_and_a_code(
    error: BaseException, code: int, line: str | None,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    stands_in(monkeypatch, "stand-in", error)
    assert cli.run(["stand-in"]) == code
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert line is None or shown == line


def test_a_fault_of_ours_is_not_dressed_up_as_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    stands_in(monkeypatch, "stand-in", ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        cli.run(["stand-in"])


def test_a_reader_that_went_away_is_not_an_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tiercel", "--help"],
            stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode == cli.EXIT_BROKEN_PIPE


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["size", "--help"], ["config"]])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_an_output_that_is_full_is_one_line(args: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tiercel", *args],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.stderr == "tiercel: error: No space left on device\n"
    assert done.returncode == cli.EXIT_FAULT


@pytest.mark.parametrize("closed", [[0], [1], [2], [0, 1, 2]])
def test_standard_streams_may_be_closed(closed: list[int]) -> None:
    redirections = " ".join(f"{stream}>&-" for stream in closed)
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m tiercel config {redirections}', sys.executable],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert ("ram.size" in done.stdout) == (1 not in closed)


def test_a_system_error_nobody_expected_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stands_in(monkeypatch, "broken", OSError(5, "Input/output error", "/some/file"))
    monkeypatch.setattr(cli, "_drop_output", lambda: None)
    assert cli.run(["broken"]) == cli.EXIT_FAULT
    assert capsys.readouterr().err == "tiercel: error: /some/file: Input/output error\n"


def test_the_module_runs_like_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tiercel", "nope"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tiercel: error: no such command 'nope'; see 'tiercel --help'\n"
