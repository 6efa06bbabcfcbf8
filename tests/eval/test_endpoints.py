"""Two servers compared: over real HTTP, one that looks answers up in its prompt and one that forgets some."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from tiercel.cli.eval import command
from tiercel.errors import ConfigError, RequestError
from tiercel.eval.results import Report, read_report

Answer = Callable[[str], str]


def looks_up(prompt: str) -> str:
    """The code that stands behind the last line's name, and then something else."""
    name = prompt.rsplit("\n", 1)[1]
    found = re.search(re.escape(name) + r"( \d+)\n", prompt)
    assert found
    return found[1] + "\nand so on"


def forgets(prompt: str) -> str:
    """Nothing of the first half of the names."""
    return " 0" if prompt.rsplit("\n", 1)[1] < "M" else looks_up(prompt)


@contextmanager
def serving(answer: Answer, bodies: list[dict[str, object]] | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send({"data": [{"id": "first"}, {"id": "second"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if bodies is not None:
                bodies.append({**body, "key": self.headers.get("authorization")})
            self._send({"choices": [{"text": answer(body["prompt"])}]})

        def _send(self, what: object) -> None:
            data = json.dumps(what).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(10)


def judged(folder: Path, *flags: str) -> tuple[int, Report, str]:
    ran = CliRunner().invoke(
        command, ["--json", str(folder / "r.json"), "--html", str(folder / "r.html"), *flags],
        standalone_mode=False, catch_exceptions=False,
    )  # fmt: skip
    return int(ran.return_value or 0), read_report(folder / "r.json"), ran.output


def test_what_a_server_loses_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCEL_API_KEY", "k3y")
    bodies: list[dict[str, object]] = []
    with serving(forgets, bodies) as url, serving(looks_up) as baseline:
        code, report, said = judged(
            tmp_path, "--url", url, "--baseline-url", baseline, "--tasks", "kv-list,text-nll",
            "--min-accuracy-drop", "0.1",
        )  # fmt: skip
    (row,) = report.endpoints  # text-nll has no answers to be right about
    assert row.accuracy_baseline == 1.0
    assert 0.2 < row.accuracy < 0.8
    assert row.same == row.accuracy
    assert (row.seeds, row.answers) == (3, 24)
    assert code == 1
    assert report.failed[0].startswith("kv-list: accuracy falls by")
    assert bodies[0]["model"] == "first"
    assert bodies[0]["temperature"] == 0
    assert bodies[0]["key"] == "Bearer k3y"
    assert "k3y" not in said + (tmp_path / "r.json").read_text() + (tmp_path / "r.html").read_text()
    assert "Two servers" in (tmp_path / "r.html").read_text()


def test_equal_servers_pass(tmp_path: Path) -> None:
    with serving(looks_up) as url, serving(looks_up) as baseline:
        code, report, _ = judged(
            tmp_path, "--url", url, "--baseline-url", baseline, "--tasks", "kv-list", "--seeds", "1",
            "--min-accuracy-drop", "0", "--name", "mine",
        )  # fmt: skip
    assert code == 0
    assert (report.endpoints[0].accuracy, report.endpoints[0].same) == (1.0, 1.0)
    assert report.model.startswith("mine at http://127.0.0.1")


def test_a_server_that_is_none_is_named(tmp_path: Path) -> None:
    with serving(looks_up) as url, pytest.raises(RequestError, match="does not answer"):
        judged(tmp_path, "--url", url, "--baseline-url", "http://127.0.0.1:9", "--tasks", "needle")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--url", "http://a"], "only one is given"),
        (["--baseline-url", "http://a"], "only one is given"),
        (["--url", "http://a", "--baseline-url", "nonsense"], "--baseline-url nonsense: is no URL"),
        (
            ["--url", "http://a", "--baseline-url", "http://b", "--max-kl", "1"],
            "servers tell no probabilities",
        ),
    ],
)
def test_mistakes_are_named(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CliRunner().invoke(command, flags, standalone_mode=False, catch_exceptions=False)
