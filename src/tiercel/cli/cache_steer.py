"""`tiercel cache prefetch | pin | unpin | demote | drop`: what to do with one prompt of a running server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tiercel.cli.serving import ask, named_prompt, prompt_options, url_option

# What each does, for its help, and how its outcome reads.
_ACTIONS: dict[str, tuple[str, str]] = {
    "prefetch": ("Bring a prompt up to RAM before it is asked.", "{done} of {blocks} blocks are in RAM"),
    "pin": ("Keep a prompt from eviction for a while.", "{done} of {blocks} blocks are pinned"),
    "unpin": ("End the pins of a prompt.", "no pins on its {blocks} blocks any more"),
    "demote": (
        "Write a prompt down and free its RAM, as in an agent's pause.",
        "{done} blocks left RAM; the prompt has {blocks}",
    ),
    "drop": (
        "Forget a prompt and all that begins with it, but for what others share.",
        "{done} blocks dropped; the prompt has {blocks}",
    ),
}


def steer_commands() -> list[click.Command]:
    """One command per action."""
    return [_command(action, *words) for action, words in _ACTIONS.items()]


def _command(action: str, summary: str, outcome: str) -> click.Command:
    def run(
        prompt: str | None,
        file: Path | None,
        messages: Path | None,
        session: str | None,
        salt: str | None,
        url: str,
        as_json: bool,
        ttl: str | None = None,
    ) -> None:
        body: dict[str, Any] = named_prompt(prompt, file, messages, session, salt)
        told = ask(url, f"/v1/cache/{action}", body if ttl is None else body | {"ttl": ttl})
        click.echo(json.dumps(told) if as_json else outcome.format_map(told))

    decorated: Callable[..., None] = prompt_options(session=True)(url_option(run))
    if action == "pin":
        decorated = click.option("--ttl", metavar="TIME", help="How long, such as 10m [default: 10m].")(
            decorated
        )
    return click.command(action, help=f"{summary}\n\nAsks a running tiercel serve.")(decorated)
