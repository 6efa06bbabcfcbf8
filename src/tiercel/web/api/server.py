"""The process around the application: a socket, uvicorn, and an orderly end.

    signal -> no new request, waiting ones are refused -> those running may finish, or are cut after a grace
           -> the store writes down what it should and closes -> exit

It installs its own signal handlers, because uvicorn's would end the process before the store is closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from prometheus_client import disable_created_metrics
from starlette.types import ASGIApp

from tiercel.config import Config
from tiercel.web.api.app import make_app
from tiercel.web.api.completions import Service
from tiercel.web.api.engine import Loaded
from tiercel.web.api.tracing import Tracing
from tiercel.web.connections import ServingConnection
from tiercel.web.listening import bind, is_open_to_others, url_of
from tiercel.web.watch.endpoints import Endpoints
from tiercel.web.watch.guard import Guard
from tiercel.web.watch.sources import StoreSource
from tiercel.web.watch.watch import Watch

__all__ = ["bind", "is_open_to_others", "serve", "url_of"]

_log = logging.getLogger("tiercel.serve")
GRACE_S = 10.0
# After being cut, the engine needs until its next token or the end of the block it prefills.
_CUT_S = 60.0
_KEEP_ALIVE_S = 60


def serve(
    loaded: Loaded,
    config: Config,
    bound: socket.socket,
    *,
    api_key: str | None,
    token: str,
    ready: Callable[[], None],
    tracing: Tracing | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then close the store. Blocks; calls `ready` once requests are taken.

    `token` is what the dashboard's buttons need; with an `api_key`, that is it.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # its series are half of /metrics, unused
    service = Service(loaded, config.serve)
    watch = Watch(StoreSource(lambda: loaded.store, "server", loaded.facts.shown))
    # With a key nothing is told without it; without one, no stranger's page may look.
    guard = Guard(api_key or token, any_host=api_key is not None)
    app = make_app(service, api_key, tracing=tracing, live=Endpoints(watch, guard))
    server = _Server(app, service, watch, ready)
    watch.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ignore)  # uvicorn raises the signal again when it is done
    asyncio.run(server.serve(sockets=[bound]))
    # From here on a second signal ends the process: whatever is half written is told apart at the next start.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if tracing is not None:
        tracing.close()
    watch.close()
    _close(service, config)


def _close(service: Service, config: Config) -> None:
    deadline_s = config.store.flush_deadline_s
    service.queue.refuse_more()
    service.queue.stop_running()
    idle = service.queue.join(_CUT_S)
    flushed = service.loaded.store.close(deadline_s) if idle else service.loaded.store.flush(deadline_s)
    if not flushed:
        _log.warning(
            "not everything was written to the tiers: one is full, over its budget, broken or slower than "
            "%g s (store.flush_deadline)",
            deadline_s,
        )
    if not idle:
        # The engine still works on memory that closing would take away; nothing of it is needed any more.
        _log.warning("the engine did not come to an end within %g s; leaving", _CUT_S)
        logging.shutdown()
        os._exit(1)


class _Server(uvicorn.Server):
    """uvicorn's server, which tells the queue and the streams when it begins to stop."""

    def __init__(self, app: ASGIApp, service: Service, watch: Watch, ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=ServingConnection,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(GRACE_S) + 5,
            )
        )
        self._queue, self._watch, self._ready = service.queue, watch, ready
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        # A signal handler may interrupt whoever holds the queue's lock; the event loop calls when it can.
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop_requests, self._loop)

    def _stop_requests(self, loop: asyncio.AbstractEventLoop) -> None:
        self._queue.refuse_more()
        self._watch.end_streams()
        loop.call_later(GRACE_S, self._queue.stop_running)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Stands in for Python's default, so that a signal ends what runs and not the process."""
