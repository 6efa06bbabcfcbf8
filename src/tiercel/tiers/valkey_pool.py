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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tiercel.tiers.valkey_wire import Connection, Refusal

# Callers are the store's workers and few; this is a limit for the server's sake.
_CONNECTIONS_MAX = 64
_IDLE_MAX_S = 60.0
_PAUSE_S, _PAUSE_MAX_S = 0.1, 5.0
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
        self._lock = threading.Lock()
        self._room = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._closed = False
        self._paused_until_s = 0.0
        self._pause_s = _PAUSE_S
        self._last_fault = ""

    @property
    def paused(self) -> bool:
        """Whether the node failed lately and is not tried now."""
        with self._lock:
            return time.monotonic() < self._paused_until_s

    @contextmanager
    def borrow(self, until_s: float) -> Iterator[Connection]:
        """A connection for one thread. An exception inside closes it; an `OSError` also those that are idle.

        Raises `NodePaused` at once, `LoginError`, or any `OSError` by `until_s`.
        """
        if not self._room.acquire(timeout=max(0.0, until_s - time.monotonic())):
            raise TimeoutError("no connection free in time")
        connection: Connection | None = None
        try:
            connection = self._idle_one() or self._open(until_s)
            connection.until_s = until_s
            with self._lock:
                self._busy.add(connection)
            yield connection
            self._keep(connection)
            connection = None
        except OSError:
            self._drop_idle()
            raise
        finally:
            if connection is not None:
                with self._lock:
                    self._busy.discard(connection)
                connection.close()
            self._room.release()

    def close(self) -> None:
        """Close what is idle and end what waits. Calls that come later fail."""
        with self._lock:
            self._closed = True
            busy = list(self._busy)
        for connection in busy:
            connection.interrupt()
        self._drop_idle()

    def _idle_one(self) -> Connection | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if time.monotonic() - connection.idle_since_s < _IDLE_MAX_S and connection.quiet():
                return connection
            connection.close()

    def _keep(self, connection: Connection) -> None:
        connection.idle_since_s = time.monotonic()
        with self._lock:
            self._busy.discard(connection)
            if not self._closed and not connection.closed:
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
        try:
            connection = connect(self.address, self._login, until_s)
        except OSError as fault:
            with self._lock:
                self._last_fault = fault.strerror or str(fault)
                # Apart by chance, or all hosts would come back to a restarted server in one moment.
                self._paused_until_s = time.monotonic() + self._pause_s * random.uniform(0.5, 1.0)
                self._pause_s = min(2 * self._pause_s, _PAUSE_MAX_S)
            raise
        with self._lock:
            self._pause_s = _PAUSE_S
        return connection


def connect(address: Address, login: Login, until_s: float) -> Connection:
    """Open a socket, speak TLS if asked to, and log in. Raises `OSError`, `LoginError` when refused."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no connection in time")
    opened = _dial(address, login, left_s)
    try:
        connection = Connection(opened)
        connection.until_s = until_s
        _log_in(connection, login)
    except BaseException:
        opened.close()
        raise
    return connection


def _dial(address: Address, login: Login, left_s: float) -> socket.socket:
    if address.port == 0:
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        opened.settimeout(left_s)
    else:
        opened = socket.create_connection((address.host, address.port), timeout=left_s)
    try:
        if address.port == 0:
            opened.connect(address.host)
        else:
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if login.tls is not None:
            return login.tls.wrap_socket(opened, server_hostname=login.tls_name or address.host)
    except ssl.SSLCertVerificationError as fault:
        opened.close()
        raise LoginError(f"its certificate is refused ({fault.verify_message})") from None
    except BaseException:
        opened.close()
        raise
    return opened


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
