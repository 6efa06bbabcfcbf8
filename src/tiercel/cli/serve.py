"""`tiercel serve`: an OpenAI-compatible server whose prompts are kept in RAM and on disk.

Its engine is our own on transformers, or vLLM with a daemon beside it (`serve_vllm`).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import click

from tiercel.cli.options import (
    accept_lossy_option,
    check_consent,
    config_options,
    load_config,
    log_format_option,
)
from tiercel.config import Config, parse_seconds
from tiercel.config.sources import API_KEY_VARIABLE
from tiercel.errors import ConfigError, ModelError

_NAME_CHARS_MAX = 256
_HEADER_TEXT = re.compile(r"[!-~]+")
NEEDED = ("starlette", "uvicorn", "torch", "transformers")
ENGINE_FLAGS = "tiercel.engine_flags"


class WithEngineFlags(click.Command):
    """A command that leaves everything after `--` to the engine."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[ENGINE_FLAGS] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])


@click.command("serve", cls=WithEngineFlags)
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option("--model", "model_option", type=click.Path(path_type=Path), help="The same as MODEL.")
@click.option("--name", help="What the model is called in the API [default: as its folder].")
@click.option("--host", help="Address to listen on [default: 127.0.0.1].")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 0 takes any [default: 8000].")
@click.option("--ram", metavar="SIZE", help="Memory for cached blocks, such as 4GiB [default: 2GiB].")
@click.option("--disk", type=click.Path(path_type=Path), help="Directory for cached blocks, of its own.")
@click.option("--disk-size", metavar="SIZE", help="Most bytes to keep there, such as 100GB.")
@click.option(
    "--engine",
    type=click.Choice(["auto", "transformers", "vllm"]),
    default="auto",
    help="auto: vllm for a MODEL where vLLM is installed, else transformers.",
)
@click.option(
    "--ready-deadline", metavar="TIME", default="30m", help="vllm: longest wait for it to start [30m]."
)
@click.option("--print-command", is_flag=True, help="vllm: print what would be run, and run nothing.")
@click.option(
    "--kv-device-budget",
    metavar="SIZE",
    help="transformers: most KV on the device, such as 256MiB; the rest lies in host memory [default: all].",
)
@click.option(
    "--batch",
    metavar="N",
    help="transformers: answers that are made together, up to 64; the others wait [default: 1].",
)
@click.option(
    "--attention-policy",
    metavar="NAME",
    help="transformers: answers read of a prompt what this method of `tiercel eval` keeps [default: full].",
)
@click.option("--attention-budget", metavar="SHARE", help="Of a prompt's tokens, for it [default: 0.25].")
@click.option(
    "--reuse-chunks",
    metavar="TOKENS",
    help="transformers: reuse documents anywhere in a prompt, TOKENS of each computed anew [default: no].",
)
@click.option(
    "--otlp-traces-endpoint", "otlp", metavar="URL", help="OpenTelemetry collector for spans of requests."
)
@accept_lossy_option
@log_format_option
@config_options
@click.pass_context
def command(
    context: click.Context,
    model: Path | None,
    model_option: Path | None,
    name: str | None,
    host: str | None,
    port: int | None,
    ram: str | None,
    disk: Path | None,
    disk_size: str | None,
    engine: str,
    ready_deadline: str,
    print_command: bool,
    kv_device_budget: str | None,
    batch: str | None,
    attention_policy: str | None,
    attention_budget: str | None,
    reuse_chunks: str | None,
    otlp: str | None,
    accept_lossy: bool,
    log_format: str,
    config_file: Path | None,
    settings: Sequence[str],
) -> None:
    """Serve MODEL, a Hugging Face folder of a causal language model, to OpenAI clients.

    Without MODEL it is the demo model. What was read of a prompt is kept, in RAM and in the directories of
    the configuration, so that the next request that begins alike starts at once, also after a restart.

    \b
    tiercel serve
    tiercel serve ./my-model --port 8080 --ram 8GiB --disk /var/cache/tiercel --disk-size 100GB
    tiercel serve org/model --engine vllm --ram 64GiB -- --tensor-parallel-size 2

    With vLLM it starts a daemon and `vllm serve`; flags after -- are vLLM's. There is no authentication
    unless TIERCEL_API_KEY holds a key. SIGTERM and Ctrl-C end it in order.
    """
    flags = {
        "serve.host": host,
        "serve.port": port,
        "ram.size": ram,
        "tiers.0.path": None if disk is None else str(disk),
        "tiers.0.size": disk_size,
        "model.kv_device_budget": kv_device_budget,
        "model.batch": batch,
        "attention.policy": attention_policy,
        "attention.budget": attention_budget,
        "attention.chunks": reuse_chunks,
        "store.accept_lossy": "yes" if accept_lossy else None,
    }
    config = _configured(config_file, settings, flags)
    check_consent(config)
    chosen = _one_model(model, model_option)
    _check_name(name)
    api_key = _api_key()
    flags_of_engine: tuple[str, ...] = context.meta[ENGINE_FLAGS]
    if chosen_engine(engine, chosen, flags_of_engine) == "vllm":
        if otlp is not None:
            raise ConfigError("--otlp-traces-endpoint: vLLM sends its own spans; accepted after --")
        context.exit(
            _serve_with_vllm(
                config, chosen, name, api_key, ready_deadline, print_command,
                _as_flags(config_file, settings, flags, log_format), flags_of_engine,
            )
        )  # fmt: skip
    if flags_of_engine or print_command:
        what = shlex.join(["--", *flags_of_engine]) if flags_of_engine else "--print-command"
        raise ConfigError(f"{what}: is for vLLM; accepted with --engine vllm")
    _serve_here(config, chosen, name, api_key, log_format, otlp)


