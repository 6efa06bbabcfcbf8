"""`tiercel cache prefetch | pin | unpin | demote | drop` and `tiercel explain` against a real server."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from tests.store.support import RECORD, Served, chain, disk, put
from tests.web.api.conftest import ServerProcess

from tiercel.cli import run
from tiercel.cli.explain import lines
from tiercel.memory import Arena, ArenaKind
from tiercel.store import LaneOptions, TieredStore
from tiercel.store.sessions import tenant_of

BLOCK = 32
LONG = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 12
MESSAGES = [{"role": "user", "content": LONG + "Who jumps?"}]


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("steered")
    options = ("--ram", "128MiB", "--disk", str(folder / "kv"), "--disk-size", "1GB")
    tokens = ("--set", f"model.block_tokens={BLOCK}", "--set", "store.load=always")
    with ServerProcess(
        str(model_dir), *options, *tokens, log=folder / "log", env={"TIERCEL_API_KEY": "k"}
    ) as one:
        yield one
        assert one.end() == 0


@pytest.fixture
def ask(server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setenv("TIERCEL_API_KEY", "k")

    def call(*args: str) -> dict[str, Any]:
        assert run([*args, "--url", server.url, "--json"]) == 0, capsys.readouterr().err
        return dict(json.loads(capsys.readouterr().out))

    return call


@pytest.mark.model
def test_a_conversation_is_steered_by_its_session_and_by_its_messages(
    server: ServerProcess, ask: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(MESSAGES))
    assert ask("explain", "--messages", str(file))["found"] == {}
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 8, "tiercel": {"session": "agent-7"}}
    headers = {"authorization": "Bearer k"}
    answered = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=120)
    assert answered.status_code == 200
    blocks = ask("explain", "--messages", str(file))["found"]["ram"]
    assert blocks >= 5
    assert ask("cache", "demote", "--session", "agent-7")["done"] >= blocks
    assert ask("explain", "--messages", str(file))["found"] == {"disk": blocks}
    assert ask("cache", "prefetch", "--messages", str(file))["done"] >= blocks
    assert ask("explain", "--messages", str(file))["found"] == {"ram": blocks}
    assert ask("cache", "pin", "--session", "agent-7", "--ttl", "1m")["done"] >= blocks
    assert ask("cache", "unpin", "--session", "agent-7")["action"] == "unpin"
    assert run(["explain", "--messages", str(file), "--url", server.url]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("prompt ")
    assert f"({blocks} in ram)" in said[1]
    assert said[-1].startswith("so ")
    assert ask("explain", "--messages", str(file), "--salt", "other")["found"] == {}
    assert ask("cache", "drop", "--session", "agent-7")["done"] >= blocks
    assert ask("explain", "--messages", str(file))["found"] == {}
    listed = httpx.get(f"{server.url}/v1/cache/decisions", headers=headers)
    assert "fox" not in listed.text


@pytest.mark.model
def test_a_text_and_a_file_name_the_same_prompt(server: ServerProcess, ask: Any, tmp_path: Path) -> None:
    (tmp_path / "doc.txt").write_text(LONG)
    by_text, by_file = ask("explain", LONG), ask("explain", "--file", str(tmp_path / "doc.txt"))
    assert by_text["prompt_tokens"] == by_file["prompt_tokens"] > 100


@pytest.mark.model
def test_without_the_key_nothing_is_told(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TIERCEL_API_KEY", raising=False)
    assert run(["cache", "drop", "hello", "--url", server.url]) == 2
    error = capsys.readouterr().err
    assert "the API key is missing or wrong" in error
    assert error.count("\n") == 1


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert run(list(args)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["explain"], "no prompt given; accepted is one of PROMPT, --file, --messages"),
        (["cache", "pin"], "no prompt given"),
        (["cache", "pin", "a", "--session", "b"], "PROMPT and --session given"),
        (["cache", "pin", "--file", "/no/such/file"], "No such file"),
        (["cache", "pin", "--messages", __file__], "is not JSON; accepted: a list of messages"),
        (["explain", "a", "--url", "localhost:8000"], "is no URL; accepted: such as http://127.0.0.1:8000"),
        (["explain", "a", "--url", "http://127.0.0.1:9"], "cannot be asked"),
        (["explain", "a", "--url", "file:///etc/passwd"], "is no URL"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], args: list[str], words: str) -> None:
    assert words in refused(capsys, *args)


class Odd(http.server.BaseHTTPRequestHandler):
    """Something else that listens: it redirects, knows no such call, or answers what is no JSON."""

    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_POST(self) -> None:
        self.asked.append((self.path, self.headers.get("Authorization")))
        self.rfile.read(int(self.headers["Content-Length"]))
        status = {"/away/v1/cache/explain": 302, "/vllm/v1/cache/explain": 404}.get(self.path, 200)
        self.send_response(status)
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(b'{"detail": "Not Found"}' if status == 404 else b"<html>")

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


def test_another_server_is_told_apart_and_a_key_goes_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIERCEL_API_KEY", "k")
    odd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    threading.Thread(target=odd.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{odd.server_address[1]}"
        assert "answered no JSON" in refused(capsys, "explain", "a", "--url", url)
        assert "answered no JSON" in refused(capsys, "explain", "a", "--url", f"{url}/away")
        told = refused(capsys, "explain", "a", "--url", f"{url}/vllm")
        assert "has no /v1/cache/explain; accepted: a tiercel serve with its own engine" in told
        assert Odd.asked == [(f"{base}/v1/cache/explain", "Bearer k") for base in ("", "/away", "/vllm")]
    finally:
        odd.shutdown()
        odd.server_close()


def test_a_decision_is_a_few_clear_lines() -> None:
    told = {
        "prompt_tokens": 2100, "block_tokens": 256, "found": {"ram": 2, "disk": 6},
        "expected": {
            "load_blocks": 3, "load_s": 0.1, "first_token_s": 0.5, "load_all_s": 3.25, "meet_s": 0.45,
            "compute_all_s": 1.5, "meet_from_block": 6,
        },
        "reason": "because",
    }  # fmt: skip
    assert lines(told) == [
        "prompt    2,100 tokens, blocks of 256",
        "stored    8 blocks, 2,048 tokens (2 in ram, 6 in disk)",
        "compute   1.50 s without the cache",
        "load all  3.25 s to the first token",
        "load some 500.0 ms with the first 3 blocks",
        "both      450.0 ms, loading from the end while computing",
        "so        because",
    ]


def test_a_daemon_steers_what_a_session_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For engines whose own servers have no such calls: an agent's pause under vLLM."""
    tier = disk(tmp_path / "c")
    arena = Arena(RECORD, 16, reserved=4, kind=ArenaKind.SHARED)
    with Served(TieredStore(arena, [(tier, LaneOptions())])) as store:
        socket = str(store.daemon.path)

        def steer(action: str, *args: str) -> dict[str, Any]:
            assert run(["cache", action, "--socket", socket, "--json", *args]) == 0
            return dict(json.loads(capsys.readouterr().out))

        agent = ("--session", "agent-7", "--salt", "t")
        for salt, seed in (("t", 0), ("u", 1)):
            put(store, chain(5, seed))  # type: ignore[arg-type]
            store.sessions.note(tenant_of(salt), "agent-7", [chain(5, seed)])
        told = {"object": "cache", "action": "demote", "blocks": 5, "done": 5}
        assert steer("demote", *agent) == told
        assert store.stats().ram_blocks == 5, "the other tenant's"
        assert steer("prefetch", *agent)["done"] == 5
        assert store.stats().ram_blocks == 10
        assert steer("pin", *agent, "--ttl", "1h")["done"] == 5
        assert store.stats().pins == 5
        assert steer("unpin", *agent)["done"] == 5
        assert store.stats().pins == 0
        assert steer("drop", *agent)["done"] == 5
        assert run(["cache", "drop", "--socket", socket, *agent]) == 2
        said = capsys.readouterr().err
        assert "session 'agent-7' is not known to the daemon" in said
        assert said.count("\n") == 1
        assert steer("demote", "--session", "agent-7", "--salt", "u")["done"] == 5
        for wrong, words in (
            (["a prompt"], "a daemon knows no prompts; accepted is --session"),
            ([*agent, "--url", "http://127.0.0.1:1"], "accepted is one of them"),
            (["--session", "a\nb"], "accepted are 1 to 256 printable characters"),
        ):
            assert run(["cache", "demote", "--socket", socket, *wrong]) == 2
            assert words in capsys.readouterr().err
    assert run(["cache", "demote", "--socket", socket, *agent]) == 2
    assert "start one there" in capsys.readouterr().err
