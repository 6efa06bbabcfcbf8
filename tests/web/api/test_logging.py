"""What `tiercel serve` logs: a request's id in each of its lines, its figures, nothing of what it said."""

from __future__ import annotations

import io
import json
import logging
import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.config import ServeConfig
from tiercel.service.logs import JsonLines, Limiter, LineWriter, TextLines

from .conftest import Stub
from .test_app import until
from .test_bodies import CHAT, HELLO, PLAIN
from .tiny import PROMPT, tiny_server

IDS = "x-request-id"


@dataclass
class Tape:
    """What a server writes to stderr, as text and as JSON."""

    text: io.StringIO
    json: io.StringIO
    handlers: tuple[LineWriter, LineWriter]

    def lines(self) -> list[dict[str, Any]]:
        for one in self.handlers:
            one.flush()
        return [json.loads(line) for line in self.json.getvalue().splitlines()]

    def of(self, request: str) -> list[dict[str, Any]]:
        """The lines of one request, its access line among them."""
        until(lambda: any(one.get("request_id") == request and "status" in one for one in self.lines()))
        return [one for one in self.lines() if one.get("request_id") == request]


@pytest.fixture(scope="module")
def tape() -> Iterator[Tape]:
    streams = io.StringIO(), io.StringIO()
    handlers = LineWriter(streams[0]), LineWriter(streams[1])
    logger = logging.getLogger("tiercel.serve")
    before = logger.level
    logger.setLevel(logging.INFO)
    for handler, form in zip(handlers, (TextLines(), JsonLines()), strict=True):
        handler.setFormatter(form)
        handler.addFilter(Limiter(quiet_s=0.0))
        logger.addHandler(handler)
    yield Tape(*streams, handlers)
    logger.setLevel(before)
    for handler in handlers:
        logger.removeHandler(handler)


@pytest.fixture(scope="module")
def stub(make_stub: Callable[..., Stub]) -> Stub:
    return make_stub(ServeConfig(max_body_bytes=2048))


@pytest.mark.parametrize("stream", [False, True])
def test_the_access_line_tells_what_happened(stub: Stub, tape: Tape, stream: bool) -> None:
    response = stub.post(HELLO | {"stream": stream}, headers={"X-Request-Id": f"mine-{stream}"})
    assert response.headers[IDS] == f"mine-{stream}"
    (line,) = tape.of(f"mine-{stream}")
    assert (line["method"], line["endpoint"], line["status"]) == ("POST", CHAT, 200)
    assert line["level"] == "info"
    assert line["outcome"] == "length"
    assert line["answer_tokens"] == 2
    assert line["prompt_tokens"] == len("userhello")
    assert 0 < line["queue_s"] <= line["ttft_s"] <= line["duration_s"]
    text = next(one for one in tape.text.getvalue().splitlines() if f"[request mine-{stream}]" in one)
    assert text.startswith(f"tiercel: POST {CHAT} 200 length after ")
    assert "9 prompt tokens" in text
    assert "2 generated, first token after" in text
    assert f"chatcmpl-mine-{stream}" in response.text, "the answer's id leads to its line"


def test_without_an_id_of_its_own_a_request_gets_one(stub: Stub, tape: Tape) -> None:
    seen = {stub.post(HELLO).headers[IDS] for _ in range(3)}
    assert len(seen) == 3
    for one in seen:
        assert uuid.UUID(one).hex == one
        assert len(tape.of(one)) == 1


@pytest.mark.parametrize("odd", ["a b", "x" * 129, '"', "-", "a\tb", "<script>"])
def test_an_odd_id_is_not_taken_over(stub: Stub, odd: str) -> None:
    assert uuid.UUID(stub.post(HELLO, headers={"X-Request-Id": odd}).headers[IDS])


