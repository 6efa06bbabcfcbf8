"""`tiercel eval`: what lossy ways of keeping and reading KV do to a model's answers, before one is switched
on.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tiercel.cli.progress import ProgressLine
from tiercel.config import parse_seconds
from tiercel.config.sources import API_KEY_VARIABLE
from tiercel.errors import ConfigError, ModelError
from tiercel.report.files import check_output, write

if TYPE_CHECKING:
    from tiercel.eval.results import Report
    from tiercel.eval.samples import Task

_FILE = click.Path(path_type=Path)
_FAILED = 1
_SEEDS_MAX = 1000
_POLICIES = "full,window,streaming,h2o,quest,landmark,oracle"
_TASKS = "json-records,kv-list,needle,text-nll"


@click.command("eval")
@click.argument("model", required=False, type=_FILE)
@click.option("--policies", default=_POLICIES, show_default=True, metavar="NAMES", help="all: every one.")
@click.option("--tasks", default=_TASKS, show_default=True, metavar="NAMES", help="all: every built-in one.")
@click.option(
    "--task-file",
    "task_files",
    type=_FILE,
    multiple=True,
    help="Your own: JSONL of context, question, answer.",
)
@click.option(
    "--budget", "budgets", default="0.25", show_default=True, metavar="SHARES",
    help="Of the context's tokens, to keep or read; several with commas.",
)  # fmt: skip
@click.option(
    "--seeds", default="1,2,3", show_default=True, metavar="NUMBERS", help="One text each per task."
)
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto")
@click.option(
    "--texts", type=_FILE, help="Directory of text files to hide facts in [default: this machine's]."
)
@click.option("--json", "json_file", type=_FILE, help="Write the report to this file.")
@click.option("--html", "html_file", type=_FILE, help="Write the report as a page with plots.")
@click.option("--url", help="Judge the server there instead: its answers against those of --baseline-url.")
@click.option("--baseline-url", help="With --url: the same model without the lossy setting.")
@click.option(
    "--name", help="With --url: the model's name in the API [default: the first each server lists]."
)
@click.option(
    "--deadline", metavar="TIME", default="5m", show_default=True, help="Of one request to a server."
)
@click.option(
    "--speed", is_flag=True, help="Also let every policy generate: TTFT, TPOT, bytes on the device and moved."
)
@click.option("--max-kl", type=click.FloatRange(0), help="Fail if any policy's KL on any task is above this.")
@click.option(
    "--min-accuracy-drop", type=click.FloatRange(0, 1), help="Fail where accuracy falls by this much or more."
)
def command(
    model: Path | None, policies: str, tasks: str, task_files: tuple[Path, ...], budgets: str, seeds: str,
    dtype: str, texts: Path | None, json_file: Path | None, html_file: Path | None,
    url: str | None, baseline_url: str | None, name: str | None, deadline: str, speed: bool,
    max_kl: float | None, min_accuracy_drop: float | None,
) -> int:  # fmt: skip
    """Judge policies on the model in folder MODEL [default: the demo model].

    Every policy answers the same questions about the same texts, and is compared with full attention token by
    token. A text is read once; each policy then costs one forward. Exit code 1: a gate did not hold.

    \b
    tiercel eval
    tiercel eval MODEL --policies all --tasks all --html report.html
    tiercel eval MODEL --policies landmark --budget 0.1,0.25 --max-kl 0.05
    tiercel eval --url http://a:8000 --baseline-url http://b:8000 --min-accuracy-drop 0.05
    """
    from tiercel.eval.own import own_task
    from tiercel.eval.tasks import TASKS, tasks_named

    shares, numbers = _shares(budgets), _numbers(seeds)
    chosen = tasks_named(TASKS if tasks == "all" else _names(tasks)) + [own_task(one) for one in task_files]
    if not chosen:
        raise ConfigError("--tasks: names none, and there is no --task-file; accepted: one or more")
    check_output("--json", json_file)
    check_output("--html", html_file)
    if url is None and baseline_url is None:
        report = _judged(
            model, policies, chosen, shares, numbers, dtype, texts, speed, max_kl, min_accuracy_drop
        )
    elif url is None or baseline_url is None:
        raise ConfigError("--url and --baseline-url: only one is given; accepted: both, or none")
    elif model is not None or max_kl is not None or speed:
        raise ConfigError(
            "--url: servers tell no probabilities; accepted: without MODEL, --max-kl and --speed"
        )
    else:
        report = _compared(
            (url, baseline_url), name, parse_seconds(deadline), chosen, numbers, texts, min_accuracy_drop
        )
    _show(report)
    if json_file is not None:
        write("--json", json_file, report.to_json())
    if html_file is not None:
        from tiercel.eval.page import write_page

        write_page(html_file, report)
    return _FAILED if report.failed else 0


def _judged(
    model: Path | None, policies: str, tasks: Sequence[Task], budgets: Sequence[float], seeds: Sequence[int],
    dtype: str, texts: Path | None, speed: bool, max_kl: float | None, min_accuracy_drop: float | None,
) -> Report:  # fmt: skip
    """Load the model, run everything, and say what it comes to."""
    from tiercel.attention.registry import POLICIES, policies_named
    from tiercel.attention.running import TeacherForced
    from tiercel.bench.texts import Texts, find_texts
    from tiercel.engines.transformers.model import load_model
    from tiercel.eval.run import Judged, evaluate
    from tiercel.eval.verdict import gates, verdicts
    from tiercel.models import demo_model_dir
    from tiercel.report.machine import machine_facts

    chosen = policies_named(POLICIES if policies == "all" else _names(policies))
    if not chosen:
        raise ConfigError(f"--policies: names none; accepted: all, {', '.join(POLICIES)}")
    facts = machine_facts(("torch", "transformers"))
    filler = Texts(find_texts(texts)).piece
    folder = model or demo_model_dir(notice=lambda line: click.echo(f"tiercel: {line}", err=True))
    loaded = load_model(folder, dtype=dtype)
    if loaded.tokenizer is None:
        raise ModelError(f"model folder {folder} has no tokenizer; accepted: one with a tokenizer.json")
    line = ProgressLine()
    rows = evaluate(
        Judged(TeacherForced(loaded.module), loaded.tokenizer, loaded.context_tokens),
        chosen, budgets, tasks, seeds, filler, lambda task, seed: line.show(f"{task}, text {seed}"),
        speed=speed,
    )  # fmt: skip
    line.end()
    return _report(
        model=loaded.name,
        revision=loaded.revision,
        dtype=str(loaded.dtype).removeprefix("torch."),
        seeds=list(seeds),
        facts=facts,
        rows=rows,
        verdicts=verdicts(rows),
        failed=gates(rows, max_kl, min_accuracy_drop),
    )


def _compared(
    urls: tuple[str, str], name: str | None, deadline_s: float, tasks: Sequence[Task], seeds: Sequence[int],
    texts: Path | None, min_accuracy_drop: float | None,
) -> Report:  # fmt: skip
    """Ask two servers, and say what it comes to."""
    if find_spec("httpx") is None:
        raise ConfigError("eval --url: httpx not installed; accepted: pip install 'tiercel[bench]'")
    from tiercel.bench.client import checked_url
    from tiercel.bench.texts import Texts, find_texts
    from tiercel.eval.endpoints import Endpoint, compare_endpoints
    from tiercel.eval.verdict import endpoint_gates
    from tiercel.report.machine import machine_facts

    checked = [checked_url(flag, url) for flag, url in zip(("--url", "--baseline-url"), urls, strict=True)]
    key = os.environ.get(API_KEY_VARIABLE)
    line = ProgressLine()
    with (
        Endpoint(checked[0], name, key, deadline_s) as server,
        Endpoint(checked[1], name, key, deadline_s) as baseline,
    ):
        rows = compare_endpoints(
            server, baseline, tasks, seeds, Texts(find_texts(texts)).piece,
            lambda task, seed: line.show(f"{task}, text {seed}"),
        )  # fmt: skip
    line.end()
    return _report(
        model=f"{server.model} at {checked[0]}, against {checked[1]}", revision="", dtype="",
        seeds=list(seeds), facts=machine_facts(()), rows=[], verdicts={},
        failed=endpoint_gates(rows, min_accuracy_drop), endpoints=rows,
    )  # fmt: skip


def _report(**parts: Any) -> Report:
    """A report of now, by this command."""
    from datetime import UTC, datetime

    from tiercel import __version__
    from tiercel.eval.results import FORMAT, Report

    return Report(
        format=FORMAT, version=__version__, when=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["tiercel", *sys.argv[1:]]), **parts,
    )  # fmt: skip


def _show(report: Report) -> None:
    """The tables and verdicts on stdout."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tiercel.eval.page import ENDPOINT_COLUMNS, cells_of, columns_of, endpoint_cells

    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
    for task in dict.fromkeys(row.task for row in report.rows):
        mine = [row for row in report.rows if row.task == task]
        table = Table(title=Text(f"{task}: {mine[0].seeds} texts of {mine[0].context_tokens} tokens"),
                      title_justify="left", box=None, pad_edge=False)  # fmt: skip
        for number, name in enumerate(columns_of(mine)):
            table.add_column(name, justify="right" if number else "left", no_wrap=True)
        for row in mine:
            table.add_row(*(Text(cell) for cell in cells_of(row)))
        console.print(table)
        console.print()
    if report.endpoints:
        table = Table(box=None, pad_edge=False)
        for number, name in enumerate(ENDPOINT_COLUMNS):
            table.add_column(name, justify="right" if number else "left", no_wrap=True)
        for one in report.endpoints:
            table.add_row(*(Text(cell) for cell in endpoint_cells(one)))
        console.print(table)
    for label, words in report.verdicts.items():
        console.print(Text(f"{label}: {words}"))
    for failed in report.failed:
        click.echo(f"tiercel: gate: {failed}", err=True)


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(one.strip() for one in text.split(",") if one.strip()))


def _shares(text: str) -> list[float]:
    try:
        shares = [float(one) for one in _names(text)]
    except ValueError:
        shares = []
    if not shares or not all(0 < one <= 1 for one in shares):
        raise ConfigError(
            f"--budget: '{text}' is not accepted; accepted: shares above 0, up to 1, such as 0.25"
        )
    return shares


def _numbers(text: str) -> list[int]:
    try:
        seeds = [int(one) for one in _names(text)]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0 or len(seeds) > _SEEDS_MAX:
        raise ConfigError(f"--seeds: '{text}' is not accepted; accepted: whole numbers, such as 1,2,3")
    return seeds
