"""`tiercel demo`: see conversations resumed from RAM, from disk and after a restart, on a real model."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import click

from tiercel.config import parse_bytes, writable_cache_dir
from tiercel.errors import ConfigError
from tiercel.report.files import write

_FILE = click.Path(path_type=Path)
# What `--quick` makes of sizes that are not given: a first look at everything.
_QUICK = {"conversations": 2, "tokens": 800, "answer_tokens": 8}
_QUICK_BLOCK_TOKENS = 64
_CONVERSATIONS = 4
REPORT = "tiercel-demo.html"
_NEEDED = ("torch", "transformers")


@click.command("demo")
@click.option(
    "--conversations", type=click.IntRange(1, 64), help="How many, each over its own document. [default: 4]"
)
@click.option("--tokens", type=click.IntRange(1), help="Tokens of each document. [default: 5000]")
@click.option("--answer-tokens", type=click.IntRange(1), help="Longest answer, in tokens. [default: 24]")
@click.option("--ram", metavar="SIZE", help="RAM tier, such as 300MiB. [default: half of what is needed]")
@click.option(
    "--cache-dir",
    type=_FILE,
    help="Where blocks go on disk. [default: a temporary one in the cache directory]",
)
@click.option("--keep", is_flag=True, help="Keep the blocks on disk at the end.")
@click.option(
    "--document", "documents", type=_FILE, multiple=True, help="A text file to talk about; may be repeated."
)
@click.option("--model", type=_FILE, help="A Hugging Face model folder. [default: the demo model]")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default="auto",
    show_default=True,
    help="Number format of weights and cache.",
)
@click.option("--json", type=_FILE, help="Write the rows to this file as JSON.")
@click.option("--html", type=_FILE, help=f"Where to write the report. [default: {REPORT}]")
@click.option("--quick", is_flag=True, help="Small sizes, for a first look: short texts show small gains.")
def command(**given: Any) -> int:
    """Talk to a real model about long real documents, and come back to it.

    Every conversation reads a document of thousands of tokens. RAM holds about half of what the model
    remembers of them, the rest lies on disk. Then each conversation goes on: from RAM, from disk, and, after
    a restart, in a new process. Each resumed turn is also recomputed without the cache, to compare the time
    to the first token and to check that the answer is the same.

    \b
    tiercel demo
    tiercel demo --document mybook.txt --tokens 6000
    tiercel demo --quick --json rows.json

    Exit code 0 when every turn was resumed with the same answer as a full recompute, else 1.
    """
    if missing := [package for package in _NEEDED if find_spec(package) is None]:
        raise ConfigError(
            f"demo: {', '.join(missing)} not installed; accepted: pip install 'tiercel[transformers]'"
        )
    from tiercel.demo import DemoSettings, run_demo
    from tiercel.demo.console import ConsoleScreen, show
    from tiercel.demo.report import write_report
    from tiercel.report.console import make_console

    settings = DemoSettings(**_chosen(given))
    console = make_console()
    with _ended_in_order(), ConsoleScreen(console) as screen:
        outcome = run_demo(settings, screen)
    show(outcome, console)
    if settings.json is not None:
        write("--json", settings.json, outcome.to_json())
        screen.line(f"Rows: {settings.json}")
    if settings.html is not None:
        write_report(settings.html, outcome)
        screen.line(f"Report: {settings.html.absolute()}")
    return 0 if outcome.ok else 1


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Let SIGTERM end the demo as Ctrl-C does: second process ended, temporary directory removed."""

    def leave(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _chosen(given: dict[str, Any]) -> dict[str, Any]:
    """The settings that were given, with `--quick`'s sizes in place of those that were not."""
    chosen = {name: value for name, value in given.items() if value is not None}
    if chosen.pop("quick"):
        chosen = {**_QUICK, "block_tokens": _QUICK_BLOCK_TOKENS, **chosen}
    if "ram" in chosen:
        try:
            chosen["ram_bytes"] = parse_bytes(chosen.pop("ram"))
        except ConfigError as error:
            raise ConfigError(f"--ram: {error}") from None
    # Where the working directory cannot be written to, the cache directory can.
    here = os.access(Path.cwd(), os.W_OK)
    chosen.setdefault("html", Path(REPORT) if here else writable_cache_dir() / REPORT)
    files = chosen["documents"]
    # More documents than the usual number of conversations ask for one conversation each.
    if given["conversations"] is None and len(files) > chosen.get("conversations", _CONVERSATIONS):
        chosen["conversations"] = len(files)
    return chosen
