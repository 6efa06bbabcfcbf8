"""How an engine comes by its store: the daemon that is named, or a private one of its own."""

from __future__ import annotations

from pathlib import Path

from tiercel.config import Config
from tiercel.config.export import exported
from tiercel.errors import DaemonError
from tiercel.service import spawn, wire
from tiercel.service.client import RemoteStore
from tiercel.service.link import Link
from tiercel.service.logs import limit_faults
from tiercel.store.faults import log

# Opening the store may mean reaching tiers of other hosts.
_WELCOME_S = 30.0
_REACH_S = 5.0


def connect(config: Config, payload_bytes: int, *, private: str | None = None) -> RemoteStore:
    """The store of the daemon at `config.daemon.socket`, for blocks of up to `payload_bytes` bytes.

    Without a socket in the configuration a private daemon called `private` is started or joined; it is
    started again should it be killed. Once this has returned, no fault of a daemon is ever raised; raises
    DaemonError when there is none to begin with, or it does not take blocks of this size.
    """
    limit_faults()
    always = config.store.load == "always"
    if config.daemon.socket is not None:
        return _connected(Link(config.daemon.socket, payload_bytes), load_always=always)
    if private is None:
        raise DaemonError("no daemon is named: set daemon.socket")
    path = spawn.private_socket(private)
    environ = exported(config)
    spawn.ensure(path, environ)

    def respawn() -> None:
        try:
            spawn.ensure(path, environ)
        except DaemonError as fault:
            log.warning("private daemon: %s", fault)

    try:
        return _connected(Link(path, payload_bytes, respawn), load_always=always)
    except DaemonError:
        if spawn.answers(path):
            raise
    # It was about to end when we found it: nobody had visited it for a while.
    spawn.ensure(path, environ)
    return _connected(Link(path, payload_bytes, respawn), load_always=always)


def reach(path: Path) -> RemoteStore:
    """A daemon that runs, to look at or to steer; needs no arena. Raises DaemonError if there is none."""
    return _connected(Link(path, 0), _REACH_S)


def _connected(link: Link, wait_s: float = _WELCOME_S, *, load_always: bool = False) -> RemoteStore:
    try:
        link.hold(link.connect(wait_s))
    except wire.WireError as fault:
        raise DaemonError(
            f"daemon at '{link.path}' {fault}; start one there: tiercel daemon --socket {link.path}"
        ) from None
    return RemoteStore(link, load_always=load_always)
