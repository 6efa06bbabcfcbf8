"""`tiercel doctor`: is this host fit for this configuration, and is what runs there well?"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path

import click

from tiercel.cli.options import config_options, load_config
from tiercel.config import default_socket, parse_seconds
from tiercel.errors import ConfigError

EXIT_FAILED = 1
_DEADLINE_S = (0.1, 3600.0)
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "bright_black"}


@click.command("doctor")
@click.option("--quick", is_flag=True, help="Measure nothing and write nothing.")
@click.option("--prefill", type=click.FloatRange(0, min_open=True), metavar="TOKENS_PER_S",
              help="Prefill speed of your engine, as measured.")  # fmt: skip
@click.option("--model", help="Whose KV a token is: a config.json, a model folder or a built-in name.")
@click.option("--kv-dtype", default="bfloat16", show_default=True, help="Number format of that KV.")
@click.option("--socket", "path", type=click.Path(path_type=Path), help="Unix socket of the daemon.")
@click.option(
    "--deadline", default="10s", show_default=True, metavar="TIME", help="Longest wait for one check."
)
@click.option("--json", "as_json_text", is_flag=True, help="Print JSON.")
@config_options
def command(
    quick: bool,
    prefill: float | None,
    model: str | None,
    kv_dtype: str,
    path: Path | None,
    deadline: str,
    as_json_text: bool,
    config_file: Path | None,
    settings: Sequence[str],
) -> int:
    """Check this host, the configuration and what runs of it; say what is wrong and what to do.

    \b
    tiercel doctor --config /etc/tiercel.toml
    tiercel doctor --prefill 4200 --model llama-3.1-8b

    Works before a start and beside what runs. Each tier is written to and read for about two seconds, under
    names of its own, and left as it was. Exit code 0: nothing fails. 1: something does.
    """
    from tiercel.doctor import Questions, Verdict, examine, report
    from tiercel.doctor.worth import Prefill

    config = load_config(config_file, settings, {"daemon.socket": None if path is None else str(path)})
    deadline_s = parse_seconds(deadline)
    if not _DEADLINE_S[0] <= deadline_s <= _DEADLINE_S[1]:
        raise ConfigError(f"--deadline: '{deadline}'; accepted: from 100ms to 1h")
    if prefill is not None and not math.isfinite(prefill):
        raise ConfigError(f"--prefill: {prefill}; accepted: tokens a second, such as 4200")
    token_bytes, weighed_by = _token_bytes(model, kv_dtype)
    questions = Questions(
        config=config,
        socket=config.daemon.socket or default_socket(),
        socket_named=path is not None,
        quick=quick,
        deadline_s=deadline_s,
        prefill=Prefill(prefill, token_bytes, "given", weighed_by),
    )
    # What a tier logs on the way is said by its findings.
    logging.getLogger("tiercel").addHandler(logging.NullHandler())
    checks = []
    group = ""
    for one in examine(questions):
        checks.append(one)
        if not as_json_text:
            if one.group != group:
                group = one.group
                click.echo(group)
            first, *more = report.lines_of(one)
            verdict = one.finding.verdict.value
            click.echo(first.replace(verdict, click.style(verdict, fg=_COLOURS[verdict]), 1))
            for line in more:
                click.echo(line)
    if as_json_text:
        click.echo(json.dumps(report.as_json(checks), indent=1, allow_nan=False))
    else:
        click.echo(report.summary(checks))
    return EXIT_FAILED if any(one.finding.verdict is Verdict.FAIL for one in checks) else 0


def _token_bytes(model: str | None, kv_dtype: str) -> tuple[float | None, str]:
    """Bytes of a token's KV in all layers, and whose it is. Raises GeometryError."""
    if model is None:
        return None, ""
    from tiercel.geometry import KVGeometry
    from tiercel.plan.catalogue import open_model

    title, source, _ = open_model(model)
    token_bytes = KVGeometry.from_config(source).bytes_per_token(kv_dtype)
    if not token_bytes:
        raise ConfigError(f"--model: {title} keeps no KV per token; accepted: a model with attention")
    return token_bytes, f"of {title}"
