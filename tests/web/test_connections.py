"""Clients that ask or read nothing are let go; those that are asking or reading, however slowly, are not."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx
from starlette.types import Receive, Scope, Send

from tiercel.web import connections, listening, serving
from tiercel.web.listening import bind

SILENT_S = 0.3
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n\r\n"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body, or with a stream that goes on for five times as long as silence may."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
    if scope["path"] == "/stream":
        for _ in range(10):
            await asyncio.sleep(SILENT_S / 2)
            await send({"type": "http.response.body", "body": b"one ", "more_body": True})
        await send({"type": "http.response.body", "body": b"end"})
        return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await send({"type": "http.response.body", "body": body or b"nothing"})


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(connections, "SILENT_S", SILENT_S)
    with serving.served(bind("127.0.0.1", 0), app) as address:
        yield address


def connect(url: str, takes_bytes: int | None = None) -> socket.socket:
    """`takes_bytes`: how much the system may take for a client before it is read."""
    parts = urlsplit(url)
    one = socket.socket()
    if takes_bytes is not None:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, takes_bytes)
    one.settimeout(10)
    one.connect((parts.hostname or "", parts.port or 0))
    return one


def is_closed(one: socket.socket, within_s: float = 10.0) -> bool:
    one.settimeout(within_s)
    try:
        return one.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def test_silent_clients_are_let_go_and_the_next_is_answered(url: str) -> None:
    most = connections.Connection.connections_max
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(url)) for _ in range(most - 1)]
        halfway = stack.enter_context(connect(url))
        halfway.sendall(HEAD[:20])
        assert is_closed(stack.enter_context(connect(url))), "no more than so many, whoever they are"
        with pytest.raises(httpx.HTTPError):
            httpx.get(url)
        assert all(is_closed(one) for one in [*silent, halfway])
        assert httpx.get(url).text == "nothing"


def test_who_begins_a_second_request_and_stops_is_let_go_too(url: str) -> None:
    with connect(url) as one:
        one.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while b"nothing\r\n0\r\n\r\n" not in answer:
            answer += one.recv(4096)
        one.sendall(b"G")
        assert is_closed(one)


def test_who_asks_slowly_and_who_is_answered_slowly_are_not_cut(url: str) -> None:
    with connect(url) as slow:
        slow.sendall(HEAD)
        for _ in range(8):
            time.sleep(SILENT_S / 2)
            slow.sendall(b"x")
        answer = b""
        while b"xxxxxxxx" not in answer:
            part = slow.recv(4096)
            assert part, "cut before its end"
            answer += part
        # It is kept for the next one, for longer than silence may last.
        time.sleep(SILENT_S * 3)
        slow.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert slow.recv(4096).startswith(b"HTTP/1.1 200")
    assert httpx.get(f"{url}/stream", timeout=20).text == "one " * 10 + "end"


def test_who_never_reads_a_stream_is_let_go_and_who_reads_slowly_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "SILENT_S", SILENT_S)
    monkeypatch.setattr(listening, "_UNREAD_BYTES", 4096)
    there: set[str] = set()
    sent = dict.fromkeys(("/never", "/slowly"), 0)

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path"]
        there.add(name)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.create_task(disconnected(receive))
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 8192, "more_body": True})
            sent[name] += 1
            await asyncio.sleep(0.005)
        there.discard(name)

    with serving.served(bind("127.0.0.1", 0), endless) as url, connect(url, 2048) as never:
        never.sendall(b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n")
        with connect(url, 2048) as slow:
            slow.sendall(b"GET /slowly HTTP/1.1\r\nHost: x\r\n\r\n")
            until_s = time.monotonic() + 10
            while "/never" in there or not sent["/never"]:
                assert time.monotonic() < until_s, "its place is never free again"
                assert slow.recv(1024)
                time.sleep(SILENT_S / 10)
            for _ in range(30):
                assert slow.recv(1024), "cut, though it reads"
                time.sleep(SILENT_S / 10)
            assert there == {"/slowly"}
    assert sent["/never"] > 0


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
