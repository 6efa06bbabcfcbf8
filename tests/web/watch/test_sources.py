"""Sources that come and go: a daemon that is killed and started again, a server that is not there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tests.service.running import Running
from tests.store.support import chain, eventually, put

from tiercel.errors import ConfigError
from tiercel.web.listening import bind
from tiercel.web.watch.elsewhere import ServerSource
from tiercel.web.watch.guard import Guard
from tiercel.web.watch.sources import DaemonSource

from .running import TOKEN, Site, request, served


def test_a_daemon_is_watched_killed_and_watched_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    source = DaemonSource(path)
    with served(source) as (url, watch):
        site = Site(url, watch, None)  # type: ignore[arg-type]
        early = site.ask("/v1/overview")
        assert early.status_code == 503
        assert "start one there" in early.json()["source"]["why"]
        assert site.act("clear", {"all": True}).status_code == 503
        with Running(path, disk=tmp_path / "disk") as daemon:
            store = daemon.connect()
            request(store, chain(4), ttft_s=0.5, saved_s=0.0)  # type: ignore[arg-type]
            assert eventually(lambda: reported(site) == 1)
            told = site.overview()
            assert told["source"]["pid"] == daemon.process.pid
            assert told["stats"]["ram_blocks"] == 4
            assert site.act("pin", {"prefix": site.prefix_of(chain(4))}).json()["done"] == 4
            assert eventually(lambda: 1 in site.ask("/v1/history").json()["totals"].get("requests", []))
            store.close()
            daemon.kill()
            gone = site.ask("/v1/overview")
            assert gone.status_code == 503
            assert "stats" not in gone.json()
            assert site.ask("/metrics").status_code == 503
        with Running(path, disk=tmp_path / "disk") as daemon:
            assert eventually(lambda: site.overview()["source"]["up"])
            store = daemon.connect()
            request(store, chain(4), ttft_s=0.2, saved_s=0.1)  # type: ignore[arg-type]
            assert eventually(lambda: reported(site) == 1)
            assert site.act("clear", {"all": True}).json()["done"] == 4
            store.close()
        epochs = site.ask("/v1/history").json()["epoch"]
        assert epochs == sorted(epochs)
    source.close()


def reported(site: Site) -> int:
    stats = site.overview().get("stats")
    return int(stats["requests"]["requests"]) if stats else 0


def test_another_server_is_shown_and_steered_with_the_askers_own_token(site: Site) -> None:
    request(site.store, chain(4), ttft_s=0.5, saved_s=0.0)
    with served(ServerSource(f"{site.url}/v1"), Guard(None)) as (url, watch):
        here = Site(url, watch, site.store)
        own, told = site.overview(), here.overview()
        for name in ("stats", "scopes", "prefixes", "decisions"):
            assert told[name] == own[name]
        assert told["source"]["where"] == site.url
        assert here.ask("/metrics").text == site.ask("/metrics").text
        prefix = site.prefix_of(chain(4))
        assert here.act("pin", {"prefix": prefix, "ttl": "90s"}, token=None).status_code == 401
        assert here.act("pin", {"prefix": prefix, "ttl": "90s"}, token="wrong").status_code == 401
        assert site.store.stats().pins == 0
        assert here.act("pin", {"prefix": prefix, "ttl": "90s"}).json()["done"] == 4
        assert here.act("drop", {"prefix": "f" * 12}).status_code == 404
        assert here.act("clear", {"scope": chain(4).root[:8].hex()}).json()["done"] == 4
        assert eventually(lambda: here.ask("/v1/history").json()["totals"].get("requests", [])[-1:] == [1])


def test_a_server_that_is_not_there_is_told() -> None:
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    with served(ServerSource(f"http://127.0.0.1:{port}"), Guard(None)) as (url, watch):
        here = Site(url, watch, None)  # type: ignore[arg-type]
        answer = here.ask("/v1/overview")
        assert answer.status_code == 503
        assert "Connection refused" in answer.json()["source"]["why"]
        assert here.ask("/metrics").status_code == 502
        assert here.act("clear", {"all": True}).status_code == 502
    with pytest.raises(ConfigError, match="is no URL"):
        ServerSource("file:///etc/passwd")


@contextmanager
def answering(status: int, body: bytes, location: str = "") -> Iterator[tuple[str, list[str]]]:
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization", ""))
            self.send_response(status)
            if location:
                self.send_header("Location", location)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()
        thread.join(10)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"source": 5}', b"<html>", b"[" * 100_000])
def test_another_kind_of_server_is_told_apart(body: bytes) -> None:
    with answering(200, body) as (there, _):
        told = ServerSource(there).read(full=True)
        assert told["source"]["up"] is False
        assert there in told["source"]["why"]


def test_a_redirect_gets_no_token() -> None:
    with answering(200, b"{}") as (thief, stolen), answering(302, b"", location=thief) as (there, _):
        with served(ServerSource(there), Guard(None)) as (url, watch):
            here = Site(url, watch, None)  # type: ignore[arg-type]
            assert here.act("clear", {"all": True}, token=TOKEN).status_code == 502
            assert here.ask("/v1/overview").status_code == 503
        assert stolen == []


def test_a_daemon_that_hangs_is_told_within_its_deadline(tmp_path: Path) -> None:
    """Somebody listens at the socket and never says a word."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(path))
        mute.listen(5)
        source = DaemonSource(path)
        told = source.read(full=True)
        assert told["source"]["up"] is False
        source.close()


def test_steering_a_daemon_reaches_its_store(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with Running(path, disk=tmp_path / "disk") as daemon:
        store = daemon.connect()
        assert put(store, chain(5)) == 5  # type: ignore[arg-type]
        source = DaemonSource(path)
        with served(source) as (url, watch):
            site = Site(url, watch, None)  # type: ignore[arg-type]
            prefix = site.prefix_of(chain(5))
            assert store.flush(10)
            assert site.act("demote", {"prefix": prefix}).json()["done"] == 5
            assert store.stats().ram_blocks == 0
            assert site.act("prefetch", {"prefix": prefix}).json()["done"] == 5
            assert store.stats().ram_blocks == 5
            assert site.act("drop", {"prefix": prefix}).json()["done"] == 5
        source.close()
        store.close()
