"""Spans of requests at a real OTLP receiver: parents, durations, what is told, what a dead one costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient
from tests.servers.collector import Collector, HangingCollector, Seen, closed_url

from tiercel.errors import ConfigError
from tiercel.web.api import tracing
from tiercel.web.api.app import make_app
from tiercel.web.api.tracing import Tracing, check_endpoint

from .conftest import Stub
from .test_bodies import CHAT, HELLO, PLAIN
from .tiny import BLOCK, PROMPT, tiny_server

IDS = "x-request-id"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NESTED = {
    "first token": f"POST {PLAIN}", "decode": f"POST {PLAIN}", "wait": "first token", "lookup": "first token",
    "load": "first token", "prefill": "first token",
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _soon() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20of-the-collector")
        yield


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    one = Collector()
    yield one
    one.close()


def client_of(stub: Stub, traces: Tracing) -> TestClient:
    return TestClient(make_app(stub.service, tracing=traces), raise_server_exceptions=False)


@pytest.fixture(scope="module")
def traced(make_stub: Callable[..., Stub], collector: Collector) -> Iterator[tuple[Stub, TestClient]]:
    stub, traces = make_stub(), Tracing(collector.url, "stub")
    with client_of(stub, traces) as client:
        yield stub, client
    traces.close()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[TestClient]:
    """A small model and a store, traced."""
    traces = Tracing(collector.url, "tiny")
    with tiny_server(tmp_path_factory.mktemp("tiny"), tracing=traces) as (client, _):
        yield client
    traces.close()


def ask(client: TestClient, request: str, **headers: str) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "tiercel": {"explain": True}}
    response = client.post(PLAIN, json=body, headers={IDS: request, **headers})
    assert response.status_code == 200
    return dict(response.json())


def about(seconds: float) -> Any:
    """Spans carry microseconds, and floats of Unix time carry quarters of one."""
    return pytest.approx(seconds, abs=5e-6)


def test_the_spans_of_an_answer_are_the_answers_own_figures(real: TestClient, collector: Collector) -> None:
    before_s = time.time()
    cold = ask(real, "cold")
    warm = ask(real, "warm", traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="vendor=1")
    after_s = time.time()
    # Nothing was found for the first: it has no load.
    assert "load" not in collector.of("cold", 6)
    spans = collector.of("warm", 7)
    root = spans[f"POST {PLAIN}"]
    assert (root.trace, root.parent) == (TRACE, PARENT)
    assert {name: spans[parent].span for name, parent in NESTED.items()} == {
        name: spans[name].parent for name in NESTED
    }
    took = warm["tiercel"]["took"]
    for name in ("lookup", "load", "prefill"):
        assert spans[name].seconds == about(took[f"{name}_s"]), name
        assert took[f"{name}_s"] > 0
    first = spans["first token"]
    order = [spans[name] for name in ("wait", "lookup", "load", "prefill")]
    for early, late in zip(order, [*order[1:], None], strict=True):
        assert first.start_s - 5e-6 <= early.start_s <= early.end_s <= first.end_s + 5e-6
        assert late is None or early.end_s <= late.start_s + 5e-6
    assert root.start_s == about(first.start_s)
    assert first.end_s == about(spans["decode"].start_s)
    assert before_s <= root.start_s <= spans["decode"].end_s <= root.end_s + 5e-6 <= after_s + 1e-3
    told = root.attributes
    assert told["gen_ai.usage.input_tokens"] == warm["usage"]["prompt_tokens"] == len(PROMPT)
    assert told["gen_ai.usage.output_tokens"] == warm["usage"]["completion_tokens"] == 4
    cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert told["tiercel.reused_tokens"] == cached == 5 * BLOCK
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert spans["lookup"].attributes == {"tiercel.found_blocks.ram": 5}
    assert spans["load"].attributes == {"tiercel.loaded_blocks.ram": 5}
    assert spans["prefill"].attributes["tiercel.computed_tokens"] == 3
    assert (told["http.route"], told["http.response.status_code"]) == (PLAIN, 200)
    assert (told["gen_ai.operation.name"], told["gen_ai.request.model"]) == ("text_completion", "tiny")
    assert root.resource["service.name"] == "tiercel"
    assert collector.headers[-1]["authorization"] == "Bearer of-the-collector"


def test_a_client_that_does_not_sample_is_not_traced(
    traced: tuple[Stub, TestClient], collector: Collector
) -> None:
    _, client = traced
    for flag, name in (("00", "unsampled"), ("01", "sampled")):
        trace = ("1" if flag == "00" else "2") * 32
        headers = {IDS: name, "traceparent": f"00-{trace}-{PARENT}-{flag}"}
        assert client.post(CHAT, json=HELLO, headers=headers).status_code == 200
    assert collector.of("sampled", 6)[f"POST {CHAT}"].trace == "2" * 32
    assert not [one for one in collector.spans if one.trace == "1" * 32]


# The server's threads draw ids of spans meanwhile, which Hypothesis takes for a strategy's doing.
@pytest.mark.filterwarnings(
    "ignore:Do not use the .random. module:hypothesis.errors.HypothesisDeprecationWarning"
)
@settings(max_examples=50)
@given(
    st.sampled_from(["traceparent", "tracestate"]),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=200)
    | st.from_regex(r"\A[0-9a-f]{2}-[0-9a-f]{30,34}-[0-9a-f]{14,18}-[0-9a-f]{2}\Z"),
)
def test_no_header_breaks_a_request_or_its_trace(
    traced: tuple[Stub, TestClient], collector: Collector, name: str, value: str
) -> None:
    _, client = traced
    seen = len(collector.spans)
    headers = {IDS: "odd", "traceparent": f"00-{TRACE}-{PARENT}-01"} | {name: value}
    assert client.post(CHAT, json=HELLO, headers=headers).status_code == 200
    assert len(collector.spans) >= seen


def test_faults_and_refusals_are_traced_as_far_as_they_came(
    make_stub: Callable[..., Stub], traced: tuple[Stub, TestClient], collector: Collector
) -> None:
    stub, client = traced
    stub.engine.fault = RuntimeError("the words of a prompt")
    assert client.post(CHAT, json=HELLO | {"max_tokens": 1}, headers={IDS: "failed"}).status_code == 500
    stub.engine.fault = None
    assert client.post(CHAT, json={"messages": []}, headers={IDS: "refused"}).status_code == 400
    failed = collector.of("failed", 2)
    assert failed[f"POST {CHAT}"].failed
    assert failed["wait"].parent == failed[f"POST {CHAT}"].span
    assert failed[f"POST {CHAT}"].attributes["tiercel.outcome"] == "internal_error"
    refused = collector.of("refused", 1)[f"POST {CHAT}"]
    assert not refused.failed
    assert refused.attributes["tiercel.outcome"] == "invalid_value"
    client.get("/health", headers={IDS: "looked"})
    client.post(CHAT, json=HELLO, headers={IDS: "after"})
    collector.of("after", 6)
    assert not [one for one in collector.spans if one.attributes.get("tiercel.request_id") == "looked"]


MARK = "kumquat"


def test_nothing_of_a_prompt_is_in_a_span(traced: tuple[Stub, TestClient], collector: Collector) -> None:
    _, client = traced
    body = {"messages": [{"role": "user", "content": MARK}], "cache_salt": MARK, "stop": [MARK], "user": MARK}
    body |= {"max_tokens": 2, "tiercel": {"session": MARK, "explain": True}}
    headers = {IDS: "private", "authorization": f"Bearer {MARK}", MARK: MARK}
    assert client.post(f"{CHAT}?{MARK}=1", json=body, headers=headers).status_code == 200
    assert client.post(f"/{MARK}", json=body, headers={IDS: "nowhere"}).status_code == 404
    seen: list[Seen] = [*collector.of("private", 6).values(), *collector.of("nowhere", 1).values()]
    assert MARK not in repr(seen)
    assert "word " not in repr(seen)


@pytest.mark.parametrize("fault", ["dead", "hanging"])
def test_a_collector_that_is_gone_costs_no_request(
    make_stub: Callable[..., Stub], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """D40: what only watches is never in the way."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    hanging = HangingCollector() if fault == "hanging" else None
    stub, traces = make_stub(), Tracing(hanging.url if hanging else closed_url(), "stub")
    try:
        with client_of(stub, traces) as client:
            began = time.monotonic()
            for _ in range(30):  # 180 spans, into a queue of 16
                assert client.post(CHAT, json=HELLO).status_code == 200
            assert time.monotonic() - began < 20
        if hanging is not None:
            give_up = time.monotonic() + 10
            while not hanging.taken:
                assert time.monotonic() < give_up, "the fault fired: it was called"
                time.sleep(0.02)
        began = time.monotonic()
        traces.close()
        assert time.monotonic() - began < 10 * tracing._CLOSE_S
    finally:
        if hanging is not None:
            hanging.close()


