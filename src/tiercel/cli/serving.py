"""Asking a running `tiercel serve`: one call over HTTP, its answer as a dictionary, its refusal as one line.

Knows URLs, the API key's variable and how a prompt is named on a command line; nothing of what is asked.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

import click

from tiercel.config.sources import API_KEY_VARIABLE
from tiercel.errors import ConfigError, RequestError

F = TypeVar("F", bound=Callable[..., object])

URL = "http://127.0.0.1:8000"
# Longer than any call may take there, but for a long prompt that is warmed.
_TIMEOUT_S = 660.0
_ANSWER_BYTES_MAX = 64 << 20
_PROMPT_BYTES_MAX = 64 << 20


def url_option(function: F) -> F:
    """Add `--url` and `--json` to a command, which gets them as `url` and `as_json`."""
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)
    return click.option("--url", default=URL, show_default=True, help="Where tiercel serve listens.")(as_json)


def prompt_options(*, session: bool) -> Callable[[F], F]:
    """Add what names a prompt: an argument, `--file`, `--messages`, `--salt`, and `--session` if it may."""

    def add(function: F) -> F:
        for option in (
            click.option("--salt", help="The tenant's cache salt."),
            *([click.option("--session", help="The prompt a session left.")] if session else []),
            click.option(
                "--messages", type=click.Path(path_type=Path), help="JSON file of a conversation's messages."
            ),
            click.option(
                "--file", "file", type=click.Path(path_type=Path), help="Text file of the prompt; - is stdin."
            ),
            click.argument("prompt", required=False),
        ):
            function = option(function)
        return function

    return add


def named_prompt(
    prompt: str | None, file: Path | None, messages: Path | None, session: str | None, salt: str | None
) -> dict[str, Any]:
    """The part of a body that names a prompt. Raises ConfigError unless exactly one way is used."""
    given = {"PROMPT": prompt, "--file": file, "--messages": messages, "--session": session}
    used = [name for name, value in given.items() if value is not None]
    if len(used) != 1:
        raise ConfigError(
            f"{' and '.join(used) or 'no prompt'} given; accepted is one of PROMPT, --file, --messages"
            + (" and --session" if session is not None or not used else "")
        )
    body: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
    if messages is not None:
        try:
            return body | {"messages": json.loads(_text_of(messages))}
        except (ValueError, RecursionError):
            raise ConfigError(f"--messages {messages}: is not JSON; accepted: a list of messages") from None
    if session is not None:
        return body | {"session": session}
    return body | {"prompt": prompt if file is None else _text_of(file)}


def ask(url: str, path: str, body: Mapping[str, Any] | None, timeout_s: float = _TIMEOUT_S) -> dict[str, Any]:
    """The answer to a POST, or without a body to a GET.

    Raises ConfigError if the server cannot be asked, RequestError if it refuses.
    """
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(API_KEY_VARIABLE):
        headers["Authorization"] = f"Bearer {key}"
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url}: is no URL; accepted: such as {URL}")
    try:
        raw = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(f"{base}{path}", raw, headers)
        # A proxy of the environment would be asked for this host's own addresses too.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
        with opener.open(asked, timeout=timeout_s) as answer:
            return _object(answer.read(_ANSWER_BYTES_MAX), url)
    except urllib.error.HTTPError as refusal:
        with refusal:
            told = _object(refusal.read(_ANSWER_BYTES_MAX), url).get("error")
        message = told.get("message") if isinstance(told, dict) else None
        if not message and refusal.code == HTTPStatus.NOT_FOUND:
            raise ConfigError(
                f"--url {url}: has no {path}; accepted: a tiercel serve with its own engine"
            ) from None
        raise RequestError(f"{url}: {message or f'answered {refusal.code}'}") from None
    except (OSError, HTTPException, ValueError) as fault:
        reason = getattr(fault, "reason", fault)
        raise ConfigError(
            f"--url {url}: cannot be asked ({reason}); accepted: a running tiercel serve"
        ) from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the API key elsewhere; it ends as a refusal with its status."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


def _object(raw: bytes, url: str) -> dict[str, Any]:
    try:
        read = json.loads(raw)
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise ConfigError(f"--url {url}: answered no JSON; accepted: a running tiercel serve")
    return read


def _text_of(path: Path) -> str:
    try:
        if str(path) == "-":
            return sys.stdin.read(_PROMPT_BYTES_MAX)
        with path.open(encoding="utf-8") as file:
            return file.read(_PROMPT_BYTES_MAX)
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    except OSError as fault:
        raise ConfigError(f"{path}: {fault.strerror}") from None
