"""Documents marked in a prompt, over HTTP: reused anywhere where the server was told to, text elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tiercel.config import Config
from tiercel.web.api.app import make_app
from tiercel.web.api.completions import Service
from tiercel.web.api.engine import load

pytestmark = pytest.mark.model
SEPARATOR = "\n###\n"
APPLES = "Apples grow on trees. They are picked in autumn and kept in cool cellars until spring. " * 3
BOATS = "Boats are built of wood, of steel, or of plastics with fibres. A keel keeps them upright. " * 3


@contextmanager
def server(model_dir: Path, chunks: str) -> Iterator[TestClient]:
    settings = {
        "ram.size": "256MiB", "model.block_tokens": "32", "model.device": "cpu", "store.load": "always",
        "store.accept_lossy": "yes", "attention.chunks": chunks,
    }  # fmt: skip
    config = Config.load(None, {}, settings)
    loaded = load(model_dir, config, "smol")
    with closing(loaded.store), TestClient(make_app(Service(loaded, config.serve))) as client:
        yield client


@pytest.fixture(scope="module")
def client(model_dir: Path) -> Iterator[TestClient]:
    with server(model_dir, "8") as one:
        yield one


def text(*pieces: str) -> str:
    return SEPARATOR.join(pieces)


def ask(client: TestClient, prompt: str, chat: bool = False) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "max_tokens": 3, "temperature": 0, "tiercel": {"chunks": SEPARATOR, "explain": True},
    }  # fmt: skip
    asked |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    answer = client.post("/v1/chat/completions" if chat else "/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_documents_are_found_in_other_prompts_at_other_places(client: TestClient) -> None:
    first = ask(client, text("Read this.", APPLES, BOATS, "What are boats built of?"))
    assert "chunks: 0 loaded, 2 computed alone" in first["tiercel"]["reason"]
    again = ask(client, text("Now read the following.", BOATS, APPLES, "When are apples picked?"))
    assert "chunks: 2 loaded, 0 computed alone" in again["tiercel"]["reason"]
    reused = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert reused > 0.6 * again["usage"]["prompt_tokens"]
    talk = ask(client, text("Read this.", BOATS, "And?"), chat=True)
    assert "chunks: 1 loaded, 0 computed alone" in talk["tiercel"]["reason"]


def test_one_who_looks_sees_that_it_is_on(client: TestClient) -> None:
    assert client.get("/v1/models").json()["data"][0]["tiercel"] == {"exact": False, "lossy": ["chunks-8"]}
    assert 'tiercel_http_lossy{by="chunks-8"} 1.0' in client.get("/metrics").text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "tiercel": {"chunks": ""}}, "tiercel.chunks"),
        ({"prompt": "a", "tiercel": {"chunks": 3}}, "tiercel.chunks"),
        ({"prompt": [3, 4], "tiercel": {"chunks": "#"}}, "prompt"),
        ({"prompt": "#" * 5000, "tiercel": {"chunks": "#"}}, "prompt"),
    ],
)
def test_what_is_no_chunk_is_refused_by_name(client: TestClient, body: dict[str, Any], param: str) -> None:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_server_that_was_not_told_to_takes_them_as_text(model_dir: Path) -> None:
    with server(model_dir, "no") as plain:
        for _ in range(2):
            told = ask(plain, text("Read this.", BOATS, APPLES, "When are apples picked?"))
            assert "chunks:" not in told["tiercel"]["reason"]
        assert told["usage"]["prompt_tokens_details"]["cached_tokens"], "the same prompt is found, exactly"
        assert plain.get("/v1/models").json()["data"][0]["tiercel"] == {"exact": True, "lossy": []}
