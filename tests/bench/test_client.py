"""One request against servers that lie, stall, break off or refuse: each ends as a value, in time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from tests.bench.fake import MODEL, Act, FakeServer, Handler, good, serving

pytest.importorskip("httpx")

from tiercel.bench.client import Client, Reply, checked_url
from tiercel.bench.stream import Heard, StreamFault
from tiercel.errors import ConfigError

PROMPT = [{"role": "user", "content": "word " * 40}]


def asked(server: FakeServer, *, deadline_s: float = 10.0, key: str | None = None) -> Reply:
    async def run() -> Reply:
        async with Client(server.url, MODEL, key, {"tiercel": {"no_load": True}}) as client:
            return await client.ask(PROMPT, 16, deadline_s)

    return asyncio.run(run())


def test_a_whole_answer_is_measured() -> None:
    def act(handler: Handler, body: dict[str, Any]) -> None:
        time.sleep(0.1)
        handler.stream()
        handler.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        time.sleep(0.1)
        for word in ("one ", "two ", "three"):
            handler.text(word)
            time.sleep(0.05)
        handler.text("", "stop")
        handler.usage(50, 16, 3)
        handler.end()

    with serving(act) as server:
        reply = asked(server, key="secret")
    heard = reply.heard
    assert reply.fault == ""
    assert heard.text == "one two three"
    assert (heard.prompt_tokens, heard.cached_tokens, heard.tokens) == (50, 16, 3)
    # The empty first piece is no token.
    assert heard.first_s is not None
    assert 0.2 <= heard.first_s - reply.sent_s < 5
    assert heard.tpot_s is not None
    assert 0.05 <= heard.tpot_s < 2
    assert server.keys == {"Bearer secret"}
    sent = server.bodies[0]
    assert (sent["temperature"], sent["stream"], sent["max_tokens"]) == (0, True, 16)
    assert sent["tiercel"] == {"no_load": True}


def refuses(handler: Handler, body: dict[str, Any]) -> None:
    handler.whole(500, '{"error": {"message": "out of\\n memory"}}')


def breaks_off(handler: Handler, body: dict[str, Any]) -> None:
    handler.stream()
    handler.text("half an ans")
    handler.close_connection = True
    handler.connection.close()


def ends_early(handler: Handler, body: dict[str, Any]) -> None:
    handler.stream()
    handler.text("half an ans")
    handler.wfile.write(b"0\r\n\r\n")


def stalls(handler: Handler, body: dict[str, Any]) -> None:
    handler.stream()
    handler.text("a")
    handler.server.let_go.wait(30)


def says_nothing(handler: Handler, body: dict[str, Any]) -> None:
    handler.server.let_go.wait(30)


def drips(handler: Handler, body: dict[str, Any]) -> None:
    """A byte now and then, never a whole line: no single read ever times out."""
    handler.stream()
    while not handler.server.let_go.wait(0.05):
        handler.raw(b":")


def whole_object(handler: Handler, body: dict[str, Any]) -> None:
    handler.whole(200, '{"choices": [{"message": {"content": "no stream"}}]}')


def garbage(handler: Handler, body: dict[str, Any]) -> None:
    handler.stream()
    handler.raw(b"data: {not json}\n\n")
    handler.end()


def odd_types(handler: Handler, body: dict[str, Any]) -> None:
    handler.stream()
    handler.event({"choices": [{"delta": {"content": 5}}]})
    handler.end()


def error_event(handler: Handler, body: dict[str, Any]) -> None:
    handler.stream()
    handler.text("a")
    handler.event({"error": {"message": "gone wrong", "code": "deadline_exceeded"}})
    handler.wfile.write(b"0\r\n\r\n")


def empty(handler: Handler, body: dict[str, Any]) -> None:
    handler.stream()
    handler.end()


@pytest.mark.parametrize(
    ("act", "fault"),
    [
        (refuses, "HTTP 500"),
        (breaks_off, "broken off"),
        (ends_early, "broken off"),
        (stalls, "deadline"),
        (says_nothing, "deadline"),
        (drips, "deadline"),
        (whole_object, "no stream"),
        (garbage, "not OpenAI's chunks"),
        (odd_types, "not OpenAI's chunks"),
        (error_event, "error in the stream"),
        (empty, "empty answer"),
    ],
)
def test_a_bad_server_is_a_fault_in_time(act: Act, fault: str) -> None:
    started = time.monotonic()
    with serving(act) as server:
        reply = asked(server, deadline_s=0.5)
        assert len(server.bodies) == 1
    assert reply.fault == fault
    assert time.monotonic() - started < 20
    if fault == "HTTP 500":
        assert reply.said == "out of memory"


def test_nobody_there_is_told_from_a_bad_answer() -> None:
    with serving(good) as server:
        assert asked(server).fault == ""
    reply = asked(server)
    assert (reply.fault, reply.gone) == ("no connection", True)


def test_counts_that_cannot_be_are_not_believed() -> None:
    def lies(handler: Handler, body: dict[str, Any]) -> None:
        handler.stream()
        handler.text("a")
        handler.text("b", "stop")
        handler.usage(100, 400, 10**9)
        handler.end()

    with serving(lies) as server:
        heard = asked(server).heard
    assert (heard.prompt_tokens, heard.cached_tokens, heard.counted_tokens) == (100, None, None)
    assert heard.tokens == 2


def test_without_usage_pieces_are_counted_and_a_missing_end_mark_is_forgiven_after_a_finish() -> None:
    def terse(handler: Handler, body: dict[str, Any]) -> None:
        handler.stream()
        handler.text("a")
        handler.text("b", "length")
        handler.wfile.write(b"0\r\n\r\n")

    with serving(terse) as server:
        reply = asked(server)
    assert reply.fault == ""
    assert (reply.heard.tokens, reply.heard.prompt_tokens) == (2, None)


def test_a_server_that_stays_on_the_line_after_its_last_word_is_not_waited_for() -> None:
    def clings(handler: Handler, body: dict[str, Any]) -> None:
        handler.stream()
        handler.text("a", "stop")
        handler.raw(b"data: [DONE]\n\n")
        handler.server.let_go.wait(30)

    with serving(clings) as server:
        reply = asked(server, deadline_s=60.0)
    assert reply.fault == ""
    assert reply.heard.end_s is not None
    assert reply.heard.end_s - reply.sent_s < 5


def test_a_stream_cut_anywhere_is_the_same_stream() -> None:
    text = 'data: {"choices":[{"delta":{"content":"é"}}]}\r\n\r\ndata: {"choices":[{"text":"b"}]}'
    raw = text.encode() + b"\n\ndata: [DONE]\n\n"
    for cut in range(len(raw)):
        heard = Heard(9)
        heard.feed(raw[:cut], 1.0)
        heard.feed(raw[cut:], 2.0)
        heard.end()
        assert (heard.text, heard.pieces, heard.done) == ("éb", 2, True)


def test_a_line_without_end_is_bounded() -> None:
    heard = Heard(9)
    for _ in range(16):
        heard.feed(b"x" * 65536, 1.0)
    with pytest.raises(StreamFault, match="line too long"):
        heard.feed(b"x" * 65536, 1.0)


@pytest.mark.parametrize("url", ["", "nowhere", "ftp://host", "http://", "http://[::1", "http://u:p@host"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        checked_url("--url", url)


@pytest.mark.parametrize(
    "url", ["http://host:8000", "http://host:8000/", "http://host:8000/v1", "https://host/a/v1/"]
)
def test_urls_are_taken_with_and_without_v1(url: str) -> None:
    assert checked_url("--url", url) == url.rstrip("/").removesuffix("/v1")
