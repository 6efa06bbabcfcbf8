"""`tiercel plan`: what fits where, what offloading gains, and what to set. Arithmetic, no GPU needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click

from tiercel.errors import ConfigError
from tiercel.plan.planner_options import OPTIONS, request_from

_TRAFFIC = ("sessions", "context", "new", "output", "turns", "idle", "shared")


def _with_options(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(OPTIONS):
        shown = f"{option.help} [default: {option.default}]" if option.default else option.help
        function = click.option(f"--{option.name}", metavar=option.metavar, help=shown)(function)
    return function


@click.command("plan")
@click.argument("model")
@_with_options
@click.option("--trace", type=click.Path(path_type=Path), help="Read the traffic off a request trace.")
@click.option("--explain", is_flag=True, help="Show every input's origin and every number's formula.")
@click.option("--json", "as_json_text", is_flag=True, help="Print JSON: value, unit, formula, assumptions.")
@click.option("--write-config", type=click.Path(path_type=Path), help="Write the tiercel.toml to this file.")
def command(
    model: str,
    trace: Path | None,
    explain: bool,
    as_json_text: bool,
    write_config: Path | None,
    **texts: str | None,
) -> None:
    """Plan memory, tiers and gains for MODEL: a config.json, a model folder or a built-in name."""
    from tiercel.plan import planner, planner_text  # after --help, which must be quick

    given = {name.replace("_", "-"): text for name, text in texts.items() if text is not None}
    traffic = None
    if trace is not None:
        clash = [name for name in _TRAFFIC if name in given]
        if clash:
            raise ConfigError(f"--trace and --{clash[0]} both say what the traffic is; accepted: one of them")
        from tiercel.plan.planner_trace import traffic_of
        from tiercel.plan.simulate.trace import read_trace

        traffic = traffic_of(read_trace(trace))
    plan = planner.make_plan(request_from(model, given, traffic))
    if write_config is not None:
        _write(write_config, plan.config_toml)
    if as_json_text:
        click.echo(json.dumps(planner.as_json(plan), indent=2, allow_nan=False))
    else:
        click.echo(planner_text.explain(plan) if explain else planner_text.describe(plan))


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"--write-config: {path} exists; accepted: a file that does not") from None
    except OSError as error:
        raise ConfigError(f"--write-config: {path}: {error.strerror}") from None
