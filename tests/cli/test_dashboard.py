"""`tiercel dashboard` and `tiercel daemon --http`, as processes: what they say, serve and leave behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from tests.service.running import Running, environ
from tests.store.support import chain, eventually, put

from tiercel.cli.daemon_http import parse_address
from tiercel.cli.dashboard import command
from tiercel.config.paths import CACHE_DIR_VARIABLE
from tiercel.errors import ConfigError

pytest.importorskip("uvicorn")


@contextmanager
def dashboard(*args: str, home: Path) -> Iterator[tuple[str, list[str]]]:
    """The command in a process of its own; its address and what it said. Ends it by SIGTERM."""
    env = environ({CACHE_DIR_VARIABLE: str(home), "XDG_RUNTIME_DIR": str(home)})
    process = subprocess.Popen(
        [sys.executable, "-m", "tiercel", "dashboard", "--port", "0", *args],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        said = [process.stdout.readline(), process.stdout.readline()]
        assert said[0].startswith("http://127.0.0.1:"), said
        yield said[0].split("/  ")[0], said
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(30)
        process.stdout.close()


def token_of(said: list[str]) -> str:
    return said[1].split(": ")[1].strip()


def test_the_demo_is_watched_and_gone_with_the_command(tmp_path: Path) -> None:
    with dashboard("--demo", home=tmp_path) as (url, said):
        assert eventually(lambda: requests_at(url) > 0)
        told = httpx.get(f"{url}/v1/overview").json()
        assert told["source"]["kind"] == "demo"
        wrong = httpx.post(f"{url}/v1/cache/clear", json={"all": True}, headers={"Authorization": "Bearer x"})
        assert wrong.status_code == 401
        right = {"Authorization": f"Bearer {token_of(said)}"}
        done = httpx.post(f"{url}/v1/cache/clear", json={"all": True}, headers=right, timeout=20)
        assert done.json()["done"] > 0
        assert list(tmp_path.glob("demo-*"))
    assert not list(tmp_path.glob("demo-*"))


def requests_at(url: str) -> int:
    return int(httpx.get(f"{url}/v1/overview").json()["stats"]["requests"]["requests"])


def test_with_nothing_to_watch_it_is_the_planner_and_says_how(tmp_path: Path) -> None:
    with dashboard(home=tmp_path) as (url, said):
        assert "--demo, --socket PATH of a tiercel daemon, --url" in said[1]
        assert httpx.get(url, follow_redirects=True).url == f"{url}/plan"


def test_a_daemon_at_the_default_socket_is_watched(tmp_path: Path) -> None:
    (tmp_path / "tiercel").mkdir()
    with Running(tmp_path / "tiercel" / "daemon.sock") as daemon, dashboard(home=tmp_path) as (url, _):
        told = httpx.get(f"{url}/v1/overview").json()
        assert told["source"]["kind"] == "daemon"
        assert told["source"]["pid"] == daemon.process.pid


def test_the_daemon_serves_it_beside_its_engines(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-for-this-test\n")
    with Running(
        tmp_path / "s", disk=tmp_path / "disk", args=("--http", "127.0.0.1:0", "--token-file", str(file))
    ) as daemon:
        assert daemon.process.stdout is not None
        url = daemon.process.stdout.readline().decode().split(" at ")[1].strip().rstrip("/")
        assert httpx.get(f"{url}/v1/overview").json()["source"]["pid"] == daemon.process.pid
        store = daemon.connect()
        assert put(store, chain(4)) == 4  # type: ignore[arg-type]
        time.sleep(0.3)  # what was told a moment ago is told again
        told = httpx.get(f"{url}/v1/overview").json()
        assert told["stats"]["ram_blocks"] == 4
        assert told["source"]["clients"] >= 1
        assert "tiercel_tier_blocks" in httpx.get(f"{url}/metrics").text
        right = {"Authorization": "Bearer a-token-for-this-test"}
        assert httpx.post(f"{url}/v1/cache/clear", json={"all": True}).status_code == 401
        answer = httpx.post(f"{url}/v1/cache/clear", json={"all": True}, headers=right)
        assert answer.json()["done"] == 4
        store.close()
        assert daemon.end() == 0


def test_a_stream_that_is_open_holds_up_no_daemon(tmp_path: Path) -> None:
    with Running(tmp_path / "s", args=("--http", "127.0.0.1:0")) as daemon:
        assert daemon.process.stdout is not None
        url = daemon.process.stdout.readline().decode().split(" at ")[1].strip().rstrip("/")
        assert b"token for its buttons: " in daemon.process.stdout.readline()
        with httpx.stream("GET", f"{url}/v1/overview/stream", timeout=20) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "retry: 2000"
            daemon.signal(signal.SIGTERM)
            assert "event: end" in list(lines)
        assert daemon.process.wait(30) == 0


def test_with_a_key_a_daemon_tells_nothing_without_it(tmp_path: Path) -> None:
    with Running(
        tmp_path / "s", args=("--http", "127.0.0.1:0"), env={"TIERCEL_API_KEY": "the-key-of-this-test"}
    ) as daemon:
        assert daemon.process.stdout is not None
        url = daemon.process.stdout.readline().decode().split(" at ")[1].strip().rstrip("/")
        assert httpx.get(f"{url}/v1/overview").status_code == 401
        right = {"Authorization": "Bearer the-key-of-this-test"}
        assert httpx.get(f"{url}/v1/overview", headers=right).status_code == 200
        assert httpx.get(url).status_code == 200


@pytest.mark.parametrize(
    "text", ["", "8090", ":8090", "host:", "host:x", "host:70000", "[::1]", "h:-1", "h:٣"]
)
def test_addresses_that_are_none_are_told(text: str) -> None:
    with pytest.raises(ConfigError, match="accepted: HOST:PORT"):
        parse_address(text)
    assert parse_address("127.0.0.1:0") == ("127.0.0.1", 0)
    assert parse_address("[::1]:8090") == ("::1", 8090)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--demo", "--url", "http://x"], "--url and --demo given; accepted is one of them"),
        (["--socket", "a", "--demo"], "--socket and --demo given"),
        (["--url", "ftp://x", "--port", "0"], "--url ftp://x: is no URL"),
        (["--demo", "--token-file", "/nothing/there"], "--token-file /nothing/there: No such file"),
        (["--host", "no.such.host.invalid"], "--host: 'no.such.host.invalid' is not an address"),
    ],
)
def test_mistakes_are_one_line(args: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as told:
        CliRunner().invoke(command, args, catch_exceptions=False)
    assert words in str(told.value)
    assert "\n" not in str(told.value)