def _configured(config_file: Path | None, settings: Sequence[str], flags: Mapping[str, object]) -> Config:
    try:
        return load_config(config_file, settings, flags)
    except ConfigError as error:
        if (disk := flags["tiers.0.path"]) is not None and "tiers.0.size: is missing" in str(error):
            raise ConfigError(f"--disk {disk} needs --disk-size; accepted is a size, such as 100GB") from None
        raise


def _serve_here(
    config: Config,
    model: Path | None,
    name: str | None,
    api_key: str | None,
    log_format: str,
    otlp: str | None,
) -> None:
    """Serve with our own engine, in this process."""
    if missing := [package for package in NEEDED if find_spec(package) is None]:
        raise ConfigError(
            f"serve: {', '.join(missing)} not installed; accepted: pip install 'tiercel[serve,transformers]'"
        )
    from tiercel.models import demo_model_dir
    from tiercel.service.logs import set_up
    from tiercel.web.api import server
    from tiercel.web.api.engine import load
    from tiercel.web.api.tracing import Tracing, check_endpoint
    from tiercel.web.watch.token import make_token

    # Prompts are never logged by anyone: the libraries below log nothing but warnings.
    set_up(log_format, loud=("tiercel.serve",))
    traces_url = None if otlp is None else check_endpoint(otlp)
    bound = server.bind(config.serve.host, config.serve.port)
    with bound:
        folder = model or demo_model_dir(notice=lambda line: _say(line))
        loaded = load(folder, config, name)
        if server.is_open_to_others(bound) and api_key is None:
            _warn_open(server.url_of(bound))
        url, facts = server.url_of(bound), loaded.facts
        tracing = None if traces_url is None else Tracing(traces_url, facts.name)
        token = make_token()

        def ready() -> None:
            for line in config.describe():
                click.echo(f"  {line}")
            own = "the API key" if api_key is not None else token
            click.echo(f"  dashboard at {url}/  (token for its buttons: {own})")
            click.echo(f"serving {facts.name} ({facts.running_on}) at {url}/v1  (Ctrl-C ends it)")

        server.serve(loaded, config, bound, api_key=api_key, token=token, ready=ready, tracing=tracing)


def chosen_engine(asked: str, model: Path | None, flags: Sequence[str]) -> str:
    """Without a model it is a try-out, which our own engine is faster to show."""
    if asked != "auto":
        return asked
    return "vllm" if (model is not None or flags) and find_spec("vllm") is not None else "transformers"


def _as_flags(
    config_file: Path | None, settings: Sequence[str], flags: Mapping[str, object], log_format: str
) -> list[str]:
    """What this command was told of the store, as the daemon's command line."""
    told = [] if config_file is None else ["--config", str(config_file)]
    told += [] if log_format == "text" else ["--log-format", log_format]
    pairs = [*settings, *(f"{key}={value}" for key, value in flags.items() if value is not None)]
    kept = [pair for pair in pairs if not pair.startswith(("daemon.socket=", "serve.", "model."))]
    return told + [word for pair in kept for word in ("--set", pair)]


def _serve_with_vllm(
    config: Config,
    model: Path | None,
    name: str | None,
    api_key: str | None,
    ready_deadline: str,
    print_command: bool,
    own: Sequence[str],
    flags: Sequence[str],
) -> int:
    """Check what can be told before anything is started, then run both or print how."""
    from tiercel.cli import serve_vllm
    from tiercel.models import demo_model_dir

    if find_spec("vllm") is None:
        raise ConfigError("serve: vllm not installed; accepted: pip install 'tiercel[vllm]'")
    for setting, value, none in (
        ("attention.policy", config.attention.policy, "full"),
        ("attention.chunks", config.attention.chunks, "no"),
        ("model.kv_device_budget", config.model.kv_device_budget_bytes, None),
    ):
        if value != none:
            raise ConfigError(f"{setting} = {value}: vLLM has none; accepted: {none or 'not set'}")
    deadline_s = parse_seconds(ready_deadline)
    serve_vllm.check(config, flags)
    if model is None:
        model = demo_model_dir(notice=lambda line: _say(line))
    elif str(model).startswith((".", "/", "~")) and not model.expanduser().exists():
        raise ModelError(f"model folder {model} does not exist")
    port, url, open_to_others = serve_vllm.free_port(config.serve.host, config.serve.port)
    what = serve_vllm.plan(config, str(model), name, port, own, flags)
    if print_command:
        click.echo(serve_vllm.printed(what))
        return 0
    if open_to_others and api_key is None:
        _warn_open(url)
    return serve_vllm.run(what, config, url, api_key, deadline_s)


def _warn_open(url: str) -> None:
    _say(
        f"warning: {url} can be reached from other hosts and there is no "
        f"authentication; set {API_KEY_VARIABLE}, or listen on 127.0.0.1"
    )


def _one_model(model: Path | None, option: Path | None) -> Path | None:
    if model and option:
        raise ConfigError(f"MODEL is {model} and --model is {option}; accepted is one of them")
    return model or option


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
