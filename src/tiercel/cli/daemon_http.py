"""`tiercel daemon --http`: the dashboard and figures of a daemon, beside it and never in its way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tiercel.config.sources import API_KEY_VARIABLE
from tiercel.errors import ConfigError

if TYPE_CHECKING:
    from tiercel.service import Daemon

_PORT_MAX = 65535


def parse_address(text: str) -> tuple[str, int]:
    """`HOST:PORT`; an IPv6 address in brackets. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not (colon and bare and port.isascii() and port.isdigit() and int(port) <= _PORT_MAX):
        raise ConfigError(f"--http {text}: is no address; accepted: HOST:PORT, such as 127.0.0.1:8090")
    return bare, int(port)


@contextmanager
def http_beside(daemon: Daemon, address: str, token_file: Path | None) -> Iterator[None]:
    """Serve the dashboard of `daemon` while the block runs. Raises ConfigError."""
    host, port = parse_address(address)
    try:
        from tiercel.web.listening import bind, is_open_to_others
        from tiercel.web.watch.beside import beside
        from tiercel.web.watch.guard import Guard
        from tiercel.web.watch.sources import StoreSource
        from tiercel.web.watch.token import make_token, read_token
    except ImportError as error:
        raise ConfigError(
            f"--http: {error.name} is not installed; accepted: pip install 'tiercel[dashboard]'"
        ) from None
    key = os.environ.get(API_KEY_VARIABLE) or None
    token = read_token(token_file) if token_file is not None else key or make_token()
    listener = bind(host, port, ("--http", "--http"))
    if is_open_to_others(listener) and key is None:
        click.echo(
            f"tiercel: warning: others can look at {address}; set {API_KEY_VARIABLE} to ask for a key",
            err=True,
        )

    def facts() -> dict[str, Any]:
        told = daemon.figures()
        return {"pid": told.pid, "clients": told.clients, "uptime_s": told.uptime_s}

    source = StoreSource(lambda: daemon.store, "daemon", str(daemon.path), facts)
    with beside(source, listener, Guard(token, reads=key is not None, any_host=key is not None)) as url:
        click.echo(f"dashboard at {url}/")
        if token_file is None and key is None:
            click.echo(f"token for its buttons: {token}")
        yield
