"""`tiercel serve`: an OpenAI-compatible server whose prompts are kept in RAM and on disk."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import click

from tiercel.cli.options import config_options, load_config
from tiercel.config.sources import API_KEY_VARIABLE
from tiercel.errors import ConfigError

_NAME_CHARS_MAX = 256
_HEADER_TEXT = re.compile(r"[!-~]+")
_NEEDED = ("starlette", "uvicorn", "torch", "transformers")


@click.command("serve")
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option("--model", "model_option", type=click.Path(path_type=Path), help="The same as MODEL.")
@click.option("--name", help="What the model is called in the API [default: as its folder].")
@click.option("--host", help="Address to listen on [default: 127.0.0.1].")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 0 takes any [default: 8000].")
@click.option("--ram", metavar="SIZE", help="Memory for cached blocks, such as 4GiB [default: 2GiB].")
@click.option("--disk", type=click.Path(path_type=Path), help="Directory for cached blocks, of its own.")
@click.option("--disk-size", metavar="SIZE", help="Most bytes to keep there, such as 100GB.")
@config_options
def command(
    model: Path | None,
    model_option: Path | None,
    name: str | None,
    host: str | None,
    port: int | None,
    ram: str | None,
    disk: Path | None,
    disk_size: str | None,
    config_file: Path | None,
    settings: Sequence[str],
) -> None:
    """Serve MODEL, a Hugging Face folder of a causal language model, to OpenAI clients.

    Without MODEL it is the demo model. What was read of a prompt is kept, in RAM and in the directories of
    the configuration, so that the next request that begins alike starts at once, also after a restart.

    \b
    tiercel serve
    tiercel serve ./my-model --port 8080 --ram 8GiB --disk /var/cache/tiercel --disk-size 100GB

    There is no authentication unless TIERCEL_API_KEY holds a key. SIGTERM and Ctrl-C end it in order.
    """
    flags = {
        "serve.host": host,
        "serve.port": port,
        "ram.size": ram,
        "tiers.0.path": None if disk is None else str(disk),
        "tiers.0.size": disk_size,
    }
    try:
        config = load_config(config_file, settings, flags)
    except ConfigError as error:
        if disk is not None and "tiers.0.size: is missing" in str(error):
            raise ConfigError(f"--disk {disk} needs --disk-size; accepted is a size, such as 100GB") from None
        raise
    if model and model_option:
        raise ConfigError(f"MODEL is {model} and --model is {model_option}; accepted is one of them")
    _check_name(name)
    api_key = _api_key()
    if missing := [package for package in _NEEDED if find_spec(package) is None]:
        raise ConfigError(
            f"serve: {', '.join(missing)} not installed; accepted: pip install 'tiercel[serve,transformers]'"
        )
    # Prompts are never logged by anyone: the libraries below log nothing but warnings.
    logging.basicConfig(level=logging.WARNING, format="tiercel: %(message)s")
    logging.getLogger("tiercel.serve").setLevel(logging.INFO)

    from tiercel.models import demo_model_dir
    from tiercel.web.api import server
    from tiercel.web.api.engine import load

    bound = server.bind(config.serve.host, config.serve.port)
    with bound:
        folder = model or model_option or demo_model_dir(notice=lambda line: _say(line))
        loaded = load(folder, config, name)
        if server.is_open_to_others(bound) and api_key is None:
            _say(
                f"warning: {server.url_of(bound)} can be reached from other hosts and there is no "
                f"authentication; set {API_KEY_VARIABLE}, or listen on 127.0.0.1"
            )
        url, facts = server.url_of(bound), loaded.facts

        def ready() -> None:
            for line in config.describe():
                click.echo(f"  {line}")
            click.echo(f"serving {facts.name} ({facts.running_on}) at {url}/v1  (Ctrl-C ends it)")

        server.serve(loaded, config, bound, api_key=api_key, ready=ready)


def _check_name(name: str | None) -> None:
    if name is not None and not (
        len(name.strip()) > 0 and len(name) <= _NAME_CHARS_MAX and name.isprintable()
    ):
        raise ConfigError(
            f"--name: {name[:_NAME_CHARS_MAX]!a} is not a name clients could ask for; "
            f"accepted: 1 to {_NAME_CHARS_MAX} printable characters"
        )


def _api_key() -> str | None:
    key = os.environ.get(API_KEY_VARIABLE) or None
    if key is not None and not _HEADER_TEXT.fullmatch(key):
        # Such as the line break of the file it was read from: no client could ever match it.
        raise ConfigError(
            f"environment: {API_KEY_VARIABLE}: holds a character that no client can send in a header; "
            "accepted: visible ASCII characters, no spaces or line breaks"
        )
    return key


def _say(line: str) -> None:
    click.echo(f"tiercel: {line}", err=True)
