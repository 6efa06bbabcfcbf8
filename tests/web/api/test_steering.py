"""The endpoints under /v1/cache, hints in a body, sessions, and what is said of decisions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.store.support import drop_ram, eventually

from tiercel.blocks import Chain
from tiercel.store import LaneOptions, TieredStore
from tiercel.store.policy import Hints
from tiercel.tiers import FilesTier
from tiercel.web.api.app import ACTIONS

from .conftest import Stub, StubStore
from .test_bodies import CHAT, HELLO, PLAIN, error_of
from .tiny import BLOCK, PROMPT, tiny_server


@pytest.fixture(scope="module")
def stub(make_stub: Callable[..., Stub]) -> Stub:
    return make_stub()


# Hints in a body.


def test_hints_reach_the_engine(stub: Stub) -> None:
    told = {"no_store": True, "pin": "10m", "session": "s1"}
    assert stub.post(HELLO | {"tiercel": told}).status_code == 200
    assert stub.engine.requests[-1].hints == Hints(store=False, pin_s=600.0, session="s1")
    assert stub.post({"prompt": [1, 2], "tiercel": {"no_load": True}}, PLAIN).status_code == 200
    assert stub.engine.requests[-1].hints == Hints(load=False)
    assert stub.post(HELLO).status_code == 200
    assert stub.engine.requests[-1].hints == Hints()


def test_a_request_may_have_its_blocks_brought_up_while_it_waits(make_stub: Callable[..., Stub]) -> None:
    stub = make_stub()
    body = {"prompt": list(range(1, 11)), "max_tokens": 1}
    assert stub.post(body, PLAIN).status_code == 200
    assert not any(what == "prefetch" for what, _ in stub.store.calls)
    assert stub.post(body | {"tiercel": {"prefetch": True}}, PLAIN).status_code == 200
    assert eventually(lambda: ("prefetch", 2) in stub.store.calls)


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({"no_sotre": True}, "tiercel.'no_sotre'", "did you mean no_store?"),
        ({"pin": "soon"}, "tiercel.pin", "accepted is a time with a unit"),
        ("no_store", "tiercel", "accepted is an object"),
        ({"sure": True}, "tiercel.'sure'", "is not a known hint"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_wrong_hints_are_refused_by_name(stub: Stub, path: str, given: Any, param: str, words: str) -> None:
    body = HELLO if path == CHAT else {"prompt": [1]}
    response = stub.post(body | {"tiercel": given}, path)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_a_decision_is_told_when_asked_for_and_only_then(stub: Stub, path: str) -> None:
    body: dict[str, Any] = HELLO if path == CHAT else {"prompt": [1, 2]}
    assert "tiercel" not in stub.post(body, path).json()
    told = stub.post(body | {"tiercel": {"explain": True}}, path).json()
    assert told["tiercel"]["reason"] == "a stub knows none"
    stream = stub.post(body | {"tiercel": {"explain": True}, "stream": True}, path)
    chunks = [json.loads(one[6:]) for one in stream.text.split("\n\n") if one.startswith("data: {")]
    with_it = [one for one in chunks if "tiercel" in one]
    assert [one["choices"][0]["finish_reason"] for one in with_it] == ["length"]


# Calls.


@pytest.mark.parametrize(
    ("action", "more", "call"),
    [
        ("prefetch", {}, ("prefetch", 2)),
        ("pin", {}, ("pin 600", 2)),
        ("pin", {"ttl": "90s"}, ("pin 90", 2)),
        ("unpin", {}, ("unpin", 2)),
        ("demote", {}, ("demote", 2)),
        ("drop", {}, ("drop", 2)),
    ],
)
def test_every_call_acts_on_the_prompts_blocks(
    stub: Stub, action: str, more: dict[str, Any], call: tuple[str, int]
) -> None:
    for named in ({"prompt": list(range(9))}, {"prompt": "ninechars"}):
        response = stub.post(named | more, f"/v1/cache/{action}")
        assert response.json() == {"object": "cache", "action": action, "blocks": 2, "done": 2}
        assert stub.store.calls[-1] == call
    response = stub.post({"messages": [{"role": "user", "content": "hello"}]}, f"/v1/cache/{action}")
    assert response.json()["blocks"] == len("userhello") // stub.engine.block_tokens


ROWS: list[tuple[str, dict[str, Any], str, str]] = [
    ("pin", {}, "prompt", "nothing is given; accepted is one of prompt, messages or session"),
    ("warm", {}, "prompt", "accepted is one of prompt or messages"),
    ("pin", {"prompt": "a", "session": "b"}, "session", "prompt and session is given"),
    ("pin", {"prompt": "a", "ttl": 5}, "ttl", "ttl is 5; accepted is a time with a unit"),
    ("demote", {"prompt": "a", "ttl": "5s"}, "ttl", "ttl is not a known field"),
    ("warm", {"session": "a"}, "session", "session is not a known field"),
    ("drop", {"session": 7}, "session", "accepted are 1 to 256 printable characters"),
    ("drop", {"messages": []}, "messages", "messages is empty"),
    ("drop", {"prompt": []}, "prompt", "prompt is empty"),
    ("drop", {"prompt": [10**6]}, "prompt", "has the token id 1000000"),
    ("drop", {"prompt": "a", "cache_salt": ""}, "cache_salt", "accepted are 1 to 4096"),
    ("drop", {"prompt": "a", "salt": "x"}, "salt", "accepted are cache_salt, messages"),
    ("explain", {"prompt": "x" * 200}, "prompt", "context is 64"),
]


@pytest.mark.parametrize(("action", "body", "param", "words"), ROWS)
def test_wrong_bodies_are_refused_by_name(
    stub: Stub, action: str, body: dict[str, Any], param: str, words: str
) -> None:
    before = list(stub.store.calls)
    response = stub.post(body, f"/v1/cache/{action}")
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["param"] == param
    assert words in error["message"]
    assert stub.store.calls == before


def test_another_model_an_unknown_action_and_another_method(stub: Stub) -> None:
    assert stub.post({"prompt": "a", "model": "gpt-9"}, "/v1/cache/drop").status_code == 404
    assert stub.post({"prompt": "a"}, "/v1/cache/burn").status_code == 404
    assert stub.client.get("/v1/cache/drop").status_code == 405


def test_with_a_key_only_its_holder_may_call(make_stub: Callable[..., Stub]) -> None:
    stub = make_stub(api_key="right")
    for path in (*ACTIONS, "/v1/cache/decisions"):
        method = "GET" if path.endswith("decisions") else "POST"
        for headers in ({}, {"authorization": "Bearer wrong"}):
            body = {"prompt": "abcdefgh"}
            refused = stub.client.request(method, path, json=body, headers=headers)
            assert (refused.status_code, error_of(refused)["code"]) == (401, "invalid_api_key")
    assert stub.store.calls == []
    assert stub.engine.requests == []
    served = stub.post({"prompt": "abcdefgh"}, "/v1/cache/drop", headers={"authorization": "Bearer right"})
    assert served.status_code == 200


def test_warm_computes_a_prompt_in_the_queue(stub: Stub) -> None:
    response = stub.post({"prompt": list(range(9))}, "/v1/cache/warm")
    assert response.json() == {"object": "cache", "action": "warm", "blocks": 2, "done": 2}
    asked = stub.engine.requests[-1]
    assert (asked.max_new_tokens, asked.hints.sure) == (1, True)


def test_a_store_that_takes_no_more_prefetches_says_so(
    make_stub: Callable[..., Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = make_stub()

    def cancelled(self: StubStore, chain: Chain, deadline_s: float = 10.0) -> Future[int]:
        one: Future[int] = Future()
        one.cancel()
        one.set_running_or_notify_cancel()
        return one

    monkeypatch.setattr(StubStore, "prefetch", cancelled)
    refused = stub.post({"prompt": "abcdefgh"}, "/v1/cache/prefetch")
    assert (refused.status_code, error_of(refused)["code"]) == (429, "queue_full")
    assert refused.headers["retry-after"] == "1"


# Sessions.


def test_a_session_names_what_its_last_request_left(make_stub: Callable[..., Stub]) -> None:
    stub = make_stub()
    unknown = stub.post({"session": "agent"}, "/v1/cache/demote")
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "session_not_found")
    body = {"prompt": list(range(10)), "max_tokens": 3, "tiercel": {"session": "agent"}, "cache_salt": "t1"}
    assert stub.post(body, PLAIN).status_code == 200
    # 10 tokens of the prompt and 3 of the answer: 3 blocks of 4.
    done = stub.post({"session": "agent", "cache_salt": "t1"}, "/v1/cache/demote")
    assert done.json()["blocks"] == 3
    for other in ({}, {"cache_salt": "t2"}):
        assert stub.post({"session": "agent"} | other, "/v1/cache/demote").status_code == 404
    assert stub.post({"session": "agent", "cache_salt": "t1"}, "/v1/cache/drop").status_code == 200
    assert stub.post({"session": "agent", "cache_salt": "t1"}, "/v1/cache/drop").status_code == 404


# With a real engine.


@pytest.fixture(scope="module", params=[1, 4], ids=["alone", "batch"])
def real(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[TestClient, TieredStore]]:
    folder = tmp_path_factory.mktemp("tiny")
    tiers = [(FilesTier(folder / "disk"), LaneOptions())]
    with tiny_server(folder / "model", tiers, batch=request.param) as (client, store):
        yield client, store


def post(client: TestClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_an_agents_pause_and_return_over_http(real: tuple[TestClient, TieredStore]) -> None:
    client, store = real
    hints = {"session": "a", "explain": True}
    body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "tiercel": hints}
    cold = post(client, PLAIN, body)
    assert cold["tiercel"]["reason"] == "all is computed: nothing of it is stored"
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    # 83 tokens and 16 of the answer: 6 blocks of 16.
    assert post(client, "/v1/cache/demote", {"session": "a"}) == {
        "object": "cache", "action": "demote", "blocks": 6, "done": 6,
    }  # fmt: skip
    assert store.stats().ram_blocks == 0
    seen = post(client, "/v1/cache/explain", {"prompt": PROMPT})
    assert seen["found"] == {"disk": 5}
    assert "took" not in seen
    assert post(client, "/v1/cache/prefetch", {"session": "a"})["done"] == 6
    warm = post(client, PLAIN, body)
    told = warm["tiercel"]
    assert (told["found"], told["loaded"], told["computed_tokens"]) == ({"ram": 5}, {"ram": 5}, 3)
    assert told["took"]["prefill_s"] > 0
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    assert post(client, "/v1/cache/pin", {"prompt": PROMPT, "ttl": "5m"})["done"] == 5
    assert store.stats().pins == 5
    post(client, "/v1/cache/unpin", {"prompt": PROMPT})
    assert store.stats().pins == 0
    assert post(client, "/v1/cache/drop", {"prompt": PROMPT})["done"] == 6
    assert post(client, "/v1/cache/explain", {"prompt": PROMPT})["found"] == {}


def test_warm_leaves_a_prompt_ready(real: tuple[TestClient, TieredStore]) -> None:
    client, store = real
    prompt = PROMPT[::-1]
    assert post(client, "/v1/cache/warm", {"prompt": prompt})["done"] == 5
    assert store.flush(10)
    drop_ram(store)
    assert post(client, "/v1/cache/prefetch", {"prompt": prompt})["done"] == 5
    answered = post(client, PLAIN, {"prompt": prompt, "max_tokens": 1})
    assert answered["usage"]["prompt_tokens_details"]["cached_tokens"] == 5 * BLOCK


def test_decisions_are_listed_without_anything_of_a_prompt(real: tuple[TestClient, TieredStore]) -> None:
    client, _ = real
    secret = "kumquat"
    body = {
        "prompt": [99, 98, 97] * 30,
        "max_tokens": 1,
        "cache_salt": secret,
        "tiercel": {"session": secret},
    }
    post(client, PLAIN, body)
    response = client.get("/v1/cache/decisions")
    latest = response.json()["data"][0]
    assert latest["prompt_tokens"] == 90
    assert latest["found"] == {}
    assert secret not in response.text
    assert "99, 98" not in response.text.replace(",", ", ")
    assert "prompt" not in {name for name in latest if name != "prompt_tokens"}
    assert len(client.get("/v1/cache/decisions?limit=1").json()["data"]) == 1
    numbers = [one["number"] for one in response.json()["data"]]
    assert numbers == sorted(numbers, reverse=True)
    for wrong in ("0", "257", "x", "-1", "", "9" * 50, "²"):
        assert client.get("/v1/cache/decisions", params={"limit": wrong}).status_code == 400
