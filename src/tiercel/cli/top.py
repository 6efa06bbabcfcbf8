"""`tiercel top`: tiers, rates, hits, requests and faults of a running store, in the terminal."""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from tiercel.config import Config, default_socket, parse_seconds
from tiercel.errors import ConfigError, DaemonError

_EVERY_S = (0.1, 3600.0)
_PLAIN_WIDTH = 160


@click.command("top")
@click.option("--socket", "path", type=click.Path(path_type=Path), help="Unix socket of a daemon.")
@click.option("--url", help="A server instead: tiercel serve, or a daemon with --http.")
@click.option("--every", default="1s", show_default=True, metavar="TIME", help="How often to look.")
@click.option("--once", is_flag=True, help="Print one picture and end, as without a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print one overview as JSON and end.")
def command(path: Path | None, url: str | None, every: str, once: bool, as_json: bool) -> None:
    """Watch a running daemon or server: what is held where, what moves, what is reused, what is wrong.

    \b
    tiercel top
    tiercel top --url http://127.0.0.1:8000
    tiercel top --json | jq .stats.requests.hit_rate

    q or Ctrl-C ends it. It waits for a daemon that is away, and goes on when it is back.
    """
    from tiercel.cli.top_source import DaemonSource, ServerSource, Source

    if path is not None and url is not None:
        raise ConfigError("--socket and --url: give one of them")
    every_s = parse_seconds(every)
    if not _EVERY_S[0] <= every_s <= _EVERY_S[1]:
        raise ConfigError(f"--every: '{every}'; accepted: from 100ms to 1h")
    source: Source = ServerSource(url) if url is not None else DaemonSource(path or _socket())
    try:
        if as_json or once or not sys.stdout.isatty():
            _once(source, as_json)
        else:
            _watch(source, every_s)
    finally:
        source.close()


def _socket() -> Path:
    return Config.load().daemon.socket or default_socket()


def _once(source: Any, as_json: bool) -> None:
    """One overview. Raises DaemonError when there is nobody to ask."""
    told = source.read()
    if not told["source"]["up"]:
        raise DaemonError(told["source"]["why"])
    if as_json:
        click.echo(json.dumps(told, allow_nan=False))
        return
    from tiercel.cli import top_view

    width = shutil.get_terminal_size((_PLAIN_WIDTH, 24)).columns if sys.stdout.isatty() else _PLAIN_WIDTH
    for line in top_view.lines(told, None, width):
        click.echo(line.plain.rstrip())


def _watch(source: Any, every_s: float) -> None:
    """Show the picture again and again, until q or Ctrl-C."""
    from rich.console import Console, Group
    from rich.live import Live

    from tiercel.cli import top_view

    console = Console()
    told: dict[str, Any] = {}
    before: dict[str, Any] | None = None
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            began_s = time.monotonic()
            answer = source.read()
            if "stats" in answer or answer["source"]["up"]:
                before, told = told if "stats" in told else None, answer
            else:
                # The last figures stay in sight, with what has become of their source.
                told = {**told, "source": answer["source"]}
            shown = top_view.lines(told, before, console.width, console.height)
            live.update(Group(*shown), refresh=True)
            if pressed(max(0.0, every_s - (time.monotonic() - began_s))) == "q":
                return


@contextmanager
def _keys() -> Iterator[Any]:
    """A function that waits so many seconds for a key, and tells it; without a keyboard it only waits."""
    try:
        fd = sys.stdin.fileno()
        kept = termios.tcgetattr(fd)
    except (OSError, ValueError, termios.error):
        yield lambda wait_s: time.sleep(wait_s)
        return

    def pressed(wait_s: float) -> str:
        ready, _, _ = select.select([fd], [], [], wait_s)
        return os.read(fd, 1).decode(errors="replace") if ready else ""

    tty.setcbreak(fd)
    try:
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, kept)
