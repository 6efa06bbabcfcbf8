"""The dashboard in front of `tiercel serve`: its pages, figures and buttons beside the API's own calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient
from tests.store.support import make_store
from tests.web.watch.running import some_requests

from tiercel.config import ServeConfig
from tiercel.store import TieredStore
from tiercel.web.api.app import LIVE, PAGES, make_app
from tiercel.web.api.completions import Service
from tiercel.web.api.engine import Loaded, ModelFacts
from tiercel.web.watch.endpoints import STREAM, Endpoints
from tiercel.web.watch.guard import Guard
from tiercel.web.watch.sources import StoreSource
from tiercel.web.watch.watch import Watch

from .conftest import StubEngine

KEY, TOKEN = "the-api-key", "the-token-of-buttons"
FACTS = ModelFacts("stub", "fp_0", 64, 100, True, True, "nothing")


def client_of(store: TieredStore, api_key: str | None) -> TestClient:
    service = Service(Loaded(StubEngine(), store, FACTS), ServeConfig())
    watch = Watch(StoreSource(lambda: store, "server", "stub"))
    guard = Guard(api_key or TOKEN, any_host=api_key is not None)
    app = make_app(service, api_key, live=Endpoints(watch, guard))
    return TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False)


@pytest.fixture
def store() -> Iterator[TieredStore]:
    with make_store(slots=40) as one:
        some_requests(one)
        yield one


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_without_a_key_all_may_look_and_holders_of_the_token_may_act(store: TieredStore) -> None:
    with client_of(store, None) as client:
        told = client.get("/v1/overview").json()
        assert told["stats"]["requests"]["requests"] == 5
        assert told["source"]["kind"] == "server"
        prefix = told["prefixes"][0]["prefix"]
        for headers in ({}, bearer("wrong")):
            assert client.post("/v1/cache/pin", json={"prefix": prefix}, headers=headers).status_code == 401
            assert client.post("/v1/cache/clear", json={"all": True}, headers=headers).status_code == 401
        assert store.stats().pins == 0
        told = client.post("/v1/cache/pin", json={"prefix": prefix}, headers=bearer(TOKEN)).json()
        assert told["done"] == store.stats().pins > 0
        assert client.post("/v1/cache/clear", json={"all": True}, headers=bearer(TOKEN)).json()["done"] == 19
        # A prompt or a session is known to who asks, as before.
        assert client.post("/v1/cache/pin", json={"prompt": [1, 2, 3, 4]}).status_code == 200


def test_with_a_key_it_is_the_token_and_only_pages_are_for_all(store: TieredStore) -> None:
    with client_of(store, KEY) as client:
        for path in LIVE:
            assert client.get(path).status_code == 401, path
        for path in (*PAGES, "/assets/site.css", "/assets/live/main.js", "/assets/data.js"):
            assert client.get(path).status_code == 200, path
        assert client.get("/assets/../v1/models").status_code == 401
        # Behind a proxy it may have any name: nothing is told without the key.
        there = bearer(KEY) | {"Host": "kv.example.com"}
        prefix = client.get("/v1/overview", headers=there).json()["prefixes"][0]["prefix"]
        assert client.post("/v1/cache/pin", json={"prefix": prefix}, headers=there).json()["done"] > 0
        assert client.post("/v1/cache/pin", json={"prefix": prefix}, headers=bearer(TOKEN)).status_code == 401


def test_a_strangers_page_may_not_look(store: TieredStore) -> None:
    with client_of(store, None) as client:
        for path in LIVE[:3]:
            assert client.get(path, headers={"Host": "evil.example"}).status_code == 421
        assert client.get("/v1/overview", headers={"Host": "localhost:8000"}).status_code == 200


def test_refusals_are_the_apis_own(store: TieredStore) -> None:
    with client_of(store, None) as client:
        answer = client.post("/v1/cache/demote", json={"prefix": "f" * 12}, headers=bearer(TOKEN))
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "prefix_not_found"
        answer = client.post("/v1/cache/warm", json={"prefix": "f" * 12}, headers=bearer(TOKEN))
        assert answer.json()["error"]["code"] == "unknown_parameter"
        both = {"prefix": "f" * 12, "prompt": "a"}
        assert client.post("/v1/cache/pin", json=both, headers=bearer(TOKEN)).status_code == 400
        assert client.get("/nothing").json()["error"]["code"] == "unknown_url"
        assert STREAM in LIVE
