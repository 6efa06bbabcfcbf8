"""Where `tiercel top` gets its figures: a daemon behind its socket, or a server over HTTP.

Who cannot be reached says so in the answer, and is asked again with the next. Changes nothing there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from tiercel.cli.serving import ask
from tiercel.errors import DaemonError, TiercelError
from tiercel.service import RemoteStore
from tiercel.service.connecting import reach
from tiercel.store import overview_json

_SHOWN = 64
_HTTP_S = 5.0


class Source(Protocol):
    """What is looked at."""

    def read(self) -> dict[str, Any]:
        """An overview as `overview_json` tells it, and `source`: where, up, why not. Blocks for seconds."""

    def close(self) -> None:
        """Leave it."""


class DaemonSource:
    """The daemon at a socket; connects when there is one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._store: RemoteStore | None = None

    def read(self) -> dict[str, Any]:
        """See `Source.read`. Without an overview while no engine has opened the store."""
        where = {"kind": "daemon", "where": str(self._path)}
        try:
            if self._store is None:
                self._store = reach(self._path)
        except DaemonError as fault:
            return {"source": where | {"up": False, "why": str(fault)}}
        figures = self._store.figures()
        if figures is None:
            return {"source": where | {"up": False, "why": f"daemon at '{self._path}' does not answer"}}
        told = {} if figures.stats is None else overview_json(self._store.overview(_SHOWN))
        about = {"up": True, "pid": figures.pid, "clients": figures.clients, "uptime_s": figures.uptime_s}
        return told | {"source": where | about}

    def close(self) -> None:
        """See `Source.close`."""
        if self._store is not None:
            self._store.close()


class ServerSource:
    """The server at a URL."""

    def __init__(self, url: str) -> None:
        self._url = url

    def read(self) -> dict[str, Any]:
        """See `Source.read`."""
        where = {"kind": "server", "where": self._url}
        try:
            told = ask(self._url, "/v1/overview", None, _HTTP_S)
        except TiercelError as fault:
            return {"source": where | {"up": False, "why": str(fault)}}
        about = told.get("source")
        return told | {"source": {"up": True} | (about if isinstance(about, dict) else {}) | where}

    def close(self) -> None:
        """See `Source.close`."""
