"""Whatever is in a body, a client gets an answer or OpenAI's error object that names what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .conftest import CONTEXT, NAME, VOCAB, Stub

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def stub(make_stub: Callable[..., Stub]) -> Stub:
    return make_stub()


def error_of(response: Any) -> dict[str, Any]:
    body = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert "\n" not in error["message"]
    assert "Traceback" not in error["message"]
    assert isinstance(error["type"], str)
    assert isinstance(error["code"], str)
    return dict(error)


# Each row: what is changed in a good body, the field the error names, and a part of its text.
CHAT_ROWS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "messages is empty"),
    ({"messages": None}, "messages", "messages is missing"),
    ({"messages": "hello"}, "messages", "expected `array`, got `str`"),
    ({"messages": ["hello"]}, "messages[0]", "expected `object`, got `str`"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "is missing"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", '"robot"; accepted are system'),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", '"tool"; accepted are system'),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "got `int`"),
    ({"messages": [{"role": "user", "content": "x", "name": "eve"}]}, "messages[0].name", "accepted is null"),
    ({"messages": [{"role": "user", "content": "x", "contnet": 1}]}, "messages[0].contnet", "mean content?"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
     "messages[0].content[0].type", '"image_url"; accepted is "text"'),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
     "messages[0].content[0].text", "missing"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
     "messages[0].tool_calls", "no tools"),
    ({"messages": [{"role": "user", "content": "refuse this"}]}, "messages", "chat template refuses"),
    ({"messages": [{"role": "user", "content": "x" * CONTEXT}]}, "messages", f"context is {CONTEXT}"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; accepted here is 1 to 4096"),
    ({"max_tokens": 10**30}, "max_tokens", "accepted here is 1 to 4096"),
    ({"max_tokens": "5"}, "max_tokens", "expected `int | null`, got `str`"),
    ({"max_tokens": 1.5}, "max_tokens", "got `float`"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "accepted is one of them"),
    ({"max_tokens": None, "max_completion_tokens": -1}, "max_completion_tokens", "is -1"),
    ({"temperature": -0.1}, "temperature", "temperature is -0.1; accepted is 0 to 2"),
    ({"temperature": 2.1}, "temperature", "2.1"),
    ({"temperature": True}, "temperature", "got `bool`"),
    ({"top_p": 0}, "top_p", "accepted is above 0 and up to 1"),
    ({"seed": -1}, "seed", "seed is -1"),
    ({"seed": 2**63}, "seed", "accepted is 0 to"),
    ({"stop": ""}, "stop", "a string of 0 characters"),
    ({"stop": ["x"] * 17}, "stop", "stop has 17 strings"),
    ({"stop": [1]}, "stop[0]", "expected `str`, got `int`"),
    ({"stream": "yes"}, "stream", "expected `bool`"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "without stream"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "unknown field `usage`"),
    ({"cache_salt": ""}, "cache_salt", "cache_salt has 0 characters"),
    ({"cache_salt": 7}, "cache_salt", "got `int`"),
    ({"n": 2}, "n", "n is 2; accepted is 1"),
    ({"n": True}, "n", "n is true"),
    ({"tools": [{"type": "function"}]}, "tools", "no tools"),
    ({"tool_choice": "required"}, "tool_choice", "'none' or 'auto'"),
    ({"functions": [{}]}, "functions", "no functions"),
    ({"logprobs": True}, "logprobs", "logprobs is true; accepted is false"),
    ({"top_logprobs": 3}, "top_logprobs", "no log probabilities"),
    ({"response_format": {"type": "json_object"}}, "response_format", "plain text"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "no penalties"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "no biases"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "no reasoning levels"),
    ({"temprature": 1}, "temprature", "did you mean temperature?"),
    ({"zzz": 1}, "zzz", "zzz is not a known field; accepted are"),
    ({"model": 5}, "model", "got `int`"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param", "said"), CHAT_ROWS)
def test_a_wrong_field_of_a_chat_is_named(stub: Stub, change: dict[str, Any], param: str, said: str) -> None:
    response = stub.post(HELLO | change)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"
    assert stub.post(HELLO).status_code == 200


PLAIN_ROWS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "prompt is missing"),
    ({"prompt": ""}, "prompt", "prompt is empty"),
    ({"prompt": []}, "prompt", "prompt is empty"),
    ({"prompt": [[]]}, "prompt", "prompt is empty"),
    ({"prompt": ["a", "b"]}, "prompt", "a list of 2 prompts; accepted is one"),
    ({"prompt": [[1], [2]]}, "prompt", "a list of 2 prompts"),
    ({"prompt": [1, "a"]}, "prompt", "a list of 2 prompts"),
    ({"prompt": [1.5]}, "prompt[0]", "got `float`"),
    ({"prompt": {"a": 1}}, "prompt", "got `object`"),
    ({"prompt": [VOCAB]}, "prompt", f"token id {VOCAB}; accepted are 0 to {VOCAB - 1}"),
    ({"prompt": [-1]}, "prompt", "token id -1"),
    ({"prompt": [1] * CONTEXT}, "prompt", f"{CONTEXT} tokens"),
    ({"prompt": "a", "echo": True}, "echo", "not sent back"),
    ({"prompt": "a", "best_of": 3}, "best_of", "one answer"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "no suffix"),
    ({"prompt": "a", "logprobs": 2}, "logprobs", "no log probabilities"),
    ({"prompt": "a", "messages": []}, "messages", "not a known field"),
]


@pytest.mark.parametrize(("body", "param", "said"), PLAIN_ROWS)
def test_a_wrong_field_of_a_completion_is_named(
    stub: Stub, body: dict[str, Any], param: str, said: str
) -> None:
    response = stub.post(body, PLAIN)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert said in error["message"]


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, HELLO["messages"]), (PLAIN, [1] * CONTEXT)], ids=["chat", "completion"]
)
def test_a_prompt_longer_than_the_context_has_its_own_code(stub: Stub, path: str, body: Any) -> None:
    fits: dict[str, Any]
    if path == CHAT:
        fits = {"messages": [{"role": "user", "content": "x" * (CONTEXT - 5)}]}
        longer: dict[str, Any] = {"messages": [{"role": "user", "content": "x" * (CONTEXT - 4)}]}
    else:
        fits, longer = {"prompt": body[1:]}, {"prompt": body}
    assert stub.post(fits, path).status_code == 200
    response = stub.post(longer, path)
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"nonsense", b"\xff\xfe", b'"\xff"', b"[]", b"null", b"5", b'{"messages": NaN}',
     b"[" * 100_000, b'{"messages":' * 5000, b'{"max_tokens": 1e999}', b'{"a": "\\ud800"}', b"{} trailing"],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(stub: Stub, raw: bytes) -> None:
    for path in (CHAT, PLAIN):
        response = stub.client.post(path, content=raw, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert error_of(response)["code"] == "invalid_json"


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "me"},
        {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k"},
        {
            "n": 1,
            "tools": [],
            "logprobs": False,
            "frequency_penalty": 0.0,
            "response_format": {"type": "text"},
        },
        {"stop": None, "seed": None, "temperature": None, "stream_options": None, "tools": None},
        {"max_completion_tokens": 2},
        {"model": NAME},
        {"stream": False, "logit_bias": {}},
    ],
)
def test_what_does_not_change_the_answer_is_accepted(stub: Stub, harmless: dict[str, Any]) -> None:
    assert stub.post(HELLO | harmless).json()["choices"][0]["message"]["content"] == "word word "


def test_what_was_asked_for_reaches_the_engine(stub: Stub) -> None:
    asked = {
        "temperature": 0.5,
        "top_p": 0.25,
        "seed": 3,
        "stop": ["a", "b"],
        "cache_salt": "s",
        "max_tokens": 2,
    }
    assert stub.post(HELLO | asked).status_code == 200
    got = stub.engine.requests[-1]
    assert (got.temperature, got.top_p, got.seed, got.stop, got.salt, got.max_new_tokens) == (
        0.5, 0.25, 3, ("a", "b"), "s", 2,
    )  # fmt: skip
    assert stub.post({"messages": HELLO["messages"]}).status_code == 200
    got = stub.engine.requests[-1]
    assert (got.temperature, got.top_p, got.seed, got.stop, got.salt, got.max_new_tokens) == (
        1.0, 1.0, None, (), None, 4096,
    )  # fmt: skip
    assert stub.post({"prompt": [5, 6], "stop": "x"}, PLAIN).status_code == 200
    got = stub.engine.requests[-1]
    assert (list(got.tokens), got.stop, got.max_new_tokens) == ([5, 6], ("x",), 16)


def test_content_parts_and_developer_messages_become_plain_ones(stub: Stub) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert stub.post({"messages": [{"role": "developer", "content": parts}]}).status_code == 200
    expected = stub.engine.chat_prompt([{"role": "system", "content": "a\nb"}])
    assert list(stub.engine.requests[-1].tokens) == expected


FIELDS = sorted(
    "model messages prompt max_tokens max_completion_tokens temperature top_p seed stop stream "
    "stream_options cache_salt n best_of echo suffix logprobs tools tool_choice response_format logit_bias "
    "user metadata".split()
)
NUMBERS = st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | NUMBERS | st.text(max_size=20)
NAMES = st.sampled_from(["role", "content", "type", "text", "name", "include_usage"]) | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
ROLES = st.sampled_from(["system", "user", "assistant", "developer", "tool", ""])
TEXTS = st.text(max_size=30)
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXTS | VALUES}), max_size=3)
CHANGES = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=12), VALUES, max_size=3)
CHATS = st.builds(lambda messages, more: {"messages": messages} | more, MESSAGES, CHANGES)
PLAINS = st.builds(
    lambda prompt, more: {"prompt": prompt} | more,
    TEXTS | st.lists(st.integers(-1, VOCAB), max_size=6) | VALUES,
    CHANGES,
)


@settings(max_examples=300)
@given(asked=st.tuples(st.just(CHAT), CHATS) | st.tuples(st.just(PLAIN), PLAINS))
def test_any_json_body_gets_an_answer_or_an_error_object(stub: Stub, asked: tuple[str, Any]) -> None:
    path, body = asked
    check(stub.client.post(path, content=json.dumps(body), headers={"content-type": "application/json"}))


@settings(max_examples=100)
@given(raw=st.binary(max_size=60) | CHATS.map(lambda body: json.dumps(body).encode()[:-1]))
def test_any_bytes_get_an_error_object(stub: Stub, raw: bytes) -> None:
    response = stub.client.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
    check(response)


def check(response: Any) -> None:
    if response.status_code != 200:
        assert 400 <= response.status_code < 500
        error_of(response)
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.json()["choices"][0]["finish_reason"] == "length"
