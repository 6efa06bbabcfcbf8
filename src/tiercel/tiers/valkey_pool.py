"""Connections to one Valkey node: opened when needed, kept while they are quiet, dropped at the first fault.

A node that cannot be reached is left alone for a while that doubles, so that it costs a waiting caller once
and not every caller a deadline. Credentials go into the socket and nowhere else. Knows no keys.

Locking: `_lock` guards the lists and the pause; nothing waits under it.
"""

from __future__ import annotations

import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tiercel.tiers.valkey_wire import Connection, Refusal

T = TypeVar("T")

# Callers are the store's workers and few; this is a limit for the server's sake.
_CONNECTIONS_MAX = 64
_IDLE_MAX_S = 60.0
# The first pause is twice this, and none is shorter than what the failed try cost its caller.
_PAUSE_S, _PAUSE_MAX_S = 0.05, 10.0
# What Valkey and Redis take where `CONFIG GET proto-max-bulk-len` is not allowed: their default.
_VALUE_BYTES_MAX = 512 << 20


class LoginError(ConnectionError):
    """The server is there and does not want us: credentials, database or TLS are wrong."""


class NodePaused(ConnectionError):
    """Not tried: the node failed a moment ago."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a node listens; port 0: `host` is the path of a Unix socket."""

    host: str
    port: int

    def __str__(self) -> str:
        if self.port == 0:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Login:
    """How to enter any node. A password file is read at every connect, so that it may be rotated."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: Path | None = None
    db: int = 0
    tls: ssl.SSLContext | None = None
    tls_name: str | None = None


class Pool:
    """The connections to one node."""

    def __init__(self, address: Address, login: Login) -> None:
        self.address = address
        self._login = login
        self._lock = threading.Condition()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._borrowed = 0
        self._closed = False
        self._paused_until_s = 0.0
        self._pause_s = _PAUSE_S
        self._last_fault = ""

    @property
    def paused(self) -> bool:
        """Whether the node failed lately and is not tried now."""
        with self._lock:
            return time.monotonic() < self._paused_until_s

    def run(self, until_s: float, act: Callable[[Connection], T]) -> T:
        """Call `act` with a connection that is only its own. An `OSError` closes it and those that are idle.

        Raises `NodePaused` at once, `LoginError`, or any `OSError` by `until_s`.
        """
        began_s = time.monotonic()
        connection = self._take(until_s)
        keep = False
        try:
            if connection is None:
                connection = self._open(until_s)
            connection.until_s = until_s
            answer = act(connection)
            keep = True
        except OSError as fault:
            self._drop_idle()
            silent = connection is None or isinstance(fault, TimeoutError)
            if silent and not isinstance(fault, NodePaused):
                self._pause(fault, began_s)
            raise
        finally:
            self._leave(connection, keep)
        return answer

    def close(self) -> None:
        """Close what is idle and end what waits. Calls that come later fail."""
        with self._lock:
            self._closed = True
            busy = list(self._busy)
        for connection in busy:
            connection.interrupt()
        self._drop_idle()

    def _take(self, until_s: float) -> Connection | None:
        """An idle connection that looks alive; None when one has to be opened. `_leave` must follow."""
        with self._lock:
            while self._borrowed >= _CONNECTIONS_MAX:
                if not self._lock.wait(max(0.0, until_s - time.monotonic())):
                    raise TimeoutError("no connection free in time")
            self._borrowed += 1
            while self._idle:
                connection = self._idle.pop()
                if time.monotonic() - connection.idle_since_s < _IDLE_MAX_S and connection.quiet():
                    self._busy.add(connection)
                    return connection
                connection.close()
        return None

    def _leave(self, connection: Connection | None, keep: bool) -> None:
        with self._lock:
            self._borrowed -= 1
            self._lock.notify()
            if connection is None:
                return
            self._busy.discard(connection)
            if keep:
                self._pause_s = _PAUSE_S
            if keep and not self._closed and not connection.closed:
                connection.idle_since_s = time.monotonic()
                self._idle.append(connection)
                return
        connection.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _open(self, until_s: float) -> Connection:
        with self._lock:
            if self._closed:
                raise ConnectionError("closed")
            left_s = self._paused_until_s - time.monotonic()
        if left_s > 0:
            raise NodePaused(f"{self._last_fault} (tried a moment ago)")
        connection = connect(self.address, self._login, until_s)
        with self._lock:
            self._busy.add(connection)
        return connection

    def _pause(self, fault: OSError, began_s: float) -> None:
        with self._lock:
            now_s = time.monotonic()
            self._last_fault = fault.strerror or str(fault)
            self._pause_s = min(max(2 * self._pause_s, now_s - began_s), _PAUSE_MAX_S)
            # Apart by chance, or all hosts would come back to a restarted server in one moment.
            self._paused_until_s = now_s + self._pause_s * random.uniform(1.0, 1.25)


def connect(address: Address, login: Login, until_s: float) -> Connection:
    """Open a socket, speak TLS if asked to, and log in. Raises `OSError`, `LoginError` when refused.

    Only the looking up of a host's name keeps to the system's own time instead of `until_s`.
    """
    with ExitStack() as unfinished:
        opened = unfinished.enter_context(_dial(address, until_s))
        if login.tls is not None:
            opened.settimeout(_left_s(until_s))
            opened = unfinished.enter_context(_encrypted(opened, address, login, login.tls))
        connection = Connection(opened)
        connection.until_s = until_s
        _log_in(connection, login)
        unfinished.pop_all()
    return connection


def _dial(address: Address, until_s: float) -> socket.socket:
    """A connected socket. A host with several addresses gets its share of the time at each of them."""
    if address.port == 0:
        return _connected(socket.AF_UNIX, address.host, _left_s(until_s))
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    fault = OSError(f"{address.host} has no address")
    for tries_left, (family, _, _, _, place) in zip(range(len(found), 0, -1), found, strict=True):
        try:
            opened = _connected(family, place, _left_s(until_s) / tries_left)
        except OSError as error:
            fault = error
            continue
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return opened
    raise fault


def _connected(family: int, place: object, wait_s: float) -> socket.socket:
    with ExitStack() as unfinished:
        opened = unfinished.enter_context(socket.socket(family, socket.SOCK_STREAM))
        opened.settimeout(wait_s)
        # `place` is what the family's addresses are: a path, or what getaddrinfo gave.
        opened.connect(place)  # type: ignore[arg-type]
        unfinished.pop_all()
    return opened


def _left_s(until_s: float) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no connection in time")
    return left_s


def _encrypted(opened: socket.socket, address: Address, login: Login, tls: ssl.SSLContext) -> socket.socket:
    try:
        return tls.wrap_socket(opened, server_hostname=login.tls_name or address.host)
    except ssl.SSLCertVerificationError as fault:
        raise LoginError(f"its certificate is refused ({fault.verify_message})") from None


def _log_in(connection: Connection, login: Login) -> None:
    commands: dict[str, tuple[bytes, ...]] = {}
    if (password := _password(login)) is not None:
        user = [login.user.encode()] if login.user is not None else []
        commands["login"] = (b"AUTH", *user, password)
    if login.db:
        commands["database"] = (b"SELECT", b"%d" % login.db)
    commands["name"] = (b"CLIENT", b"SETNAME", b"tiercel")
    commands["limit"] = (b"CONFIG", b"GET", b"proto-max-bulk-len")
    connection.send(*commands.values())
    replies = {what: connection.reply() for what in commands}
    # The server's own words may repeat what was sent: of a refused login only their first is passed on.
    if isinstance(refused := replies.get("login"), Refusal):
        raise LoginError(f"user '{login.user or 'default'}' is refused ({refused.code})")
    for reply in replies.values():
        if isinstance(reply, Refusal) and reply.code in ("NOAUTH", "DENIED"):
            raise LoginError(f"the server wants a password ({reply.code})")
    if isinstance(refused := replies.get("database"), Refusal):
        raise LoginError(f"database {login.db} is refused ({refused.code})")
    limit = replies["limit"]
    value = limit[1] if isinstance(limit, list) and len(limit) == 2 else None
    digits = isinstance(value, bytes) and value.isdigit()
    connection.value_bytes_max = int(value) if digits and isinstance(value, bytes) else _VALUE_BYTES_MAX


def _password(login: Login) -> bytes | None:
    if login.password_file is None:
        return None if login.password is None else login.password.encode()
    try:
        return login.password_file.read_bytes().strip()
    except OSError as fault:
        raise LoginError(f"password_file '{login.password_file}': {fault.strerror}") from None
