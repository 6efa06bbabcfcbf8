"""A TCP proxy that misbehaves on demand: delays, throttles, truncates, cuts, corrupts, swallows.

    with FaultProxy("127.0.0.1", server_port) as proxy:
        ... connect to proxy.port ...
        proxy.set(down=Truncate(after_bytes=1000))   # down: what the server sends to the client
        ... proxy.fired tells that the fault happened ...
        proxy.heal()

A fault counts bytes over all connections from when it is set. One fault per direction at a time.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_CHUNK_BYTES = 64 << 10
_LOOK_S = 0.05
# With this SO_LINGER value a close sends RST instead of FIN.
_RESET = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class Fault:
    """Base: passes everything on. `fired` counts what the fault touched; set by the proxy under its lock."""

    fired: int = field(default=0, init=False)
    seen_bytes: int = field(default=0, init=False)


@dataclass(slots=True)
class Delay(Fault):
    """Every chunk is held back this long before it is passed on."""

    delay_s: float


@dataclass(slots=True)
class Throttle(Fault):
    """At most so many bytes a second on each connection."""

    bytes_per_s: float


@dataclass(slots=True)
class Truncate(Fault):
    """After so many more bytes the connection ends in an orderly way (FIN), the rest is lost."""

    after_bytes: int = 0


@dataclass(slots=True)
class Cut(Fault):
    """After so many more bytes the connection is reset (RST)."""

    after_bytes: int = 0


@dataclass(slots=True)
class Corrupt(Fault):
    """One bit of the byte at this distance is flipped, once; with `every`, again at each such distance."""

    at_byte: int = 0
    every: bool = False


@dataclass(slots=True)
class BlackHole(Fault):
    """After so many more bytes nothing is passed on, nothing is closed; what waits flows after `heal()`."""

    after_bytes: int = 0


@dataclass(slots=True)
class _Link:
    """The two sockets of one connection. Only the last of its two pumps closes them."""

    client: socket.socket
    server: socket.socket
    ended: bool = False
    reset: bool = False
    pumps: int = 2

    def end(self, reset: bool) -> None:
        """Have both pumps stop; the first reason given counts."""
        if not self.ended:
            self.ended, self.reset = True, reset
        for side in (self.client, self.server):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RD if self.reset else socket.SHUT_RDWR)

    def close(self) -> None:
        for side in (self.client, self.server):
            if self.reset:
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            side.close()


class FaultProxy:
    """Forwards `port` on 127.0.0.1 to `host:target_port`. A context manager; leaves no thread behind."""

    def __init__(self, host: str, target_port: int) -> None:
        self._target = (host, target_port)
        self._lock = threading.Condition()
        self._faults: dict[str, Fault] = {"up": Fault(), "down": Fault()}
        self._fired = 0
        self._links: list[_Link] = []
        self._threads: list[threading.Thread] = []
        self._closed = False
        self.connections = 0
        self.passed_bytes = {"up": 0, "down": 0}
        self._listener: socket.socket | None = None
        self.port = 0
        self.open()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def fired(self) -> int:
        """How often a fault touched something, since the start."""
        with self._lock:
            return self._fired + sum(fault.fired for fault in self._faults.values())

    def set(self, *, up: Fault | None = None, down: Fault | None = None) -> None:
        """Replace the faults of both directions (up: from the client to the server)."""
        with self._lock:
            self._fired += sum(fault.fired for fault in self._faults.values())
            self._faults = {"up": up or Fault(), "down": down or Fault()}
            self._lock.notify_all()

    def heal(self) -> None:
        """Pass everything on again; connections that are gone stay gone."""
        self.set()

    def open(self) -> None:
        """Listen (again, on the same port)."""
        listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        listener.settimeout(_LOOK_S)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._start(self._accept, listener)

    def refuse(self) -> None:
        """Refuse new connections and reset the present ones, until `open()`."""
        listener, self._listener = self._listener, None
        if listener is not None:
            # A close alone would leave it open for as long as the acceptor sits in it.
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.reset_connections()

    def reset_connections(self) -> None:
        """Reset every present connection."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.end(reset=True)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self.refuse()
        for thread in self._threads:
            thread.join(10)

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, name="fault-proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                client, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                client.close()
                continue
            for side in (client, server):
                side.settimeout(_LOOK_S)
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = _Link(client, server)
            with self._lock:
                self.connections += 1
                self._links.append(link)
            self._start(self._pump, link, client, server, "up")
            self._start(self._pump, link, server, client, "down")

    def _pump(self, link: _Link, source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            while not self._closed and not link.ended:
                try:
                    chunk = bytearray(source.recv(_CHUNK_BYTES))
                except TimeoutError:
                    continue
                if not chunk or not self._pass(link, sink, chunk, way):
                    break
        except OSError:
            link.end(reset=True)
        link.end(reset=False)
        with self._lock:
            link.pumps -= 1
            last = link.pumps == 0
            if link in self._links:
                self._links.remove(link)
        if last:
            link.close()

    def _pass(self, link: _Link, sink: socket.socket, chunk: bytearray, way: str) -> bool:
        """Pass a chunk on as the fault of this direction has it. False: the connection is over."""
        with self._lock:
            fault = self._faults[way]
            start = fault.seen_bytes
            fault.seen_bytes += len(chunk)
            if isinstance(fault, Corrupt):
                self._corrupt(fault, chunk, start)
        if isinstance(fault, Truncate | Cut | BlackHole):
            room = max(0, fault.after_bytes - start)
            if len(chunk) > room:
                self._send(sink, chunk[:room], way)
                self._note(fault)
                if isinstance(fault, BlackHole):
                    return self._healed(link, fault, way) and self._send(sink, chunk[room:], way)
                link.end(reset=isinstance(fault, Cut))
                return False
        elif isinstance(fault, Delay):
            self._note(fault)
            time.sleep(fault.delay_s)
        elif isinstance(fault, Throttle):
            self._note(fault)
            time.sleep(len(chunk) / fault.bytes_per_s)
        return self._send(sink, chunk, way)

    def _corrupt(self, fault: Corrupt, chunk: bytearray, start: int) -> None:
        at = fault.at_byte - start
        if fault.every and fault.at_byte > 0:
            at = -start % fault.at_byte
        if 0 <= at < len(chunk):
            chunk[at] ^= 1
            fault.fired += 1

    def _healed(self, link: _Link, fault: Fault, way: str) -> bool:
        with self._lock:
            while self._faults[way] is fault and not self._closed and not link.ended:
                self._lock.wait(_LOOK_S)
        return not self._closed and not link.ended

    def _note(self, fault: Fault) -> None:
        with self._lock:
            fault.fired += 1

    def _send(self, sink: socket.socket, chunk: bytes | bytearray, way: str) -> bool:
        view = memoryview(chunk)
        with self._lock:
            self.passed_bytes[way] += len(view)
        while view:
            try:
                count = sink.send(view)
            except TimeoutError:
                if self._closed:
                    return False
                continue
            view = view[count:]
        return True


@contextmanager
def swallowing_port() -> Iterator[int]:
    """A port whose connection attempts get no answer at all: its queue is full and nobody accepts."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(address)
        yield address[1]
