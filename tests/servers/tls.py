"""TLS in front of a server that speaks none: certificates made by openssl, ended by Python's ssl module."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

_CHUNK_BYTES = 256 << 10
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Certificate:
    """A self-signed certificate for localhost and 127.0.0.1, and its key, as PEM files."""

    cert: Path
    key: Path


def make_certificate(folder: Path, name: str = "server") -> Certificate:
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    request = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    subject = "-subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    files = ["-keyout", str(made.key), "-out", str(made.cert)]
    subprocess.run([*request.split(), *subject.split(), *files], check=True, capture_output=True)
    return made


class TlsFront:
    """Forwards TLS connections on `port` to a plain port of 127.0.0.1; a context manager.

    With `client_ca` a client must show a certificate signed by it.
    """

    def __init__(self, target_port: int, certificate: Certificate, client_ca: Path | None = None) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate.cert, certificate.key)
        if client_ca is not None:
            self._context.verify_mode = ssl.CERT_REQUIRED
            self._context.load_verify_locations(client_ca)
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_LOOK_S)
        self.port = self._listener.getsockname()[1]
        self.versions: list[str | None] = []
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def __enter__(self) -> TlsFront:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _start(self, work: object, *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            with contextlib.suppress(TimeoutError):
                connection, _ = self._listener.accept()
                self._start(self._serve, connection)

    def _serve(self, raw: socket.socket) -> None:
        raw.settimeout(10)
        # One thread has both directions: an SSL object is not for two at a time.
        with contextlib.suppress(OSError), raw, self._context.wrap_socket(raw, server_side=True) as client:
            self.versions.append(client.version())
            with socket.create_connection(("127.0.0.1", self._target_port), timeout=10) as server:
                while not self._closed:
                    ready = select.select([client, server], [], [], 0 if client.pending() else _LOOK_S)[0]
                    if (client.pending() or client in ready) and not _forward(client, server):
                        return
                    if server in ready and not _forward(server, client):
                        return


def _forward(source: socket.socket, sink: socket.socket) -> bool:
    chunk = source.recv(_CHUNK_BYTES)
    sink.sendall(chunk)
    return bool(chunk)
