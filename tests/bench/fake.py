"""A server that speaks as much of OpenAI's API as a test wants, and misbehaves on demand, over real HTTP."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "fake-model"
Act = Callable[["Handler", dict[str, Any]], None]


class FakeServer(ThreadingHTTPServer):
    """Answers every chat request by `act(handler, body)`; keeps the bodies it was sent."""

    daemon_threads = True

    def __init__(self, act: Act) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.act = act
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.metrics: str | None = None
        self.context_tokens: int | None = None
        self.cache = False
        self.lock = threading.Lock()
        self.let_go = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that left is nothing to print."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.whole(
                200, json.dumps({"data": [{"id": MODEL, "max_model_len": self.server.context_tokens}]})
            )
        elif self.path == "/metrics" and self.server.metrics is not None:
            self.whole(200, self.server.metrics, "text/plain")
        elif self.path.startswith("/v1/cache/decisions") and self.server.cache:
            self.whole(200, "{}")
        else:
            self.whole(404, "{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.keys.add(self.headers.get("Authorization"))
        self.server.act(self, body)

    def whole(self, status: int, text: str, kind: str = "application/json") -> None:
        raw = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def stream(self) -> None:
        """Begin a stream; `chunk` and `end` are next."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def raw(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def event(self, body: object) -> None:
        self.raw(b"data: " + json.dumps(body).encode() + b"\n\n")

    def text(self, text: str, finish: str | None = None) -> None:
        self.event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})

    def usage(self, prompt: int, cached: int | None, tokens: int) -> None:
        details = None if cached is None else {"cached_tokens": cached}
        self.event(
            {
                "choices": [],
                "usage": {
                    "prompt_tokens": prompt,
                    "completion_tokens": tokens,
                    "prompt_tokens_details": details,
                },
            }
        )

    def end(self) -> None:
        self.raw(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")


def prompt_tokens(body: dict[str, Any]) -> int:
    """As if a token had four characters."""
    return sum(len(one["content"]) for one in body["messages"]) // 4


def good(handler: Handler, body: dict[str, Any], *, cached: int | None = 0, wait_s: float = 0.0) -> None:
    """A whole answer of three tokens, the same for the same prompt."""
    time.sleep(wait_s)
    handler.stream()
    handler.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    said = f"answer {len(body['messages'])}"
    for word in (said, " of", " three"):
        handler.text(word)
    handler.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    handler.usage(prompt_tokens(body), cached, 3)
    handler.end()


@contextmanager
def serving(act: Act) -> Iterator[FakeServer]:
    """A server for the length of a block."""
    with FakeServer(act) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.let_go.set()
            server.shutdown()
            thread.join(5)
