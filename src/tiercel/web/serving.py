"""Run the site's server: until it is stopped, or beside something else for as long as a block runs.

It answers on a socket that listens already. What goes wrong in it is logged and stays in it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from tiercel.web.connections import Connection
from tiercel.web.listening import url_of

_log = logging.getLogger("tiercel")
STOP_DEADLINE_S = 10.0
_GRACE_S = 2


def serve(listener: socket.socket, app: ASGIApp, ending: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGTERM or Ctrl-C. `ending` is called first then, so that endless answers end."""
    # uvicorn raises the signal again when it is done; whoever called has something to put in order then.
    before = [(number, signal.signal(number, _ignore)) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        _Server(app, ending).run(sockets=[listener])
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Stands in for Python's default, so that a signal ends the server and not the process."""


@contextmanager
def served(listener: socket.socket, app: ASGIApp, ending: Callable[[], None] = lambda: None) -> Iterator[str]:
    """Serve in a thread while the block runs; yields the address. Closes the listener."""
    with listener:
        server = _Server(app, ending)
        thread = threading.Thread(target=server.run, args=([listener],), name="tiercel-http", daemon=True)
        thread.start()
        try:
            yield url_of(listener)  # the socket listens already, so early requests only wait
        finally:
            server.should_exit = True
            thread.join(STOP_DEADLINE_S)
            if thread.is_alive():
                _log.warning("the HTTP server did not end within %g s", STOP_DEADLINE_S)


class _Server(uvicorn.Server):
    """uvicorn's server, which says when it begins to stop."""

    def __init__(self, app: ASGIApp, ending: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                limit_concurrency=Connection.connections_max,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._ending = ending

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending()
        await asyncio.sleep(0)
        await super().shutdown(sockets)
