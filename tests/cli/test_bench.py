"""`tiercel bench` as it is typed: mistakes, servers it starts, Ctrl-C, servers that die, comparisons."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.bench.fake import FakeServer, Handler, good, serving

from tiercel import cli
from tiercel.bench.results import OFF, ON, agreement, read_report, summary
from tiercel.bench.spec import Asked
from tiercel.bench.stop import Stop
from tiercel.config import Config
from tiercel.errors import GeometryError

pytest.importorskip("httpx")

SMALL = "--sessions 2 --turns 2 --tokens 40 --answer-tokens 4 --pause 0s --rounds 2".split()


def bench(*args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tiercel", "bench", *args],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **more,
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--workload", "chats"], "--workload 'chats' does not exist; accepted: all, chat"),
        (["--url", "nowhere"], "--url nowhere: is no URL"),
        (["--url", "http://127.0.0.1:9", "--ram", "1GiB"], "--ram: is for a server that bench starts"),
        (["model", "--url", "http://127.0.0.1:9"], "MODEL: is for a server that bench starts"),
        (["--url", "http://127.0.0.1:9", "--", "--flag"], "--: is for a server that bench starts"),
        (["--baseline-url", "http://127.0.0.1:9"], "accepted with --url"),
        (["--baseline-hints"], "accepted with --url"),
        (["--name", "m"], "accepted with --url"),
        (["--rate", "2", "--concurrency", "4"], "--rate and --concurrency: accepted is one of them"),
        (["--rate", "0"], "--rate"),
        (["--duration", "5"], "--duration: "),
        (["--duration", "0s"], "--duration 0s: is no time"),
        (["--deadline", "soon"], "--deadline: "),
        (["--ram", "many"], "ram.size"),
        (["--texts", "/no/such/place"], "--texts: '/no/such/place' is not a directory"),
        (["--json", "/no/such/place/a.json"], "--json: directory '/no/such/place' does not exist"),
        (["--html", "/"], "--html: '/' is a directory"),
        (["--engine", "transformers", "--", "--flag"], "is for vLLM"),
        (["--compare", "/no/a.json", "/no/b.json"], "/no/a.json: cannot be read"),
        (["--workload", "overflow", "--sessions", "1"], "too few for 'overflow'"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], args: list[str], words: str) -> None:
    assert cli.run(["bench", *args]) == 2
    told = capsys.readouterr().err
    assert told.startswith("tiercel: error: ")
    assert words in told
    assert told.count("\n") == 1


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(good) as server:
        url = server.url
    assert cli.run(["bench", "--url", url]) == 2
    assert f"tiercel: error: {url}: lists no model" in capsys.readouterr().err


def test_a_server_that_would_ignore_hints_is_no_side_without_the_store(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(good) as server:
        args = ["bench", "--url", server.url, "--baseline-hints", *SMALL]
        assert cli.run(args) == 2
        assert "accepted: a tiercel serve with its own engine" in capsys.readouterr().err
        assert server.bodies == []
        server.cache = True
        assert cli.run(args) == 0
    told = [one.get("tiercel") for one in server.bodies]
    assert {"no_store": True, "no_load": True} in told
    assert None in told


def test_two_servers_are_measured_and_two_runs_compared(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERCEL_API_KEY", "sk-secret")
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    with serving(good) as on, serving(good) as off:
        for file in files:
            args = ["--url", on.url, "--baseline-url", f"{off.url}/v1/", *SMALL, "--sessions", "4"]
            assert cli.run(["bench", *args, "--json", str(file), "--html", str(tmp_path / "r.html")]) == 0
        keys = on.keys | off.keys
    shown = capsys.readouterr()
    assert "chat: 4 sessions of 2 turns" in shown.out
    assert "Same answers with and without: 16 of 16." in shown.out
    assert keys == {"Bearer sk-secret"}
    for file in (*files, tmp_path / "r.html"):
        assert "sk-secret" not in file.read_text()
    assert cli.run(["bench", "--compare", *map(str, files), "--json", str(tmp_path / "c.json")]) == 0
    shown = capsys.readouterr()
    assert "chat, with offloading: B against A" in shown.out
    assert {part["side"] for part in json.loads((tmp_path / "c.json").read_text())["parts"]} == {ON, OFF}


def test_a_server_that_dies_midway_is_a_report_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def dies(handler: Handler, body: dict[str, Any]) -> None:
        server: FakeServer = handler.server
        if len(server.bodies) < 6:
            good(handler, body)
        else:
            server.socket.close()
            handler.close_connection = True
            handler.connection.close()

    with serving(dies) as server:
        code = cli.run(
            ["bench", "--url", server.url, *SMALL, "--sessions", "20", "--json", str(tmp_path / "a.json")]
        )
    assert code == 1
    run = read_report(tmp_path / "a.json").workloads[0]
    found = summary(run.spec, run.sides[ON])
    assert (found.answered > 0, found.failed > 0, found.unsent > 0) == (True, True, True)
    assert "Not as it should be" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_a_report_on_what_there_was(tmp_path: Path, number: signal.Signals) -> None:
    process: list[subprocess.Popen[str]] = []

    def interrupts(handler: Handler, body: dict[str, Any]) -> None:
        if len(handler.server.bodies) == 7:
            process[0].send_signal(number)
            handler.server.let_go.wait(30)
        good(handler, body)

    args = [*SMALL, "--sessions", "20", "--json", str(tmp_path / "a.json")]
    with serving(interrupts) as server:
        process.append(
            subprocess.Popen(
                [sys.executable, "-m", "tiercel", "bench", "--url", server.url, *args],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        out, told = process[0].communicate(timeout=60)
    assert process[0].returncode == 130, told
    assert "Interrupted: these are the figures until then." in out
    assert "Traceback" not in told
    report = read_report(tmp_path / "a.json")
    side = report.workloads[0].sides[ON]
    assert report.interrupted
    assert (len(side.samples), side.rounds[0].cut) == (3, 1)


def test_a_model_that_is_not_there_is_one_line() -> None:
    done = bench("/no/such/model", "--engine", "transformers")
    assert done.returncode == 2
    assert done.stderr.startswith("tiercel: error: /no/such/model")
    assert done.stderr.count("\n") == 1


def test_a_server_that_does_not_start_is_one_line_with_its_own_words_and_leaves_its_log(
    tmp_path: Path,
) -> None:
    """A model folder without weights: only the server finds out."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    done = bench(str(tmp_path), "--engine", "transformers")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    error = done.stderr.splitlines()[-1]
    assert error.startswith("tiercel: error: the server for 'on' ended with exit code 2: ")
    told = re.search(r"logs of the servers: (\S+)", done.stderr)
    assert told is not None
    last = error.removeprefix("tiercel: error: the server for 'on' ended with exit code 2: ")
    assert last in (Path(told[1]) / "on.log").read_text()
    shutil.rmtree(told[1])


