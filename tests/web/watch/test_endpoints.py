"""What the site tells: the store's own figures, in one piece, as a stream, over an hour, for Prometheus."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.store.support import RECORD, chain, eventually

from tiercel.store import overview_json
from tiercel.web import connections, listening
from tiercel.web.watch import watch as watch_module
from tiercel.web.watch.sources import StoreSource
from tiercel.web.watch.watch import LISTENERS_MAX, TICK_S

from .running import Site, events, request, served, site_over_a_store, some_requests


def test_the_overview_is_what_the_store_tells_and_what_was_done(site: Site) -> None:
    some_requests(site.store)
    assert site.store.flush(10)
    told = site.overview()
    own = json.loads(json.dumps(overview_json(site.store.overview(64))))
    for name in ("stats", "scopes", "more_scopes", "prefixes", "faults", "decisions"):
        assert told[name] == own[name], name
    requests = told["stats"]["requests"]
    assert requests["requests"] == 5
    assert requests["actions"] == {"load": 2, "recompute": 0, "split": 0, "miss": 3}
    assert requests["prompt_tokens"] == (8 + 5 + 6 + 8 + 6) * 4
    assert requests["reused_tokens"] == {"ram": (8 + 6) * 4}
    assert requests["saved_s"] == pytest.approx(1.1)
    assert told["stats"]["ram_blocks"] == 19
    assert told["stats"]["tiers"][0]["used_bytes"] == 19 * RECORD
    assert told["source"]["up"] is True


def test_no_prompt_salt_or_token_id_is_told(site: Site) -> None:
    tokens_of = [str(1000 * 3 + at) for at in range(24)]
    some_requests(site.store)
    for path in ("/v1/overview", "/v1/history", "/metrics"):
        text = site.ask(path).text
        assert "a secret salt" not in text
        assert not any(f",{token}," in text for token in tokens_of)


def test_where_no_engine_has_opened_the_store_it_is_up_and_empty() -> None:
    with served(StoreSource(lambda: None, "daemon", "nowhere")) as (url, _):
        answer = httpx.get(f"{url}/v1/overview")
        assert answer.status_code == 200
        assert answer.json()["source"]["up"] is True
        assert "stats" not in answer.json()
        assert httpx.get(f"{url}/metrics").text == ""
        refused = httpx.post(
            f"{url}/v1/cache/pin", json={"prefix": "0" * 12},
            headers={"Authorization": "Bearer the-right-token-of-this-test"},
        )  # fmt: skip
        assert refused.status_code == 503


def test_the_stream_tells_the_same_again_and_again(site: Site) -> None:
    with httpx.stream("GET", f"{site.url}/v1/overview/stream", timeout=20) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        told = events(answer)
        first = next(told)
        request(site.store, chain(4), ttft_s=0.1, saved_s=0.0)
        second = next(told)
        if not second["stats"]["requests"]["requests"]:  # it was under way already
            second = next(told)
        assert first["stats"]["requests"]["requests"] == 0
        assert second["stats"]["requests"]["requests"] == 1
        assert second["at_s"] > first["at_s"]
        assert second["sample"]["totals"]["requests"] == 1
    assert eventually(lambda: site.watch._listeners == 0)


def test_streams_are_bounded_and_end_with_the_server(tmp_path: Path) -> None:
    ended: list[float] = []

    def listen(url: str) -> None:
        with httpx.stream("GET", f"{url}/v1/overview/stream", timeout=20) as answer:
            for line in answer.iter_lines():
                if line == "event: end":
                    ended.append(time.monotonic())

    with site_over_a_store(tmp_path) as site:
        listeners = [threading.Thread(target=listen, args=(site.url,)) for _ in range(LISTENERS_MAX)]
        for one in listeners:
            one.start()
        assert eventually(lambda: site.watch._listeners == LISTENERS_MAX)
        refused = site.ask("/v1/overview/stream")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "too_many_streams"
        assert site.ask("/v1/overview").status_code == 200
    for one in listeners:
        one.join(20)
    assert len(ended) == LISTENERS_MAX


def test_streams_that_nobody_reads_make_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SILENT_S", 0.3)
    monkeypatch.setattr(listening, "_UNREAD_BYTES", 4096)
    with site_over_a_store(tmp_path) as site, ExitStack() as stack:
        read = stack.enter_context(httpx.stream("GET", f"{site.url}/v1/overview/stream", timeout=20))
        told = events(read)
        parts = urlsplit(site.url)
        for _ in range(LISTENERS_MAX - 1):
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            one.connect((parts.hostname or "", parts.port or 0))
            one.sendall(b"GET /v1/overview/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert eventually(lambda: site.watch._listeners == LISTENERS_MAX)
        assert site.ask("/v1/overview/stream").status_code == 429
        assert eventually(lambda: bool(next(told)) and site.watch._listeners == 1), "they keep their places"
        assert next(told)["source"]["up"], "the one that reads has kept its own"
        with httpx.stream("GET", f"{site.url}/v1/overview/stream", timeout=20) as another:
            assert another.status_code == 200


def test_the_history_grows_by_itself_and_holds_totals(site: Site) -> None:
    some_requests(site.store)
    assert site.store.flush(10)
    assert eventually(lambda: len(site.ask("/v1/history").json()["at_s"]) >= 2)
    told = site.ask("/v1/history").json()
    assert told["totals"]["requests"][-1] == 5
    assert told["totals"]["reused_tokens"][-1] == 56
    assert told["places"]["disk"]["written_bytes"][-1] == 19 * RECORD
    assert told["places"]["ram"]["blocks"][-1] == 19
    assert all(len(column) == len(told["at_s"]) for column in told["totals"].values())
    for bad in ("0", "-1", "x", "1801", "9" * 40, "²"):
        answer = site.ask("/v1/history", params={"points": bad})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "points"


def test_a_fault_in_reading_ends_nothing(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    def failing(*, full: bool) -> dict[str, object]:
        raise RuntimeError("a secret of a prompt")

    site.watch.source.read, read = failing, site.watch.source.read  # type: ignore[method-assign]
    assert eventually(lambda: "could not read its figures" in caplog.text)
    assert site.ask("/v1/overview").status_code == 500
    assert "a secret" not in site.ask("/v1/overview").text
    site.watch.source.read = read  # type: ignore[method-assign]
    before = len(site.watch.history.as_json()["at_s"])
    assert eventually(lambda: len(site.watch.history.as_json()["at_s"]) > before)
    assert site.ask("/v1/overview").status_code == 200
    assert request(site.store, chain(3), ttft_s=0.1, saved_s=0.0).number == 1


def test_a_source_that_hangs_holds_up_nobody_else(site: Site) -> None:
    go, hung = threading.Event(), threading.Event()
    read = site.watch.source.read

    def hanging(*, full: bool) -> dict[str, object]:
        hung.set()
        go.wait(20)
        return read(full=full)

    site.watch.source.read = hanging  # type: ignore[method-assign]
    assert hung.wait(10)
    assert site.ask("/v1/history").status_code == 200
    assert site.ask("/openapi.json").status_code == 200
    assert request(site.store, chain(3), ttft_s=0.1, saved_s=0.0).number == 1
    go.set()
    assert site.ask("/v1/overview").json()["stats"]["requests"]["requests"] == 1


def test_metrics_are_the_stores(site: Site) -> None:
    some_requests(site.store)
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(site.ask("/metrics").text)
        for sample in family.samples
    }
    assert found["tiercel_requests_total", "answered"] == 5
    assert found["tiercel_tier_blocks", "disk"] == site.store.stats().tiers[0].blocks


def test_without_listeners_no_tree_is_made(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    read = site.watch.source.read

    def noting(*, full: bool) -> dict[str, object]:
        asked.append(full)
        return read(full=full)

    site.watch.source.read = noting  # type: ignore[method-assign]
    assert eventually(lambda: len(asked) >= 2)
    assert asked == [False] * len(asked)
    with httpx.stream("GET", f"{site.url}/v1/overview/stream", timeout=20) as answer:
        next(events(answer))
    assert True in asked
    assert TICK_S == 1.0


def test_many_who_look_at_once_are_answered_from_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "TICK_S", 600.0)  # only those who ask make it read
    monkeypatch.setattr(watch_module, "FRESH_S", 600.0)
    with site_over_a_store(tmp_path / "disk") as site:
        full: list[bool] = []
        real = site.watch.source.read

        def counted(*, full: bool, reads: list[bool] = full) -> dict[str, object]:
            reads.append(full)
            time.sleep(0.05)
            return real(full=full)

        monkeypatch.setattr(site.watch.source, "read", counted)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: site.ask("/v1/overview"), range(40)))
        assert {one.status_code for one in answers} == {200}
        assert len({one.content for one in answers}) == 1
        assert full == [True]
        # What a button did is seen at once.
        assert site.act("clear", {"all": True}).status_code == 200
        site.overview()
        assert full == [True, True]
        monkeypatch.setattr(watch_module, "FRESH_S", 0.0)
        site.overview()
        assert full == [True, True, True]