def test_a_fault_of_tracing_itself_stays_there(
    make_stub: Callable[..., Stub], collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    fired = []

    def broken(*_: object) -> None:
        fired.append(1)
        raise RuntimeError("tracing is broken")

    stub, traces = make_stub(), Tracing(collector.url, "stub")
    monkeypatch.setattr(traces, "record", broken)
    with client_of(stub, traces) as client:
        assert [client.post(CHAT, json=HELLO).status_code for _ in range(3)] == [200, 200, 200]
    assert fired
    traces.close()


@pytest.mark.parametrize(
    ("given_url", "used"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("http://127.0.0.1:4318/", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector.example/otlp/v1/traces", "https://collector.example/otlp/v1/traces"),
    ],
)
def test_an_address_without_a_path_gets_the_usual_one(given_url: str, used: str) -> None:
    assert check_endpoint(given_url) == used


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "localhost:4318",
        "grpc://a:4317",
        "http://",
        "http://a:99999",
        "http://u:secret@a/",
        "http://[",
        "http://a:4318/v1/traces?key=secret",
        "http://a/#secret",
        "http://a/?",
    ],
)
def test_what_is_no_address_is_one_line(wrong: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^--otlp-traces-endpoint: is no .*; accepted: such as http://"
    ) as told:
        check_endpoint(wrong)
    assert "\n" not in str(told.value)
    assert "secret" not in str(told.value)


def test_without_opentelemetry_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"accepted: pip install 'tiercel\[otel\]'"):
        check_endpoint("http://127.0.0.1:4318")
