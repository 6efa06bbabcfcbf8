"""`tiercel cache prefetch | pin | unpin | demote | drop`: what to do with one prompt of a running server.

Or, with `--socket`, with what a session left in a daemon: the way for engines without such calls, as vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from tiercel.cli.serving import ask, named_prompt, prompt_options, url_option
from tiercel.errors import ConfigError, RequestError

_PIN = "10m"
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
        socket: Path | None,
        as_json: bool,
        ttl: str | None = None,
    ) -> None:
        body: dict[str, Any] = named_prompt(prompt, file, messages, session, salt)
        if socket is not None:
            told = _steered(action, socket, session, salt, ttl)
        else:
            told = ask(url, f"/v1/cache/{action}", body if ttl is None else body | {"ttl": ttl})
        click.echo(json.dumps(told) if as_json else outcome.format_map(told))

    decorated: Callable[..., None] = prompt_options(session=True)(url_option(run))
    decorated = click.option(
        "--socket", type=click.Path(path_type=Path), help="Ask a daemon instead; takes --session alone."
    )(decorated)
    if action == "pin":
        decorated = click.option("--ttl", metavar="TIME", help="How long, such as 10m [default: 10m].")(
            decorated
        )
    return click.command(action, help=f"{summary}\n\nAsks a running tiercel serve, or a daemon.")(decorated)


def _steered(
    action: str, socket: Path, session: str | None, salt: str | None, ttl: str | None
) -> dict[str, Any]:
    """The same answer from a daemon, which knows names of blocks and no tokens."""
    from tiercel.service.connecting import reach
    from tiercel.store.policy import parse_session, parse_ttl
    from tiercel.store.sessions import tenant_of
    from tiercel.store.steering import steer_session

    if click.get_current_context().get_parameter_source("url") is ParameterSource.COMMANDLINE:
        raise ConfigError("--url and --socket given; accepted is one of them")
    if session is None:
        raise ConfigError("--socket: a daemon knows no prompts; accepted is --session")
    named, ttl_s = parse_session(session, "--session"), parse_ttl(ttl or _PIN, "--ttl")
    with reach(socket) as store:
        done = steer_session(store, action, tenant_of(salt), named, ttl_s=ttl_s)
    if done is None:
        raise RequestError(
            f"session {named!r} is not known to the daemon at '{socket}', or not with this salt; "
            "accepted is one that a request named within 24 hours"
        )
    return {"object": "cache", "action": action, "blocks": done.blocks, "done": done.done}