REFUSED: list[tuple[str, str, Any, int, str]] = [
    ("GET", "/nowhere/secret", None, 404, "unknown_url"),
    ("GET", CHAT, None, 405, "method_not_allowed"),
    ("POST", CHAT, {"messages": []}, 400, "invalid_value"),
    ("POST", CHAT, HELLO | {"user": "x" * 4000}, 413, "body_too_large"),
    ("POST", CHAT, HELLO | {"model": "other"}, 404, "model_not_found"),
    ("FROB", CHAT, None, 405, "method_not_allowed"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "code"), REFUSED)
def test_what_is_refused_has_its_id_and_its_line(
    stub: Stub, tape: Tape, method: str, path: str, body: Any, status: int, code: str
) -> None:
    ours = f"refused-{uuid.uuid4().hex}"
    response = stub.client.request(method, path, json=body, headers={IDS: ours})
    assert (response.status_code, response.headers[IDS]) == (status, ours)
    (line,) = tape.of(ours)
    assert (line["status"], line["outcome"]) == (status, code)
    assert line["endpoint"] in (CHAT, "other")
    assert line["method"] in ("GET", "POST", "other")


def test_a_wrong_key_has_its_line_too(make_stub: Callable[..., Stub], tape: Tape) -> None:
    guarded = make_stub(api_key="the key itself")
    assert guarded.post(HELLO, headers={IDS: "no-key"}).headers[IDS] == "no-key"
    (line,) = tape.of("no-key")
    assert (line["status"], line["outcome"]) == (401, "invalid_api_key")
    assert "the key itself" not in tape.json.getvalue()


@pytest.mark.parametrize("stream", [False, True])
def test_a_faults_line_names_its_request(make_stub: Callable[..., Stub], tape: Tape, stream: bool) -> None:
    stub = make_stub()
    stub.engine.fault = RuntimeError("words of a prompt")
    ours = f"fault-{stream}"
    response = stub.post(HELLO | {"stream": stream}, headers={IDS: ours})
    assert response.headers[IDS] == ours
    fault, access = tape.of(ours)
    assert fault["message"].startswith("internal fault while answering: RuntimeError at ")
    assert fault["level"] == "error"
    assert access["outcome"] == "internal_error"
    assert access["status"] == (200 if stream else 500), "a stream has begun when its second token fails"
    assert access["answer_tokens"] == 1


def test_a_fault_outside_the_engine_names_its_request(make_stub: Callable[..., Stub], tape: Tape) -> None:
    stub = make_stub()
    stub.engine.chat_prompt = None  # type: ignore[method-assign,assignment]
    assert stub.post(HELLO, headers={IDS: "outside"}).headers[IDS] == "outside"
    fault, access = tape.of("outside")
    assert fault["message"].startswith("internal fault: TypeError at ")
    assert access["status"] == 500


def test_what_a_deadline_cut_says_so(make_stub: Callable[..., Stub], tape: Tape) -> None:
    stub = make_stub(ServeConfig(request_deadline_s=0.2))
    stub.engine.go.clear()
    assert stub.post(HELLO, headers={IDS: "late"}).status_code == 504
    stub.engine.go.set()
    (line,) = tape.of("late")
    assert (line["status"], line["outcome"], line["answer_tokens"]) == (504, "deadline_exceeded", 1)


def test_who_only_looks_is_not_worth_a_line(stub: Stub, tape: Tape) -> None:
    for path in ("/health", "/metrics", "/v1/models"):
        assert stub.client.get(path, headers={IDS: "look"}).headers[IDS] == "look"
    assert stub.post(HELLO, headers={IDS: "after-looking"}).status_code == 200
    tape.of("after-looking")
    assert not [one for one in tape.lines() if one.get("request_id") == "look"]


MARK = "kumquat"
marked = st.text(max_size=20).map(lambda around: f"{around}{MARK}")


