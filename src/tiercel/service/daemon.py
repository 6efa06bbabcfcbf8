"""`Daemon`: one store behind a Unix socket, for every engine of a host.

It owns arena, index and tiers, so that KV outlives an engine and engines share one RAM tier. The store is
opened when the first engine says how large its blocks are, unless the configuration says so. One thread per
client, a bounded number of clients; peers of another user are refused.
"""

from __future__ import annotations

import dataclasses
import fcntl
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tiercel.blocks import HEADER_BYTES
from tiercel.codecs.consent import lossy_tiers
from tiercel.config import Config, human_bytes
from tiercel.errors import DaemonError, TiercelError
from tiercel.service import wire
from tiercel.service.session import Session
from tiercel.service.spawn import SOCKET_PATH_BYTES_MAX
from tiercel.store import TieredStore, open_store

log = logging.getLogger("tiercel")
CLIENTS_MAX = 512
# A client finds the queue full rather than waits in it: all that may come must fit at once.
_BACKLOG = CLIENTS_MAX
_ACCEPT_WAIT_S = 0.25
_LOCK_WAIT_S = 5.0
_LEAVE_WAIT_S = 1.0


class Daemon:
    """Serves `config`'s store on a Unix socket.

    Raises DaemonError when the socket cannot be had, ConfigError for a lossy codec that nobody accepted.
    """

    def __init__(self, config: Config, path: Path) -> None:
        # The store opens when the first engine comes: too late to be refused.
        lossy_tiers(config)
        self.path = path
        self._config = dataclasses.replace(config, ram=dataclasses.replace(config.ram, kind="shared"))
        self._listener = _listen(path)
        self._inode = os.stat(path).st_ino
        self._lock = threading.Lock()
        # Apart from the other: opening a tier may take seconds, and clients come and go meanwhile.
        self._opening = threading.Lock()
        self._store: TieredStore | None = None
        self._arena = secrets.token_bytes(8)
        self._clients: dict[socket.socket, threading.Thread] = {}
        self._started_s = time.monotonic()
        self._left_s = time.monotonic()
        self._stop = threading.Event()
        if config.ram.slot_bytes:
            try:
                self._open(config.ram.slot_bytes - HEADER_BYTES)
            except TiercelError:
                self._leave()
                raise

    @property
    def store(self) -> TieredStore | None:
        return self._store

    @property
    def ending(self) -> bool:
        """Whether it hangs up on its clients, or is about to."""
        return self._stop.is_set()

    def run(self, *, idle_exit_s: float | None = None) -> None:
        """Accept clients until `stop` is called, or until none was there for `idle_exit_s` seconds."""
        self._listener.settimeout(_ACCEPT_WAIT_S)
        self._left_s = time.monotonic()
        while not self._stop.is_set() and not self._idle(idle_exit_s):
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as fault:
                # Out of descriptors, most likely: those who are here must not suffer for it.
                log.warning("a client could not be accepted: %s", fault.strerror)
                self._stop.wait(_ACCEPT_WAIT_S)
                continue
            self._admit(client)

    def stop(self) -> None:
        """Make `run` return soon. Safe in a signal handler."""
        self._stop.set()

    def close(self) -> bool:
        """Leave the socket, end all sessions, flush the store. True if all was written down."""
        self._stop.set()
        self._leave()
        with self._lock:
            clients = dict(self._clients)
        for client in clients:
            _shut(client)
        until_s = time.monotonic() + self._config.store.flush_deadline_s
        # Together: the time is for writing down, and who waits for a tier is told by its own deadline.
        gone_s = time.monotonic() + _LEAVE_WAIT_S
        for thread in clients.values():
            thread.join(max(0.0, min(gone_s, until_s) - time.monotonic()))
        store = self._store
        return store is None or store.close(max(0.0, until_s - time.monotonic()))

    # For sessions.

    def welcome(self, hello: wire.Hello) -> tuple[wire.Welcome, list[int]]:
        """Greet a client; open the store if it is the first engine. Raises TiercelError to refuse it."""
        if hello.version != wire.VERSION:
            raise DaemonError(
                f"protocol version {hello.version} of process {hello.pid} is not accepted; this daemon "
                f"speaks version {wire.VERSION}: use one release of tiercel for both"
            )
        if hello.payload_bytes > 0:
            self._open(hello.payload_bytes)
        store = self._store
        if store is None or hello.payload_bytes <= 0:
            return wire.Welcome(wire.VERSION, os.getpid()), []
        arena = store.arena
        room_bytes = arena.slot_bytes - HEADER_BYTES
        if hello.payload_bytes > room_bytes:
            raise DaemonError(
                f"a block of {human_bytes(hello.payload_bytes)} does not fit this daemon's slots of "
                f"{human_bytes(room_bytes)}; set ram.slot for the largest model, or run a daemon for each"
            )
        welcome = wire.Welcome(
            wire.VERSION, os.getpid(), self._arena, arena.slot_bytes, arena.slots, store.lossy
        )
        return welcome, [arena.fileno()]

    def figures(self) -> wire.Figures:
        store = self._store
        with self._lock:
            clients = len(self._clients)
        uptime_s = time.monotonic() - self._started_s
        return wire.Figures(os.getpid(), clients, uptime_s, store.stats() if store else None)

    # Inner workings.

    def _open(self, payload_bytes: int) -> None:
        with self._opening:
            if self._store is None and not self._stop.is_set():
                self._store = open_store(self._config, payload_bytes)

    def _idle(self, idle_exit_s: float | None) -> bool:
        with self._lock:
            gone_s = time.monotonic() - self._left_s
            return idle_exit_s is not None and not self._clients and gone_s >= idle_exit_s

    def _admit(self, client: socket.socket) -> None:
        pid, uid = wire.peer(client)
        with self._lock:
            full = len(self._clients) >= CLIENTS_MAX
        if full or uid not in (os.geteuid(), 0):
            why = (
                f"{CLIENTS_MAX} connections are open, no more are accepted"
                if full
                else f"it serves user {os.geteuid()}, this process belongs to user {uid}"
            )
            log.warning("process %d was turned away: %s", pid, why, extra={"kind": f"turned away: {why}"})
            _turn_away(client, why)
            return
        thread = threading.Thread(
            target=self._serve, args=(client,), name=f"tiercel-client-{pid}", daemon=True
        )
        with self._lock:
            self._clients[client] = thread
        try:
            thread.start()
        except RuntimeError:
            self._forget(client)
            client.close()

    def _serve(self, client: socket.socket) -> None:
        try:
            Session(client, self).run()
        finally:
            self._forget(client)

    def _forget(self, client: socket.socket) -> None:
        with self._lock:
            self._clients.pop(client, None)
            self._left_s = time.monotonic()

    def _leave(self) -> None:
        """Remove the socket, unless another daemon has put its own there, and stop listening.

        In this order: while we listen nobody takes our place, so that what is removed is ours.
        """
        with suppress(OSError):
            if os.stat(self.path).st_ino == self._inode:
                self.path.unlink()
        self._listener.close()


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise DaemonError(
            f"socket path '{path}' has {len(os.fsencode(path))} bytes; accepted are up to "
            f"{SOCKET_PATH_BYTES_MAX}: name a shorter one with daemon.socket"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(path):
            _clear_stale(path)
            _private(lambda: listener.bind(os.fspath(path)))
            listener.listen(_BACKLOG)
    except OSError as fault:
        listener.close()
        raise DaemonError(f"socket '{path}' cannot be served: {fault.strerror}") from None
    except DaemonError:
        listener.close()
        raise
    return listener


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time: two that find the same stale socket must not both put theirs there."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(folder, path)
        yield
    finally:
        os.close(folder)


def _lock(folder: int, path: Path) -> None:
    until_s = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until_s:
                raise DaemonError(f"directory '{path.parent}' is locked by another process") from None
            time.sleep(0.02)


def _private(bind: Callable[[], None]) -> None:
    """Bind with a mask, for a socket that is open to others for a moment is open."""
    mask = os.umask(0o177)
    try:
        bind()
    finally:
        os.umask(mask)


def _clear_stale(path: Path) -> None:
    """Remove a socket nobody answers on. Raises DaemonError when somebody does, or it is no socket."""
    if not os.path.lexists(path):
        return
    if not path.is_socket():
        raise DaemonError(f"'{path}' is there and is no socket; name another with daemon.socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError:
            # Full backlog, a daemon that hangs: somebody is there.
            pass
    raise DaemonError(f"a daemon already serves '{path}'; stop it or name another socket with daemon.socket")


def _turn_away(client: socket.socket, why: str) -> None:
    client.setblocking(False)
    with suppress(wire.WireError):
        wire.send(client, wire.Refused(why))
    client.close()


def _shut(client: socket.socket) -> None:
    with suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)
