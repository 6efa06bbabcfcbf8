"""A client's connections to one daemon: made when needed, kept for the next call, given up when it is gone.

Every wait has a deadline. After a failure nothing is tried for a while, so that a daemon that is gone costs
callers a comparison and no more; the pause grows while it stays away. Knows no lease and no key.
"""

from __future__ import annotations

import logging
import mmap
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tiercel.errors import DaemonError
from tiercel.memory.populate import populate
from tiercel.service import wire

log = logging.getLogger("tiercel")
CONNECT_S = 0.5
_PAUSE_S = (0.1, 5.0)
_RESTART_WAIT_S = 30.0
_RESTARTS = 3
_RESPAWN_PAUSE_S = 10.0
_IDLE_MAX = 16
# Bounded, so that a daemon that answers slowly is not asked ever more at once.
_OPEN_MAX = 64
_POPULATE_STEP_BYTES = 4 << 20
_POPULATE_PAUSE_S = 0.001
_POPULATE_WAIT_S = 60.0


class Slab:
    """The daemon's arena as this process sees it."""

    def __init__(self, fd: int, welcome: wire.Welcome) -> None:
        self.arena = welcome.arena
        self.slot_bytes = welcome.slot_bytes
        self.slots = welcome.slots
        self.lossy = welcome.lossy
        self.map = mmap.mmap(fd, self.slot_bytes * self.slots, flags=mmap.MAP_SHARED)
        self.view = memoryview(self.map)
        self._dropped = threading.Event()

    def slot(self, number: int) -> memoryview:
        """One slot's bytes."""
        return self.view[number * self.slot_bytes : (number + 1) * self.slot_bytes]

    def populate(self, fd: int) -> None:
        """Map every page ahead, in small steps: a first touch costs more than the copy. Blocks; closes `fd`.

        Only pages that the daemon has touched: memory counts for the cgroup that touches it first, and a
        container of an engine must not be charged for the whole arena.
        """
        total_bytes = self.slot_bytes * self.slots
        try:
            touched_bytes = 0
            for start in range(0, total_bytes, _POPULATE_STEP_BYTES):
                end = min(start + _POPULATE_STEP_BYTES, total_bytes)
                until_s = time.monotonic() + _POPULATE_WAIT_S
                while touched_bytes < end:
                    touched_bytes = os.lseek(fd, start, os.SEEK_HOLE)
                    if touched_bytes < end and (time.monotonic() > until_s or self._dropped.wait(0.05)):
                        return
                if self._dropped.wait(_POPULATE_PAUSE_S):
                    return
                if not populate(self.map, start, end - start):
                    return
        except (OSError, ValueError):
            return
        finally:
            os.close(fd)

    def drop(self) -> None:
        """Populate no further. It is unmapped once nobody has it or a view of it any more: leases may."""
        self._dropped.set()


class Connection:
    """One socket, one question at a time. Broken for good after any failure."""

    def __init__(self, sock: socket.socket, slab: Slab | None) -> None:
        self.sock = sock
        self.slab = slab

    def ask(self, question: wire.Question, timeout_s: float) -> wire.Answer:
        """Send a question and wait for its answer, a refusal included. Raises WireError."""
        self.sock.settimeout(max(timeout_s, 0.001))
        wire.send(self.sock, question)
        try:
            answer, fds = wire.receive_answer(self.sock, timeout_s)
        except wire.WireError as fault:
            raise wire.WireError(f"{type(question).__name__.lower()}: {fault}") from None
        for fd in fds:
            os.close(fd)
        return answer