@settings(max_examples=40)
@given(
    prompt=marked, salt=marked.map(lambda text: text[:4096]), stop=marked, session=st.booleans(),
    tokens=st.lists(st.integers(91, 99), min_size=3, max_size=9), chat=st.booleans(), stream=st.booleans(),
    broken=st.booleans(),
)  # fmt: skip
def test_nothing_of_a_request_is_in_a_log(
    stub: Stub, tape: Tape, prompt: str, salt: str, stop: str, session: bool, tokens: list[int], chat: bool,
    stream: bool, broken: bool,
) -> None:  # fmt: skip
    ours = uuid.uuid4().hex
    body: dict[str, Any] = {"max_tokens": 2, "cache_salt": salt, "stream": stream, "user": MARK}
    body |= {"messages": [{"role": "user", "content": prompt[-40:]}]} if chat else {"prompt": tokens}
    body |= {"tiercel": {"session": f"{MARK}-7", "explain": True}} if session else {}
    body |= {MARK: 1} if broken else {"stop": [stop]}
    path = CHAT if chat else PLAIN
    raw = json.dumps(body).encode()
    headers = {IDS: ours, "content-type": "application/json", "authorization": f"Bearer {MARK}", MARK: MARK}
    status = stub.client.post(f"{path}?{MARK}=1", content=raw, headers=headers).status_code
    (line,) = tape.of(ours)
    assert line["status"] == status, "the control: the request has its line"
    for told in (tape.text.getvalue(), tape.json.getvalue()):
        assert MARK not in told
        assert str(tokens)[1:-1] not in told
        assert "word" not in told.replace("words", ""), "nor of the answer"


def test_two_hundred_requests_are_logged_as_they_are_counted(tape: Tape, tmp_path: Path) -> None:
    """Figures agree: sums over access lines, the metrics, and what clients were told."""
    chance = random.Random(7)
    asked: dict[str, tuple[int, dict[str, Any]]] = {}
    with tiny_server(tmp_path) as (client, _):
        for at in range(200):
            start = chance.randrange(3)
            body: dict[str, Any] = {"prompt": PROMPT[start : start + chance.randint(1, 80)], "temperature": 0}
            body |= {"max_tokens": chance.randint(1, 3)} if chance.random() < 0.9 else {"max_tokens": -1}
            body |= {"tiercel": {"no_load": True}} if chance.random() < 0.2 else {}
            response = client.post(PLAIN, json=body, headers={IDS: f"scripted-{at}"})
            asked[f"scripted-{at}"] = response.status_code, response.json()
        tape.of("scripted-199")
        told = {one["request_id"]: one for one in tape.lines() if one.get("request_id") in asked}
        figures = figures_of(client)
    answers = {one: body["usage"] for one, (status, body) in asked.items() if status == 200}
    assert 150 < len(answers) < 200, "the control: some are refused"
    for one, (status, _) in asked.items():
        assert told[one]["status"] == status
    for one, usage in answers.items():
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert (told[one]["prompt_tokens"], told[one]["reused_tokens"]) == (usage["prompt_tokens"], cached)
        assert told[one]["answer_tokens"] == usage["completion_tokens"]
    lines = [told[one] for one in answers]
    reused = sum(one["reused_tokens"] for one in lines)
    assert reused > 0
    assert sum(one["prompt_tokens"] for one in lines) == figures["tiercel_prompt_tokens_total"]
    assert reused == figures['tiercel_reused_tokens_total{place="ram"}']
    assert len(lines) == figures['tiercel_requests_total{outcome="answered"}']
    for status in ("200", "400"):
        counted = figures[f'tiercel_http_requests_total{{endpoint="{PLAIN}",status="{status}"}}']
        assert counted == sum(str(one["status"]) == status for one in told.values())
    waited = sum(one["ttft_s"] for one in lines)
    ttft = "tiercel_http_time_to_first_token_seconds"
    counted, spent = (
        sum(figures[f'{ttft}_{what}{{place="{place}"}}'] for place in ("none", "ram"))
        for what in ("count", "sum")
    )
    assert counted == len(lines)
    assert spent == pytest.approx(waited, abs=1e-3)


def figures_of(client: Any) -> dict[str, float]:
    lines = [one for one in client.get("/metrics").text.splitlines() if not one.startswith("#")]
    return {name: float(value) for name, value in (one.rsplit(" ", 1) for one in lines)}
