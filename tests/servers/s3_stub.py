"""An S3 server that says what a real one cannot be made to say: bursts of 503, wrong lengths, stalls.

    with StubS3() as stub:
        stub.say(Refuse(503), times=3)            # the next three requests of any kind
        stub.say(Stall(100), methods=("GET",))    # the next GET gives 100 bytes, then nothing
        ... stub.said tells how many such answers were given ...

It keeps objects in a dict and checks no signature. Whatever is said is used up once.
"""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
import time
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit
from xml.sax.saxutils import escape

_RESET = struct.pack("ii", 1, 0)
_STALL_MAX_S = 60.0


@dataclass(frozen=True, slots=True)
class Refuse:
    """A status and the code of the error; the body repeats a secret, as real servers repeat headers."""

    status: int
    code: str = "SlowDown"


@dataclass(frozen=True, slots=True)
class Stall:
    """The headers and so many bytes of the right answer, then silence. -1: not even the headers."""

    after_bytes: int = -1


@dataclass(frozen=True, slots=True)
class Short:
    """Promises `promised` bytes more than it gives, then ends the connection."""

    promised: int


@dataclass(frozen=True, slots=True)
class Instead:
    """Another body than the object's."""

    body: bytes


@dataclass(frozen=True, slots=True)
class Claim:
    """A Content-Length of so many bytes, and a body that never ends until the client hangs up."""

    length: int


@dataclass(frozen=True, slots=True)
class Hangup:
    """The connection is reset without an answer."""


Saying = Refuse | Stall | Short | Instead | Claim | Hangup
SECRET = "secret-that-the-server-repeats"


class StubS3:
    """A context manager; leaves no thread behind."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.said = 0
        self.at_once = 0
        self.most_at_once = 0
        self.sent_bytes = 0
        self.delay_s = 0.0
        self.ranges = True
        self.listed: list[str] | None = None
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self._replace: tuple[int, str, bytes] | None = None
        self._script: list[tuple[Saying, tuple[str, ...]]] = []
        stub = self

        class Handler(_Handler):
            server_stub = stub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    def __enter__(self) -> StubS3:
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def url(self, prefix: str = "", more: str = "") -> str:
        where = f"bucket/{prefix}" if prefix else "bucket"
        return f"s3://{where}?endpoint=http://127.0.0.1:{self._server.server_port}&region=us-east-1{more}"

    def say(self, saying: Saying, times: int = 1, methods: tuple[str, ...] = ()) -> None:
        """Answer so, the next `times` requests (of these methods)."""
        with self.lock:
            self._script += [(saying, methods)] * times

    def hush(self) -> None:
        """Forget what was still to be said."""
        with self.lock:
            self._script.clear()

    def replace_after(self, gets: int, path: str, body: bytes) -> None:
        """Put another object in the place of one once it was asked for so many times more."""
        with self.lock:
            self._replace = (gets, path, body)

    def object(self, path: str) -> tuple[bytes, str] | None:
        """An object and its tag; counts for `replace_after`."""
        with self.lock:
            found = self.objects.get(path)
            if self._replace is not None and self._replace[1] == path:
                left, _, body = self._replace
                self._replace = (left - 1, path, body) if left > 1 else None
                if left <= 1:
                    self.objects[path] = body
            return None if found is None else (found, f'"{hashlib.md5(found).hexdigest()}"')

    def next_saying(self, method: str) -> Saying | None:
        with self.lock:
            for at, (saying, methods) in enumerate(self._script):
                if not methods or method in methods:
                    del self._script[at]
                    self.said += 1
                    return saying
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_stub: StubS3
    tag = '"0"'

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _handle(self) -> None:
        stub = self.server_stub
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urlsplit(self.path)
        path = unquote(url.path).removeprefix("/bucket").lstrip("/")
        with stub.lock:
            stub.requests.append((self.command, path))
            stub.at_once += 1
            stub.most_at_once = max(stub.most_at_once, stub.at_once)
        time.sleep(stub.delay_s)
        with stub.lock:
            # Before the client has its answer, and may ask again.
            stub.at_once -= 1
        try:
            self._answer(stub.next_saying(self.command), path, url.query, body)
        except OSError:
            self.close_connection = True

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _handle

    def _answer(self, saying: Saying | None, path: str, query: str, body: bytes) -> None:
        stub = self.server_stub
        if isinstance(saying, Refuse):
            said = f"<Error><Code>{saying.code}</Code><AWSAccessKeyId>{SECRET}</AWSAccessKeyId></Error>"
            self._send(saying.status, said.encode())
        elif isinstance(saying, Hangup):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif isinstance(saying, Stall) and saying.after_bytes < 0:
            stub.stopping.wait(_STALL_MAX_S)
            self.close_connection = True
        elif self.command == "PUT":
            with stub.lock:
                stub.objects[path] = body
            self._send(200, b"")
        elif self.command == "DELETE":
            with stub.lock:
                stub.objects.pop(path, None)
            self._send(204, b"")
        elif self.command == "GET" and "list-type=2" in query:
            self._send(200, self._listing())
        else:
            self._give(saying, path)

    def _give(self, saying: Saying | None, path: str) -> None:
        stub = self.server_stub
        there = stub.object(path)
        if there is None:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        found, self.tag = there
        if isinstance(saying, Instead):
            found = saying.body
        total = len(found)
        asked = self.headers.get("Range") if stub.ranges else None
        if asked and not isinstance(saying, Claim):
            first, last = (int(part) for part in asked.removeprefix("bytes=").split("-"))
            if first >= total:
                self._send(416, b"<Error><Code>InvalidRange</Code></Error>")
                return
            found = found[first : last + 1]
            self._head(206, len(found), f"bytes {first}-{first + len(found) - 1}/{total}")
        elif isinstance(saying, Claim):
            self._head(200, saying.length)
        else:
            self._head(200, total + (saying.promised if isinstance(saying, Short) else 0))
        if self.command == "HEAD":
            return
        if isinstance(saying, Claim):
            while not stub.stopping.is_set():
                self._write(bytes(1 << 16))
        given = found[: saying.after_bytes] if isinstance(saying, Stall) else found
        self._write(given)
        if isinstance(saying, Stall):
            stub.stopping.wait(_STALL_MAX_S)
        if isinstance(saying, Stall | Short):
            self.close_connection = True

    def _listing(self) -> bytes:
        names = self.server_stub.listed
        if names is None:
            names = sorted(self.server_stub.objects)
        date = "2026-11-01T00:00:00.000Z"
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>{date}</LastModified>"
            f'<ETag>"1"</ETag><Size>{len(self.server_stub.objects.get(name, b""))}</Size></Contents>'
            for name in names
        )
        return (
            f"<ListBucketResult><Name>bucket</Name><KeyCount>{len(names)}</KeyCount>"
            f"<IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        ).encode()

    def _send(self, status: int, body: bytes) -> None:
        self._head(status, len(body))
        if self.command != "HEAD":
            self._write(body)

    def _head(self, status: int, length: int, content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", self.tag)
        self.send_header("Last-Modified", formatdate(usegmt=True))
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        self.wfile.flush()

    def _write(self, body: bytes) -> None:
        self.wfile.write(body)
        self.wfile.flush()
        with self.server_stub.lock:
            self.server_stub.sent_bytes += len(body)