class Link:
    """The connections of this process. Thread-safe; safe after a fork (the child makes its own)."""

    def __init__(self, path: Path, payload_bytes: int, respawn: Callable[[], None] | None = None) -> None:
        self.path = path
        self.payload_bytes = payload_bytes
        self.slab: Slab | None = None
        self.failures = 0
        self.on_new_slab: list[Callable[[Slab], None]] = []
        self._respawn = respawn
        self._respawning: threading.Thread | None = None
        self._respawn_from_s = 0.0
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._open = 0
        self._pid = os.getpid()
        self._down_until_s = 0.0
        self._pause_s = _PAUSE_S[0]
        self._closed = False

    @property
    def up(self) -> bool:
        """Whether the last call went well, as far as we know."""
        return self._down_until_s == 0.0

    def get(self, wait_s: float) -> Connection | None:
        """A connection to use alone, or None while the daemon is away or too many are out.

        A new one may take `wait_s` seconds, should the daemon hang.
        """
        with self._lock:
            if os.getpid() != self._pid:
                self._idle, self._open, self._pid = [], 0, os.getpid()
            if self._closed or time.monotonic() < self._down_until_s or self._open >= _OPEN_MAX:
                return None
            self._open += 1
            if self._idle:
                return self._idle.pop()
        try:
            return self.connect(wait_s)
        except (wire.WireError, DaemonError) as fault:
            self.broken(None, fault)
            return None

    def hold(self, connection: Connection) -> None:
        """Keep a connection made with `connect` for the next call."""
        with self._lock:
            self._open += 1
        self.put(connection)

    def put(self, connection: Connection) -> None:
        """Give back a connection that is in order."""
        with self._lock:
            self._open -= 1
            self._down_until_s, self._pause_s = 0.0, _PAUSE_S[0]
            if not self._closed and len(self._idle) < _IDLE_MAX and connection.slab is self.slab:
                self._idle.append(connection)
                return
        connection.sock.close()

    def broken(self, connection: Connection | None, fault: Exception) -> None:
        """Give up a connection, and all idle ones with it: the daemon they lead to is gone or ill."""
        with self._lock:
            self._open -= 1
            self.failures += 1
            known_down = self._down_until_s > 0.0
            self._down_until_s = time.monotonic() + self._pause_s * random.uniform(0.5, 1.5)
            self._pause_s = min(self._pause_s * 2, _PAUSE_S[1])
            idle, self._idle = self._idle, []
        for one in [*idle, connection] if connection else idle:
            one.sock.close()
        if not known_down and not self._closed:
            log.warning("daemon at %s: %s; requests are computed until it is back", self.path, fault)
        self._bring_back()

    def connect(self, wait_s: float) -> Connection:
        """Connect and agree on version and arena. Raises WireError, or DaemonError when refused."""
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as fault:  # this process is out of descriptors
            raise wire.WireError(f"cannot be reached: {fault.strerror}") from None
        try:
            sock.settimeout(min(CONNECT_S, wait_s))
            try:
                sock.connect(os.fspath(self.path))
            except OSError as fault:
                raise wire.WireError(f"cannot be reached: {fault.strerror or fault}") from None
            _check_owner(sock, self.path)
            with suppress(wire.WireError):
                # Should it have turned us away at once, its answer says why.
                wire.send(sock, wire.Hello(wire.VERSION, os.getpid(), self.payload_bytes))
            answer, fds = wire.receive_answer(sock, wait_s)
        except (wire.WireError, DaemonError):
            sock.close()
            raise
        try:
            if isinstance(answer, wire.Refused):
                raise DaemonError(f"daemon at {self.path}: {answer.reason}")
            if not isinstance(answer, wire.Welcome) or answer.version != wire.VERSION:
                raise DaemonError(f"daemon at {self.path} speaks another version of the protocol")
            return Connection(sock, self._slab_of(answer, fds))
        except (DaemonError, wire.WireError):
            sock.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Close idle connections; those in use are closed when they are given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            slab, self.slab = self.slab, None
        for one in idle:
            one.sock.close()
        if slab is not None:
            slab.drop()

    def _slab_of(self, welcome: wire.Welcome, fds: list[int]) -> Slab | None:
        """The mapped arena of a welcome: the one we have, or, after a restart, a new one."""
        if not fds:
            return None
        with self._lock:
            if self.slab is not None and self.slab.arena == welcome.arena:
                return self.slab
            try:
                slab, old = Slab(fds[0], welcome), self.slab
                fd = os.dup(fds[0])
            except (OSError, ValueError, OverflowError) as fault:
                raise wire.WireError(f"its arena cannot be mapped: {fault}") from None
            self.slab = slab
        if old is not None:
            old.drop()
        threading.Thread(target=slab.populate, args=(fd,), name="tiercel-populate", daemon=True).start()
        for tell in self.on_new_slab:
            tell(slab)
        return slab

    def _bring_back(self) -> None:
        """Have the daemon started again, and wait for it on a thread of its own."""
        with self._lock:
            busy = self._respawning is not None and self._respawning.is_alive()
            if self._respawn is None or self._closed or busy or time.monotonic() < self._respawn_from_s:
                return
            self._respawn_from_s = time.monotonic() + _RESPAWN_PAUSE_S
            self._respawning = threading.Thread(target=self._restart, name="tiercel-respawn", daemon=True)
            self._respawning.start()

    def _restart(self) -> None:
        assert self._respawn is not None
        for _ in range(_RESTARTS):
            self._respawn()
            try:
                # A daemon that nobody visits ends again.
                return self.hold(self.connect(_RESTART_WAIT_S))
            except wire.WireError as fault:
                log.warning("daemon at %s: %s", self.path, fault)
            except DaemonError as refusal:
                return log.warning("%s", refusal)
        return None


def _check_owner(sock: socket.socket, path: Path) -> None:
    """Take no bytes from another user's process: who lies there could lie about what it holds."""
    _, uid = wire.peer(sock)
    if os.geteuid() not in (uid, 0) and uid != 0:
        raise DaemonError(f"daemon at {path} belongs to user {uid}; accepted are this user's and root's")
