"""The receiving end of OTLP over HTTP: keeps the spans it is sent, or hangs, or is not there."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Seen:
    """One span as it came over the wire. Times are Unix seconds."""

    name: str
    trace: str
    span: str
    parent: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    resource: dict[str, Any]
    failed: bool

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass
class Collector:
    """`http://127.0.0.1:PORT/v1/traces`."""

    port: int = 0
    spans: list[Seen] = field(default_factory=list, repr=False)
    headers: list[dict[str, str]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        keep = self._keep

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                keep(self.path, dict(self.headers), body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def _keep(self, path: str, headers: dict[str, str], body: bytes) -> None:
        assert path == "/v1/traces"
        if headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        self.headers.append(headers)
        for group in request.resource_spans:
            resource = _plain(group.resource.attributes)
            for scope in group.scope_spans:
                for one in scope.spans:
                    self.spans.append(
                        Seen(
                            one.name,
                            one.trace_id.hex(),
                            one.span_id.hex(),
                            one.parent_span_id.hex(),
                            one.start_time_unix_nano / 1e9,
                            one.end_time_unix_nano / 1e9,
                            _plain(one.attributes),
                            resource,
                            one.status.code == 2,
                        )
                    )

    def of(self, request: str, count: int) -> dict[str, Seen]:
        """The `count` spans of one request, by name; waits for them."""
        give_up = time.monotonic() + 20
        while True:
            roots = {one.trace for one in self.spans if one.attributes.get("tiercel.request_id") == request}
            found = [one for one in self.spans if one.trace in roots]
            if len(found) >= count:
                break
            assert time.monotonic() < give_up, f"only {[one.name for one in found]} came"
            time.sleep(0.02)
        named = {one.name: one for one in found}
        assert len(named) == len(found) == count, [one.name for one in found]
        return named

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


class HangingCollector:
    """Takes connections and requests, and never says a word."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1/traces"
        self.taken: list[socket.socket] = []
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def _take(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.taken.append(sock)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)
        for sock in self.taken:
            sock.close()


def closed_url() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return f"http://127.0.0.1:{bound.getsockname()[1]}/v1/traces"


def main() -> None:
    """`python -m tests.servers.collector`: print spans as they come, to see that tracing works."""
    one = Collector(port=4318)
    print(f"receiving at {one.url}  (Ctrl-C ends it)")
    shown = 0
    try:
        while True:
            time.sleep(0.2)
            for span in one.spans[shown:]:
                shown += 1
                print(f"{span.trace[:8]} {span.seconds * 1000:10.3f} ms  {span.name}")
    except KeyboardInterrupt:
        one.close()


if __name__ == "__main__":
    main()
