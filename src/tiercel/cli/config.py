"""`tiercel config`: the effective configuration, before anything runs with it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tiercel.cli.options import config_options, load_config


@click.command("config")
@config_options
@click.option("--json", "as_json", is_flag=True, help='Print {"rows": [{"key", "value", "origin"}, ...]}.')
def command(config_file: Path | None, settings: tuple[str, ...], as_json: bool) -> None:
    """Show every setting, its value and where it was set.

    Settings come from a TOML file, then TIERCEL_... variables, then flags; later ones win. Anything
    misspelt, without its unit or contradictory is refused here as it is by the commands that use it.
    """
    config = load_config(config_file, settings)
    if not as_json:
        click.echo("\n".join(config.describe()))
        return
    rows = [{"key": row.key, "value": row.value, "origin": row.origin} for row in config.rows()]
    click.echo(json.dumps({"rows": rows}))
