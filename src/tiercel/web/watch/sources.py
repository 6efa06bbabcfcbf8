"""Where a `Watch` gets its figures: a store in this process, a daemon behind its socket, another server.

A source that cannot be reached says so in its answer, and is tried again with the next read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest

from tiercel import __version__
from tiercel.blocks import Chain
from tiercel.errors import DaemonError
from tiercel.service.client import RemoteStore
from tiercel.service.connecting import reach
from tiercel.service.prometheus import StoreCollector
from tiercel.store import Overview, StoreStats, overview_json
from tiercel.store.sessions import tenant_of
from tiercel.store.steering import Steerable, steer, steer_session
from tiercel.web.api.faults import SERVER, ApiError, no_session, show, too_busy
from tiercel.web.watch.steering import Call

SHOWN = 64
_DEADLINE_S = 10.0
_AGAIN_S = 1.0


class Watched(Steerable, Protocol):
    """What is asked of a store."""

    def stats(self) -> StoreStats: ...

    def overview(self, limit: int = 64) -> Overview: ...

    def chain_of(self, prefix: str) -> Chain | None: ...

    def clear(self, tag: bytes | None = None, deadline_s: float = 30.0) -> int: ...


class Source(Protocol):
    """What is watched."""

    def read(self, *, full: bool) -> dict[str, Any]:
        """What `overview_json` tells (not all of it unless `full`), and `source`: kind, where, up. Blocks."""

    def steer(self, call: Call, authorization: str) -> dict[str, Any]:
        """Do it, and tell how many blocks it was done with. Blocks. Raises ApiError."""

    def metrics(self) -> bytes:
        """The figures in Prometheus' text format. Blocks. Raises ApiError."""

    def close(self) -> None:
        """Release what it holds; a store of somebody else's stays open."""


class StoreSource:
    """A store of this process. `store` gives None before it is open; `facts` what else there is to say."""

    def __init__(
        self, store: Callable[[], Watched | None], kind: str, where: str,
        facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:  # fmt: skip
        self._store, self._kind, self._where, self._facts = store, kind, where, facts

    def read(self, *, full: bool) -> dict[str, Any]:
        """See `Source.read`."""
        store = self._store()
        told = {} if store is None else _told(store, full)
        return told | {"source": _about(self._kind, self._where, up=True) | dict(self._facts())}

    def steer(self, call: Call, authorization: str) -> dict[str, Any]:
        """See `Source.steer`."""
        store = self._store()
        if store is None:
            raise _away("no engine has opened the store yet")
        return steered(store, call)

    def metrics(self) -> bytes:
        """See `Source.metrics`; nothing before the store is open."""
        store = self._store()
        return _metrics(None if store is None else store.stats())

    def close(self) -> None:
        """See `Source.close`."""


class DaemonSource:
    """A daemon's store, behind its socket. Connects when there is something to connect to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._reached: RemoteStore | None = None
        self._tried_s = -_AGAIN_S
        self._why = ""

    def read(self, *, full: bool) -> dict[str, Any]:
        """See `Source.read`."""
        store = self._store()
        figures = None if store is None else store.figures()
        if store is None or figures is None:
            why = self._why or f"daemon at '{self._path}' does not answer"
            return {"source": _about("daemon", str(self._path), up=False) | {"why": why}}
        about = _about("daemon", str(self._path), up=True) | {
            "pid": figures.pid, "clients": figures.clients, "uptime_s": figures.uptime_s,
        }  # fmt: skip
        if figures.stats is None:
            return {"source": about}
        told = _told(store, full)
        if not told["stats"]["slots"]:
            # It went away between two questions.
            return {"source": about | {"up": False, "why": f"daemon at '{self._path}' does not answer"}}
        return told | {"source": about}

    def steer(self, call: Call, authorization: str) -> dict[str, Any]:
        """See `Source.steer`."""
        store = self._store()
        if store is None or store.figures() is None:
            raise _away(f"daemon at '{self._path}' does not answer")
        return steered(store, call)

    def metrics(self) -> bytes:
        """See `Source.metrics`."""
        store = self._store()
        figures = None if store is None else store.figures()
        if figures is None:
            raise _away(f"daemon at '{self._path}' does not answer")
        return _metrics(figures.stats)

    def close(self) -> None:
        """Leave the daemon."""
        with self._lock:
            if self._reached is not None:
                self._reached.close()

    def _store(self) -> RemoteStore | None:
        with self._lock:
            if self._reached is None and time.monotonic() - self._tried_s >= _AGAIN_S:
                self._tried_s = time.monotonic()
                try:
                    self._reached, self._why = reach(self._path), ""
                except DaemonError as fault:
                    self._why = str(fault)
            return self._reached


def steered(store: Watched, call: Call) -> dict[str, Any]:
    """Do a call on a store. Raises ApiError for a prefix that is not known."""
    if call.action == "clear":
        done = store.clear(call.scope, _DEADLINE_S)
        return {"object": "cache", "action": "clear", "blocks": done, "done": done}
    if call.session:
        return _steered_session(store, call)
    chain = store.chain_of(call.prefix)
    if chain is None:
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"prefix {show(call.prefix)} is not known here, or no more; accepted is one of /v1/overview",
            param="prefix", code="prefix_not_found",
        )  # fmt: skip
    done = steered_prompt(store, call.action, chain, call.ttl_s)
    return {"object": "cache", "action": call.action, "blocks": len(chain), "done": done}


def steered_prompt(store: Steerable, action: str, chain: Chain, ttl_s: float) -> int:
    """Do one of `store.steering.ACTIONS`, and tell with how many blocks. Raises ApiError."""
    try:
        return steer(store, action, chain, ttl_s=ttl_s, deadline_s=_DEADLINE_S)
    except CancelledError:
        raise too_busy("too many prefetches wait already") from None


def _steered_session(store: Watched, call: Call) -> dict[str, Any]:
    done = steer_session(store, call.action, tenant_of(call.salt), call.session, ttl_s=call.ttl_s)
    if done is None:
        raise no_session(call.session)
    return {"object": "cache", "action": call.action, "blocks": done.blocks, "done": done.done}


def _told(store: Watched, full: bool) -> dict[str, Any]:
    # Who only keeps the history needs no tree, and a store that nobody looks at should not make one.
    seen = store.overview(SHOWN) if full else Overview(time.time(), store.stats())
    return overview_json(seen)


def _metrics(stats: StoreStats | None) -> bytes:
    registry = CollectorRegistry()
    registry.register(StoreCollector(lambda: stats))
    return generate_latest(registry)


def _about(kind: str, where: str, *, up: bool) -> dict[str, Any]:
    return {"kind": kind, "where": where, "up": up, "version": __version__}


def _away(why: str) -> ApiError:
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE, why, kind=SERVER, code="store_away", headers={"Retry-After": "2"}
    )
