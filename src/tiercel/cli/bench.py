"""`tiercel bench`: the workloads people argue about, with offloading and without, side by side in one run."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tiercel.cli.options import config_options, load_config
from tiercel.cli.progress import ProgressLine
from tiercel.cli.serve import ENGINE_FLAGS, NEEDED, WithEngineFlags, chosen_engine
from tiercel.config import parse_seconds
from tiercel.config.sources import API_KEY_VARIABLE
from tiercel.errors import ConfigError
from tiercel.report.files import check_output, write

if TYPE_CHECKING:
    from tiercel.bench.run import Side
    from tiercel.bench.spec import Asked, Spec
    from tiercel.bench.stop import Stop

_FILE = click.Path(path_type=Path)
_INTERRUPTED = 130
_COUNT = click.IntRange(1, 100_000)


@click.command("bench", cls=WithEngineFlags)
@click.argument("model", required=False, type=_FILE)
@click.option("--url", help="Ask the server there, with offloading, instead of starting one.")
@click.option("--baseline-url", help="With --url: the side without offloading.")
@click.option(
    "--baseline-hints", is_flag=True, help="With --url: the same tiercel serve, told to go without."
)
@click.option("--name", help="The model's name in the API [default: the first the server lists].")
@click.option(
    "--engine",
    type=click.Choice(["auto", "transformers", "vllm"]),
    default="auto",
    help="Of a server it starts; auto: vllm for a MODEL where vLLM is installed, else transformers.",
)
@click.option(
    "--workload", "workloads", multiple=True, metavar="NAME",
    help="chat, document, agents, unique, overflow or all; may be repeated. [default: chat]",
)  # fmt: skip
@click.option(
    "--sessions", type=_COUNT, help="A round's sessions (documents, prompts) [default: by workload]."
)
@click.option("--turns", type=click.IntRange(1, 1000), help="Requests of each [default: by workload].")
@click.option(
    "--tokens", type=click.IntRange(16, 10**7), help="Tokens of a first prompt [default: by workload]."
)
@click.option("--answer-tokens", type=click.IntRange(1, 10**5), help="Longest answer. [default: 32]")
@click.option("--pause", metavar="TIME", help="Mean pause before a further turn [default: by workload].")
@click.option("--rate", type=click.FloatRange(0, 10**4, min_open=True), help="Sessions that arrive a second.")
@click.option("--concurrency", type=click.IntRange(1, 256), help="Requests at a time. [default: 1]")
@click.option("--requests", type=_COUNT, help="Most requests of each side and workload.")
@click.option("--duration", metavar="TIME", help="Longest time of each side and workload.")
@click.option(
    "--rounds", type=click.IntRange(1, 1000), help="Each with new prompts, sides in turn. [default: 6]"
)
@click.option("--warmup", type=click.IntRange(0, 1000), help="Requests not counted. [default: 2]")
@click.option("--deadline", metavar="TIME", help="Longest time of one request. [default: 5m]")
@click.option("--seed", type=click.IntRange(0), help="Of arrivals, pauses and order. [default: 1]")
@click.option(
    "--texts", type=_FILE, help="Directory of text files to talk about [default: texts of this machine]."
)
@click.option("--ram", metavar="SIZE", help="Of a server it starts: memory for cached blocks.")
@click.option("--disk", type=_FILE, help="Of a server it starts: directory for cached blocks.")
@click.option("--disk-size", metavar="SIZE", help="Most bytes to keep there.")
@click.option(
    "--ready-deadline", metavar="TIME", default="30m", help="Longest wait for a server to start [30m]."
)
@click.option("--json", "json_file", type=_FILE, help="Write the report with every request to this file.")
@click.option("--html", "html_file", type=_FILE, help="Write the report with plots to this file.")
@click.option(
    "--compare", nargs=2, type=_FILE, metavar="A.json B.json", help="Compare two reports, run nothing."
)
@config_options
@click.pass_context
def command(context: click.Context, /, **given: Any) -> int:
    """Measure what offloading does to a workload, with it and without it in turn.

    Without --url it starts servers itself: MODEL (the demo model without one) with Tiercel and without. Flags
    after -- go to vLLM. With --url, any OpenAI-compatible server is asked.

    \b
    tiercel bench
    tiercel bench ./my-model --workload chat --workload unique --html report.html
    tiercel bench --url http://a:8000 --baseline-url http://b:8000 --workload document --rate 2 --duration 5m
    tiercel bench --compare before.json after.json

    Ctrl-C ends it with a report on what there is. Exit code 0 when every request was answered, 1 when not. A
    key for the servers is read from TIERCEL_API_KEY.
    """
    for flag in ("json_file", "html_file"):
        check_output(f"--{flag.removesuffix('_file')}", given[flag])
    if given["compare"] is not None:
        _compare(given)
        return 0
    if find_spec("httpx") is None:
        raise ConfigError("bench: httpx not installed; accepted: pip install 'tiercel[bench]'")
    return _bench(given, context.meta[ENGINE_FLAGS])


def _compare(given: dict[str, Any]) -> None:
    from tiercel.bench.compare import compare_reports
    from tiercel.bench.results import read_report
    from tiercel.bench.text import show_comparison
    from tiercel.report.console import make_console

    paths: tuple[Path, Path] = given["compare"]
    if given["html_file"]:
        raise ConfigError("--html: is for a run; accepted with --compare: --json")
    found = compare_reports(read_report(paths[0]), read_report(paths[1]), (paths[0].name, paths[1].name))
    show_comparison(found, make_console())
    if given["json_file"]:
        write("--json", given["json_file"], found.to_json())


def _bench(given: dict[str, Any], flags: Sequence[str]) -> int:
    from tiercel.bench.page import write_page
    from tiercel.bench.run import Setup, run_bench
    from tiercel.bench.stop import Stop
    from tiercel.bench.text import show
    from tiercel.bench.texts import find_texts
    from tiercel.report.console import make_console

    specs = _specs(given)
    _check_servers(given, flags)
    setup = Setup(
        documents=find_texts(given["texts"]),
        model=given["name"],
        api_key=os.environ.get(API_KEY_VARIABLE) or None,
        run=secrets.token_hex(4),
        command=shlex.join(["tiercel", *sys.argv[1:]]),
    )
    stop, screen = Stop(), _Progress()
    with ExitStack() as stack:
        stack.enter_context(stop.on_signals())
        sides, notes = _sides(given, flags, specs, stop, stack)
        try:
            report = run_bench(specs, sides, setup, screen, stop, notes)
        finally:
            screen.end()
    show(report, make_console())
    if given["json_file"]:
        write("--json", given["json_file"], report.to_json())
    if given["html_file"]:
        write_page(given["html_file"], report)
        click.echo(f"Report: {given['html_file'].absolute()}", err=True)
    return _INTERRUPTED if report.interrupted else 1 if report.problems else 0


def _specs(given: dict[str, Any]) -> list[Spec]:
    """What is to be run. Raises ConfigError for flags that contradict each other."""
    from tiercel.bench.spec import KINDS

    if given["rate"] is not None and given["concurrency"] is not None:
        raise ConfigError("--rate and --concurrency: accepted is one of them")
    asked = _asked(given)
    wanted = list(given["workloads"] or ("chat",))
    names = list(dict.fromkeys(KINDS if "all" in wanted else wanted))
    return [asked.spec(name) for name in names]


def _asked(given: dict[str, Any]) -> Asked:
    from tiercel.bench.spec import Asked

    plain = (
        "sessions",
        "turns",
        "tokens",
        "answer_tokens",
        "rate",
        "concurrency",
        "requests",
        "rounds",
        "warmup",
    )
    chosen = {name: given[name] for name in (*plain, "seed") if given[name] is not None}
    for flag in ("pause", "duration", "deadline"):
        if given[flag] is not None:
            chosen[f"{flag}_s"] = _seconds(f"--{flag}", given[flag])
    return Asked(**chosen)


def _seconds(flag: str, text: str) -> float:
    try:
        seconds = parse_seconds(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if seconds <= 0 and flag != "--pause":
        raise ConfigError(f"{flag} {text}: is no time; accepted: above 0, such as 30s or 5m")
    return seconds


def _check_servers(given: dict[str, Any], flags: Sequence[str]) -> None:
    """Refuse flags for a server that is not started, or not asked."""
    url = given["url"]
    if url is None:
        if given["baseline_url"] or given["baseline_hints"]:
            raise ConfigError("--baseline-url and --baseline-hints: accepted with --url")
        if given["name"]:
            raise ConfigError("--name: is for a server that runs; accepted with --url")
        return
    if given["baseline_url"] and given["baseline_hints"]:
        raise ConfigError("--baseline-url and --baseline-hints: accepted is one of them")
    started = {
        "MODEL": given["model"], "--ram": given["ram"], "--disk": given["disk"],
        "--disk-size": given["disk_size"],
        "--config": given["config_file"], "--set": given["settings"], "--": flags,
        "--engine": None if given["engine"] == "auto" else given["engine"],
    }  # fmt: skip
    if wrong := [name for name, value in started.items() if value]:
        raise ConfigError(f"{', '.join(wrong)}: is for a server that bench starts; not accepted with --url")


def _sides(
    given: dict[str, Any], flags: Sequence[str], specs: Sequence[Spec], stop: Stop, stack: ExitStack
) -> tuple[Sequence[Side], list[str]]:
    """The sides, and what is worth knowing of them."""
    from tiercel.bench.client import checked_url
    from tiercel.bench.results import OFF, ON
    from tiercel.bench.sides import WITHOUT_STORE, UrlSide, require_hints

    if given["url"] is None:
        return _started(given, flags, specs, stop, stack)
    url = checked_url("--url", given["url"])
    sides = [UrlSide(ON, url, url)]
    if given["baseline_url"]:
        other = checked_url("--baseline-url", given["baseline_url"])
        sides.append(UrlSide(OFF, other, other))
    elif given["baseline_hints"]:
        require_hints(url, os.environ.get(API_KEY_VARIABLE) or None)
        sides.append(UrlSide(OFF, f"{url}, told to store and load nothing", url, WITHOUT_STORE))
    return sides, []


def _started(
    given: dict[str, Any], flags: Sequence[str], specs: Sequence[Spec], stop: Stop, stack: ExitStack
) -> tuple[Sequence[Side], list[str]]:
    """Both sides of a model that bench serves itself."""
    from tiercel.cli.bench_servers import Servers
    from tiercel.models import demo_model_dir

    own = {
        "ram.size": given["ram"],
        "tiers.0.path": None if given["disk"] is None else str(given["disk"]),
        "tiers.0.size": given["disk_size"],
    }
    config = load_config(given["config_file"], given["settings"], own)
    engine = chosen_engine(given["engine"], given["model"], flags)
    if flags and engine != "vllm":
        raise ConfigError(f"{shlex.join(['--', *flags])}: is for vLLM; accepted with --engine vllm")
    packages = ("vllm",) if engine == "vllm" else NEEDED
    if missing := [package for package in packages if find_spec(package) is None]:
        raise ConfigError(
            f"bench: {', '.join(missing)} not installed; accepted: pip install 'tiercel[serve,{engine}]'"
        )
    model = given["model"] or demo_model_dir(notice=lambda line: click.echo(f"tiercel: {line}", err=True))
    servers = Servers(
        model, engine, config,
        flags=flags, specs=specs, stop=stop,
        ready_deadline_s=_seconds("--ready-deadline", given["ready_deadline"]),
    )  # fmt: skip
    stack.callback(servers.close)
    return servers.sides, servers.notes


class _Progress:
    """Stages as lines, requests on a line that is written over; all on stderr."""

    def __init__(self) -> None:
        self._line = ProgressLine()

    def say(self, text: str) -> None:
        self._line.end()
        click.echo(text, err=True)

    def show(self, text: str) -> None:
        self._line.show(text)

    def end(self) -> None:
        self._line.end()
