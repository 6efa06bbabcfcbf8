"""Paths, sizes, keys, deadlines and faults, on a stub engine."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tiercel.config import ServeConfig
from tiercel.errors import ConfigError, RequestError
from tiercel.web.api import server

from .conftest import NAME, Stub
from .test_bodies import CHAT, HELLO, PLAIN, error_of


def figure(stub: Stub, name: str) -> float:
    line = next(one for one in stub.client.get("/metrics").text.splitlines() if one.startswith(f"{name} "))
    return float(line.rsplit(" ", 1)[1])


def until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 20
    while not true():
        assert time.monotonic() < give_up, "waited 20 s for what never came"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_url"),
        ("POST", "/v1/chat", 404, "unknown_url"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/models/gpt-9", 404, "model_not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
def test_wrong_paths_and_methods(
    make_stub: Callable[..., Stub], method: str, path: str, status: int, code: str
) -> None:
    stub = make_stub()
    response = stub.client.request(method, path)
    assert response.status_code == status
    error = error_of(response)
    assert error["code"] == code
    if status == 405:
        assert response.headers["allow"] in error["message"]


def test_another_model_is_not_found(make_stub: Callable[..., Stub]) -> None:
    stub = make_stub()
    response = stub.post(HELLO | {"model": "gpt-9"})
    assert response.status_code == 404
    error = error_of(response)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert f'"{NAME}"' in error["message"]
    assert [one["id"] for one in stub.client.get("/v1/models").json()["data"]] == [NAME]
    assert stub.client.get(f"/v1/models/{NAME}").json()["id"] == NAME


def test_the_model_says_whether_what_is_reused_is_exact(make_stub: Callable[..., Stub]) -> None:
    def told(**facts: object) -> object:
        return make_stub(**facts).client.get(f"/v1/models/{NAME}").json()["tiercel"]

    assert told() == {"exact": True, "lossy": []}
    assert told(lossy=("int8",)) == {"exact": False, "lossy": ["int8"]}


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_refused(make_stub: Callable[..., Stub], chunked: bool) -> None:
    stub = make_stub(ServeConfig(max_body_bytes=1024))
    raw = json.dumps(HELLO | {"user": "x" * 1000}).encode()
    sent: Any = iter([raw[:500], raw[500:]]) if chunked else raw
    response = stub.client.post(CHAT, content=sent, headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert "1KiB" in error_of(response)["message"]
    assert stub.post(HELLO | {"user": "x" * 800}).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_other_content_types_are_refused(make_stub: Callable[..., Stub], kind: str | None) -> None:
    stub = make_stub()
    headers = {"content-type": kind} if kind else {}
    response = stub.client.post(CHAT, content=json.dumps(HELLO), headers=headers)
    assert response.status_code == 415
    assert "accepted is application/json" in error_of(response)["message"]
    with_charset = {"content-type": "application/json; charset=utf-8"}
    assert stub.client.post(CHAT, content=json.dumps(HELLO), headers=with_charset).status_code == 200


def test_with_a_key_only_its_holder_is_served(make_stub: Callable[..., Stub]) -> None:
    stub = make_stub(api_key="right")
    for path in ("/v1/models", "/metrics"):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "right"}):
            response = stub.client.get(path, headers=headers)
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
        assert stub.client.get(path, headers={"authorization": "Bearer right"}).status_code == 200
    assert stub.post(HELLO).status_code == 401
    assert stub.client.get("/health").status_code == 200


def test_models_without_tokenizer_or_template_say_so(make_stub: Callable[..., Stub]) -> None:
    bare = make_stub(has_tokenizer=False, chats=False)
    assert error_of(bare.post(HELLO))["code"] == "no_chat_template"
    assert "accepted are token ids" in error_of(bare.post({"prompt": "a"}, PLAIN))["message"]
    assert bare.post({"prompt": [1]}, PLAIN).status_code == 200


SECRET = "the secret of the prompt"


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_the_engine_is_a_500_and_the_next_request_is_served(
    make_stub: Callable[..., Stub], caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    stub = make_stub()
    stub.engine.fault = RuntimeError(SECRET)
    with caplog.at_level(logging.INFO):
        response = stub.post(HELLO | {"max_tokens": 1, "stream": stream})
    assert response.status_code == 500
    assert error_of(response)["type"] == "server_error"
    assert SECRET not in response.text + caplog.text
    assert "RuntimeError at" in caplog.text, "the log says what happened and where"
    assert figure(stub, "tiercel_http_internal_faults_total") == 1
    stub.engine.fault = None
    assert stub.post(HELLO).status_code == 200
    assert stub.client.get("/health").json() == {"status": "ok", "model": NAME, "waiting": 0, "running": 0}


def test_a_fault_after_the_first_token_ends_the_stream_with_an_error(make_stub: Callable[..., Stub]) -> None:
    stub = make_stub()
    stub.engine.fault = RuntimeError(SECRET)
    response = stub.post(HELLO | {"stream": True})
    assert response.status_code == 200
    *_, last, end = response.text.split("\n\n")
    assert end == ""
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert "[DONE]" not in response.text


def test_a_request_the_engine_refuses_is_a_400(make_stub: Callable[..., Stub]) -> None:
    stub = make_stub()
    stub.engine.fault = RequestError("too odd")
    response = stub.post(HELLO)
    assert response.status_code == 400
    assert error_of(response)["message"] == "too odd"
    assert figure(stub, "tiercel_http_internal_faults_total") == 0


def test_a_fault_outside_the_engine_is_a_500_too(
    make_stub: Callable[..., Stub], caplog: pytest.LogCaptureFixture
) -> None:
    stub = make_stub()
    stub.engine.chat_prompt = None  # type: ignore[method-assign,assignment]
    response = stub.post(HELLO)
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert figure(stub, "tiercel_http_internal_faults_total") == 1
    assert figure(stub, 'tiercel_http_requests_total{endpoint="/v1/chat/completions",status="500"}') == 1
    assert stub.post({"prompt": "a"}, PLAIN).status_code == 200, "the place in the queue was given back"
    until(lambda: stub.service.queue.depth == (0, 0))


def test_the_deadline_ends_running_and_waiting_requests(make_stub: Callable[..., Stub]) -> None:
    stub = make_stub(ServeConfig(request_deadline_s=0.2))
    stub.engine.go.clear()
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(stub.post(HELLO))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [one.status_code for one in answers] == [504, 504]
    assert {error_of(one)["code"] for one in answers} == {"deadline_exceeded"}
    assert figure(stub, 'tiercel_http_cut_requests_total{reason="deadline"}') == 2
    stub.engine.go.set()
    until(lambda: stub.service.queue.depth == (0, 0))
    assert stub.engine.closed == len(stub.engine.requests) == 1, "the waiting one never reached the engine"
    assert stub.post(HELLO).status_code == 200


def test_a_deadline_in_a_stream_ends_it_with_an_error(make_stub: Callable[..., Stub]) -> None:
    stub = make_stub(ServeConfig(request_deadline_s=0.2))
    stub.engine.go.clear()
    response = stub.post(HELLO | {"stream": True})
    stub.engine.go.set()
    assert response.status_code == 200
    assert '"content":"word "' in response.text
    assert (
        json.loads(response.text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"]
        == "deadline_exceeded"
    )


def test_a_full_queue_refuses_at_once_and_takes_more_later(make_stub: Callable[..., Stub]) -> None:
    stub = make_stub(ServeConfig(queue_requests=2))
    stub.engine.go.clear()
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(stub.post(HELLO))) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: stub.service.queue.depth == (2, 1))
    response = stub.post(HELLO)
    assert response.status_code == 429
    assert 1 <= int(response.headers["retry-after"]) <= 60
    error = error_of(response)
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert not answers, "nobody was served meanwhile, so the queue was full by bound and not by chance"
    stub.engine.go.set()
    for thread in threads:
        thread.join(20)
    assert [one.status_code for one in answers] == [200] * 3
    assert stub.post(HELLO).status_code == 200


def test_a_server_told_to_stop_ends_the_waiting_and_lets_the_running_finish(
    make_stub: Callable[..., Stub],
) -> None:
    stub = make_stub()
    stub.engine.go.clear()
    answers: dict[int, Any] = {}

    def ask(number: int) -> None:
        answers[number] = stub.post(HELLO)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    threads[0].start()
    until(lambda: stub.service.queue.depth == (0, 1))
    threads[1].start()
    until(lambda: stub.service.queue.depth == (1, 1))
    stub.service.queue.refuse_more()
    threads[1].join(20)
    assert answers[1].status_code == 503
    assert stub.post(HELLO).status_code == 503
    assert stub.client.get("/health").status_code == 503
    assert not stub.service.queue.join(0.0)
    stub.engine.go.set()
    threads[0].join(20)
    assert answers[0].status_code == 200
    assert stub.service.queue.join(20)


def test_a_stream_has_the_parts_that_clients_expect(make_stub: Callable[..., Stub]) -> None:
    stub = make_stub()
    response = stub.post(HELLO | {"stream": True, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(one.removeprefix("data: ")) for one in events]
    assert len({one["id"] for one in chunks}) == 1
    deltas = [one["choices"][0]["delta"] for one in chunks[:-1]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "word "}, {"content": "word "}, {}]
    assert [one["choices"][0]["finish_reason"] for one in chunks[:-1]] == [None, None, None, "length"]
    assert all(one["usage"] is None for one in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert "usage" not in stub.post(HELLO | {"stream": True}).text


def test_figures_follow_prometheus_conventions(make_stub: Callable[..., Stub]) -> None:
    stub = make_stub()
    assert stub.post(HELLO).status_code == 200
    until(lambda: figure(stub, "tiercel_http_generated_tokens_total") == 2)
    assert figure(stub, 'tiercel_reused_tokens_total{place="ram"}') == 4
    assert figure(stub, 'tiercel_http_time_to_first_token_seconds_count{place="ram"}') == 1
    assert figure(stub, "tiercel_store_slots") == 2
    stub.client.get("/made/up/path")
    text = stub.client.get("/metrics").text
    assert 'endpoint="other"' in text
    assert "/made/up" not in text, "what clients invent makes no series"


def test_addresses_that_cannot_be_had_are_one_line() -> None:
    with server.bind("127.0.0.1", 0) as bound:
        assert not server.is_open_to_others(bound)
        port = bound.getsockname()[1]
        assert server.url_of(bound) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"127.0.0.1 port {port}: Address already in use"):
            server.bind("127.0.0.1", port)
    with server.bind("127.0.0.1", port), pytest.raises(ConfigError, match=r"no\.such\.host\.invalid"):
        server.bind("no.such.host.invalid", 0)
    with server.bind("0.0.0.0", 0) as everywhere:
        assert server.is_open_to_others(everywhere)
    if socket.has_ipv6:
        with server.bind("::1", 0) as six:
            assert server.url_of(six).startswith("http://[::1]:")
