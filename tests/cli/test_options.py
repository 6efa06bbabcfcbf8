"""`--config` and `--set`, the same for every command."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tiercel.cli import run
from tiercel.cli.options import config_options, load_config
from tiercel.errors import ConfigError


def test_own_flags_override_set_overrides_the_environment_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text("[serve]\nport = 1\nqueue_requests = 1\nmax_answer_tokens = 1\nhost = 'h'\n")
    environ = {
        "TIERCEL_SERVE_PORT": "2",
        "TIERCEL_SERVE_QUEUE_REQUESTS": "2",
        "TIERCEL_SERVE_MAX_ANSWER_TOKENS": "2",
    }
    flags = {"serve.port": 4, "serve.host": None}
    config = load_config(path, ["serve.port=3", "serve.queue_requests=3"], flags, environ)
    assert (config.serve.port, config.serve.queue_requests) == (4, 3)
    assert (config.serve.max_answer_tokens, config.serve.host) == (2, "h")


@pytest.mark.parametrize("text", ["ram.size", "=4GiB", ""])
def test_a_set_that_is_no_assignment_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not KEY=VALUE"):
        load_config(None, [text], environ={})
    assert load_config(None, ["serve.host=a=b"], environ={}).serve.host == "a=b"


def test_the_options_reach_the_command(tmp_path: Path) -> None:
    @click.command()
    @config_options
    def command(config_file: Path | None, settings: tuple[str, ...]) -> None:
        click.echo(f"{config_file} {settings}")

    done = CliRunner().invoke(command, ["--config", "x.toml", "--set", "a=1", "--set", "b=2"])
    assert done.output == "x.toml ('a=1', 'b=2')\n"


def test_the_effective_configuration_is_shown_with_its_origins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.toml").write_text('[ram]\nsize = "3GiB"\n')
    monkeypatch.setenv("TIERCEL_SERVE_PORT", "9000")
    args = ["config", "--config", str(tmp_path / "t.toml"), "--set", "model.device=cpu"]
    assert run(args) == 0
    lines = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert {"ram.size = 3GiB", "serve.port = 9000", "model.device = cpu", "ram.kind = private"} <= set(lines)
    assert run([*args, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {"key": "serve.port", "value": "9000", "origin": "environment TIERCEL_SERVE_PORT"} in rows


def test_d41_a_misspelt_setting_is_one_line_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "--set", "ram.sise=4GiB"]) == 2
    assert capsys.readouterr().err == (
        "tiercel: error: flag: ram.sise: unknown setting; did you mean 'ram.size'?\n"
    )
