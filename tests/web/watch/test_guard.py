"""Who may ask: hosts, tokens, sizes and kinds of bodies, names of files."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from tests.store.support import chain, put

from tiercel.errors import ConfigError
from tiercel.web.watch.guard import Guard
from tiercel.web.watch.steering import ACTIONS, BODY_BYTES_MAX
from tiercel.web.watch.token import make_token, read_token, same

from .running import TOKEN, Site, site_over_a_store

READS = ("/v1/overview", "/v1/history", "/metrics", "/openapi.json")
PREFIX = "0" * 12


def bodies(action: str) -> dict[str, object]:
    return {"all": True} if action == "clear" else {"prefix": PREFIX}


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8089", "127.0.0.1.evil.example", "", "[::1", "a b.c"]
)
def test_a_foreign_host_is_refused_everywhere(emptied: Site, host: str) -> None:
    for path in READS:
        answer = emptied.ask(path, headers={"Host": host})
        # Some are refused by the HTTP parser already.
        assert answer.status_code in (400, 421), (path, host)
    assert emptied.act("clear", {"all": True}).status_code == 200
    answer = httpx.post(
        f"{emptied.url}/v1/cache/clear", json={"all": True},
        headers={"Authorization": f"Bearer {TOKEN}", "Host": host},
    )  # fmt: skip
    assert answer.status_code in (400, 421)


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1", "127.0.0.1", "10.1.2.3:80", "[::1]:8089", "gpu-7"]
)
def test_our_own_names_are_answered(emptied: Site, host: str) -> None:
    assert emptied.ask("/v1/overview", headers={"Host": host}).status_code == 200


def test_a_name_that_was_told_is_answered_and_no_other(tmp_path: Path) -> None:
    with site_over_a_store(tmp_path, Guard(TOKEN, hosts=frozenset({"kv.example.com"}))) as site:
        assert site.ask("/v1/overview", headers={"Host": "kv.example.com"}).status_code == 200
        assert site.ask("/v1/overview", headers={"Host": "KV.example.com:80"}).status_code == 200
        assert site.ask("/v1/overview", headers={"Host": "www.kv.example.com"}).status_code == 421


@pytest.mark.parametrize("action", ACTIONS)
def test_nothing_is_changed_without_the_token(emptied: Site, action: str) -> None:
    put(emptied.store, chain(4))
    wrong = (None, "wrong", TOKEN[:-1], TOKEN + "x", TOKEN.upper())
    for token in wrong:
        answer = emptied.act(action, bodies(action), token)
        assert answer.status_code == 401, token
        assert answer.headers["www-authenticate"] == "Bearer"
        assert TOKEN not in answer.text
    for header in (TOKEN, f"Basic {TOKEN}", f"bearer {TOKEN}", f"Bearer  {TOKEN}"):
        answer = httpx.post(
            f"{emptied.url}/v1/cache/{action}", json=bodies(action), headers={"Authorization": header}
        )
        assert answer.status_code == 401, header
    assert emptied.store.stats().ram_blocks == 4
    # The control: with the token it does act, or finds that there is no such prefix.
    assert emptied.act(action, bodies(action)).status_code == (200 if action == "clear" else 404)


def test_reading_needs_the_token_where_it_was_told_so(tmp_path: Path) -> None:
    with site_over_a_store(tmp_path, Guard(TOKEN, reads=True)) as site:
        for path in (*READS, "/v1/overview/stream"):
            assert site.ask(path).status_code == 401
        for path in READS:
            assert site.ask(path, headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
        # The page itself has no figures in it, and asks for the token.
        assert site.ask("/").status_code == 200


def test_large_bodies_and_other_kinds_are_refused(emptied: Site) -> None:
    put(emptied.store, chain(4))
    large = {"all": True, "more": "x" * BODY_BYTES_MAX}
    assert emptied.act("clear", large).status_code == 413
    headers = {"Authorization": f"Bearer {TOKEN}"}
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None):
        more = headers | ({} if kind is None else {"Content-Type": kind})
        answer = httpx.post(f"{emptied.url}/v1/cache/clear", content=b'{"all": true}', headers=more)
        assert answer.status_code == 415, kind

    # Also one that does not say how long it is.
    chunked = iter([b"x" * 65536] * 3)
    more = headers | {"Content-Type": "application/json"}
    assert httpx.post(f"{emptied.url}/v1/cache/clear", content=chunked, headers=more).status_code == 413
    assert emptied.store.stats().ram_blocks == 4


@pytest.mark.parametrize(
    "path",
    ["/assets/../app.py", "/assets/%2e%2e/app.py", "/assets/..%2f..%2fapp.py", "/assets//etc/passwd",
     "/assets/live.html", "/assets/live/", "/assets/live/../../app.py", "/../../etc/passwd", "/assets/%00",
     "/assets/live%2fmain.js%00.css", "/static/live.html"],
)  # fmt: skip
def test_no_other_file_is_told(emptied: Site, path: str) -> None:
    # A client library would tidy the path up before it is sent.
    where = urlsplit(emptied.url)
    assert where.hostname is not None
    with socket.create_connection((where.hostname, where.port or 80), 10) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        assert answer.status in (400, 404)
        text = answer.read()
    assert b"root:" not in text
    assert b"import" not in text
    # The control: its own files are told.
    assert emptied.ask("/assets/live/main.js").status_code == 200


def test_every_answer_keeps_foreign_code_out(emptied: Site) -> None:
    for path in ("/", "/plan", "/assets/emptied.css", "/assets/data.js", "/nothing", *READS):
        headers = emptied.ask(path).headers
        assert "script-src 'self'" in headers["content-security-policy"], path
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


def test_tokens_come_from_files_whole_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-of-some-length\n")
    assert read_token(file) == "a-token-of-some-length"
    for text in ("", "\n", "short", "two lines\nof text that is long", "x" * 5000, "not-ascii-é-at-all-here"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="holds no token") as told:
            read_token(file)
        assert not text.strip() or text.strip() not in str(told.value)
    with pytest.raises(ConfigError, match="No such file"):
        read_token(tmp_path / "nothing")
    assert make_token() != make_token()
    assert len(make_token()) >= 32
    assert same(b"Bearer abc", "abc")
    assert not same("Bearer \xe9".encode("latin-1"), "abc")
