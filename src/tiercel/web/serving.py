"""Run the page's server: until it is stopped, or beside something else for as long as a block runs.

The only module that imports uvicorn. It listens where it is told, on the loopback address by default.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from tiercel.errors import ConfigError
from tiercel.web.app import create_app

STOP_DEADLINE_S = 10.0


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError, one line, where the address cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: {error.strerror or error}; accepted: a free address"
        ) from None


def address_of(listener: socket.socket) -> str:
    """The address to open in a browser."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(listener: socket.socket) -> None:
    """Serve until interrupted."""
    _server().run(sockets=[listener])


@contextmanager
def served(host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve in a thread while the block runs; yields the address."""
    with listen(host, port) as listener:
        server = _server()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield address_of(listener)  # the socket listens already, so early requests only wait
        finally:
            server.should_exit = True
            thread.join(STOP_DEADLINE_S)


def _server() -> uvicorn.Server:
    return uvicorn.Server(uvicorn.Config(create_app(), log_level="warning", access_log=False, lifespan="off"))