@pytest.mark.model
def test_servers_it_starts_overflow_their_ram_and_answer_the_same(model_dir: Path, tmp_path: Path) -> None:
    small = "--sessions 4 --tokens 100 --answer-tokens 2 --rounds 1 --warmup 0".split()
    blocks = "--set model.block_tokens=32 --set store.load=always".split()
    outputs = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    engine = [str(model_dir), "--engine", "transformers", "--workload", "overflow"]
    done = bench(*engine, *small, *blocks, *outputs, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    report = read_report(tmp_path / "a.json")
    run = report.workloads[0]
    on, off = (summary(run.spec, run.sides[name]) for name in (ON, OFF))
    assert (on.answered, off.answered) == (8, 8)
    assert agreement(run.sides[ON], run.sides[OFF]).same == 8
    assert on.cached_share is not None
    assert on.cached_share > 0.2
    assert off.cached_share == 0
    assert on.figures is not None
    assert on.figures.reused_tokens.get("disk", 0) > 0
    assert on.figures.read_bytes["disk"] > 0
    assert on.host_bytes is not None
    assert on.host_bytes > 100 << 20
    assert "RAM tier" in report.notes[0]
    # Nothing is left behind: neither blocks nor logs.
    folder = re.search(r"the rest on disk in (\S+)", report.notes[0])
    assert folder is not None
    assert not list(Path(folder[1]).glob("bench-*"))
    assert "Traceback" not in done.stderr


@pytest.mark.model
def test_vllm_alone_is_the_command_of_the_other_side_without_the_connector(model_dir: Path) -> None:
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    from tiercel.cli.bench_servers import Servers

    servers = Servers(
        model_dir, "vllm", Config(), flags=("--max-model-len", "4096"), specs=[Asked().spec("chat")],
        ready_deadline_s=60.0, stop=Stop(),
    )  # fmt: skip
    try:
        on, off = servers.sides
        with_tiercel, alone = list(on._command(8001)), list(off._command(8001))
        assert "serve" in with_tiercel
        assert with_tiercel[with_tiercel.index("--engine") + 1] == "vllm"
        assert "--kv-transfer-config" not in alone
        assert alone[-2:] == with_tiercel[-2:] == ["--max-model-len", "4096"]
        assert alone[alone.index("--port") + 1] == with_tiercel[with_tiercel.index("--port") + 1] == "8001"
        assert str(model_dir) in alone
    finally:
        servers.close()
    assert not servers.folder.exists()


def test_what_fails_early_leaves_no_directory_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiercel.cli.bench_servers import Servers

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(GeometryError, match="nowhere"):
        Servers(
            tmp_path / "nowhere", "transformers", Config(), flags=(), specs=[Asked().spec("chat")],
            ready_deadline_s=1.0, stop=Stop(),
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []
