"""`tiercel serve --engine vllm`: the right commands, and processes that end in order and never alone.

vLLM itself runs in `tests/engines/vllm`; a small program stands in for it, so that ends and faults are quick.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.service.running import Running, environ, tiercel
from tests.service.test_spawn import daemons
from tests.store.support import eventually

from tiercel import cli
from tiercel.cli import serve as serve_command
from tiercel.cli import serve_vllm
from tiercel.service.connecting import reach

# Takes the flags of vLLM's server; answers /health after a while; says how it ended; leaves a child if told.
STAND_IN = """
import http.server, os, signal, subprocess, sys, threading, time
args = sys.argv[1:]
port = int(args[args.index("--port") + 1])
def end(*_):
    print("engine ends", flush=True)
    time.sleep(float(os.environ.get("SLOW_END", "0")))
    os._exit(0)
signal.signal(signal.SIGTERM, end)
if "--die" in args:
    sys.exit(3)
if "--leave" in args:
    left = subprocess.Popen([sys.executable, "-c", "import time, signal; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
    print("left", left.pid, flush=True)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/crash":
            os._exit(7)
        self.send_response(200 if self.path == "/health" and "--never" not in args else 503)
        self.end_headers()
    def log_message(self, *_): pass
print("engine", os.getpid(), "key", os.environ.get("VLLM_API_KEY"), flush=True)
time.sleep(0.5)
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""  # noqa: E501

RUN = """
import sys
from tiercel.cli import main, serve, serve_vllm
serve.find_spec = lambda name: True
serve_vllm.version = lambda names=(): "0.32.0"
serve_vllm._program = lambda model: [sys.executable, {stand_in!r}]
main()
"""


class Serving:
    """`tiercel serve --engine vllm` with the stand-in; `lines` are read until it says what is asked for."""

    def __init__(self, folder: Path, *args: str, env: dict[str, str] | None = None) -> None:
        stand_in = folder / "stand_in.py"
        stand_in.write_text(STAND_IN)
        self.log = folder / "stderr"
        with self.log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RUN.format(stand_in=str(stand_in)), "serve", str(folder), "--engine",
                 "vllm", "--port", "0", "--ram", "1MiB", *args],
                stdout=subprocess.PIPE, stderr=errors, text=True, env=environ(env),
            )  # fmt: skip
        self.lines: list[str] = []

    def until(self, start: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith(start):
                return line.rstrip()
        raise AssertionError(f"it never said '{start}': {self.lines} {self.log.read_text()}")

    def ready(self) -> str:
        """The address."""
        return self.until("serving ").rpartition(" at ")[2].removesuffix("/v1")

    def wait(self) -> int:
        assert self.process.stdout is not None
        self.lines += [line.rstrip() for line in self.process.stdout]
        return self.process.wait(60)

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        if self.process.stdout is not None:
            self.process.stdout.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    assert eventually(lambda: not daemons(folder)), "no daemon is left alone"


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("m")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_starts_both_says_when_it_is_ready_and_ends_vllm_first(
    folder: Path, runtime: Path, number: int
) -> None:
    with Serving(folder, "--name", "mine") as serving:
        engine = int(serving.until("engine ").split()[1])
        said = serving.until("serving ")
        assert said.startswith("serving mine (vLLM 0.32.0, daemon ")
        command = shlex.split(serving.lines[-2])
        assert command[:4] == ["dashboard:", "tiercel", "dashboard", "--socket"]
        reach(Path(command[4])).close()
        (daemon,) = daemons(runtime)
        assert os.getsid(engine) == engine, "Ctrl-C in a terminal does not reach it"
        serving.process.send_signal(number)
        serving.until("engine ends")
        assert serving.wait() == 0
        assert not alive(engine)
        assert not alive(daemon)
    assert not list(runtime.rglob("*.sock"))


def test_what_the_daemon_had_to_write_is_written_when_it_ends(folder: Path, runtime: Path) -> None:
    from tests.store.support import PAYLOAD, chain, put

    from tiercel.config import Config
    from tiercel.service import connect

    disk = ("--disk", str(folder / "kv"), "--disk-size", "10MiB", "--set", "tiers.0.write=on-evict")
    with Serving(folder, *disk) as serving:
        serving.ready()
        (path,) = runtime.rglob("*.sock")
        with connect(Config.load(None, {}, {"daemon.socket": str(path)}), PAYLOAD) as store:
            assert put(store, chain(20)) == 20  # type: ignore[arg-type]
        serving.process.terminate()
        assert serving.wait() == 0
    assert len(list((folder / "kv").rglob("*.kv"))) == 20


def test_when_vllm_dies_its_exit_code_is_ours(folder: Path) -> None:
    import http.client
    from urllib.parse import urlsplit

    with Serving(folder) as serving:
        address = urlsplit(serving.ready())
        connection = http.client.HTTPConnection(address.netloc)
        connection.request("GET", "/crash")
        assert serving.wait() == 7
        connection.close()
    assert serving.log.read_text() == "tiercel: vLLM ended with exit code 7\n"
    with Serving(folder, "--", "--die") as serving:
        assert serving.wait() == 3
    assert serving.log.read_text() == "tiercel: vLLM ended with exit code 3 before it was ready\n"


def test_when_vllm_is_killed_the_exit_code_says_so(folder: Path) -> None:
    with Serving(folder) as serving:
        engine = int(serving.until("engine ").split()[1])
        serving.ready()
        os.kill(engine, signal.SIGKILL)
        assert serving.wait() == 128 + signal.SIGKILL


def test_a_daemon_that_is_killed_is_started_again_and_vllm_goes_on(folder: Path, runtime: Path) -> None:
    with Serving(folder) as serving:
        engine = int(serving.until("engine ").split()[1])
        serving.ready()
        (first,) = daemons(runtime)
        os.kill(first, signal.SIGKILL)
        assert eventually(lambda: daemons(runtime) not in ([], [first]))
        assert alive(engine)
        assert "the daemon ended with exit code 137; it is started again" in serving.log.read_text()
        serving.process.terminate()
        assert serving.wait() == 0


def test_killed_itself_it_leaves_nobody_behind(folder: Path, runtime: Path) -> None:
    with Serving(folder) as serving:
        engine = int(serving.until("engine ").split()[1])
        serving.ready()
        assert len(daemons(runtime)) == 1
        serving.process.kill()
        assert eventually(lambda: not alive(engine))
        assert eventually(lambda: not daemons(runtime))


def test_what_vllm_leaves_behind_is_ended_too(folder: Path) -> None:
    with Serving(folder, "--", "--leave") as serving:
        left = int(serving.until("left ").split()[1])
        serving.ready()
        assert alive(left)
        serving.process.terminate()
        assert serving.wait() == 0
        assert eventually(lambda: not alive(left))


def test_a_second_signal_does_not_wait_for_vllm(folder: Path) -> None:
    with Serving(folder, env={"SLOW_END": "600"}) as serving:
        serving.ready()
        serving.process.terminate()
        serving.until("engine ends")
        serving.process.terminate()
        assert serving.wait() == 0


def test_vllm_that_never_answers_is_given_up(folder: Path) -> None:
    with Serving(folder, "--ready-deadline", "2s", "--", "--never") as serving:
        assert serving.wait() == 1
    assert "vLLM was not ready within 2 s; raise --ready-deadline" in serving.log.read_text()


def test_a_service_manager_hears_of_this_process_alone(folder: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        with Serving(folder, env={"NOTIFY_SOCKET": str(tmp_path / "notify")}) as serving:
            serving.until("serving ")
            assert manager.recv(100) == b"READY=1"
            serving.process.terminate()
            assert serving.wait() == 0
            assert manager.recv(100) == b"STOPPING=1"
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.recv(100)


def test_a_signal_while_it_starts(folder: Path) -> None:
    with Serving(folder, "--", "--never") as serving:
        serving.until("engine ")
        serving.process.terminate()
        assert serving.wait() == 0


def test_a_daemon_that_cannot_start_is_its_one_line(folder: Path) -> None:
    with Serving(folder, "--set", "ram.slot=1MiB") as serving:
        assert serving.wait() == 2
    assert serving.log.read_text().count("\n") == 1
    assert "ram.size = 1.0 MiB holds 1 blocks" in serving.log.read_text()


def test_a_named_daemon_that_runs_is_used_and_left_alone(folder: Path, runtime: Path) -> None:
    path = folder / "s"
    with Running(path) as daemon:
        with Serving(folder, "--set", f"daemon.socket={path}") as serving:
            serving.ready()
            assert daemons(runtime) == []
            serving.process.terminate()
            assert serving.wait() == 0
        assert daemon.status()["pid"] == daemon.process.pid


def test_the_api_key_reaches_vllm_and_no_command_line(folder: Path) -> None:
    with Serving(folder, env={"TIERCEL_API_KEY": "sk-secret"}) as serving:
        said = serving.until("engine ").split()
        assert said[2:] == ["key", "sk-secret"]
        assert b"sk-secret" not in Path(f"/proc/{said[1]}/cmdline").read_bytes()
        serving.ready()
        serving.process.terminate()
        assert serving.wait() == 0


# Commands and refusals: nothing is started.


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_command, "find_spec", lambda name: True)
    monkeypatch.setattr(serve_vllm, "version", lambda names=(): "0.32.1")


@pytest.mark.usefixtures("installed")
def test_the_commands_are_printed_and_nothing_runs(
    folder: Path, runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--port", "0", "--name", "m m", "--ram", "3GiB", "--log-format", "json", "--print-command"]
    settings = ["--set", "store.load_deadline=2s", "--set", "model.dtype=float16"]
    args = [*options, *settings, "--", "--max-model-len", "2048", "--port-like=1"]
    assert cli.run(["serve", str(folder), *args]) == 0
    daemon, engine = map(shlex.split, capsys.readouterr().out.splitlines())
    assert daemon[1:4] == ["-m", "tiercel", "daemon"]
    assert daemon[6:8] == ["--log-format", "json"]
    assert daemon[8:] == ["--set", "store.load_deadline=2s", "--set", "ram.size=3GiB"]
    transfer = json.loads(engine[engine.index("--kv-transfer-config") + 1])
    assert transfer == {
        "kv_connector": "TiercelConnector",
        "kv_connector_module_path": "tiercel.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"daemon.socket": daemon[5], "store.load_deadline": "2s"},
    }
    assert engine[-3:] == ["--max-model-len", "2048", "--port-like=1"]
    assert "--served-model-name m m --dtype float16" in " ".join(engine)
    assert Path(daemon[5]).parent == runtime / "tiercel"
    assert not Path(daemon[5]).exists()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--", "--port", "1"], "-- --port: is set by tiercel; accepted: --port"),
        (["--", "--port=1"], "-- --port=1: is set by tiercel; accepted: --port"),
        (["--", "--kv_transfer_config", "{}"], "accepted: the settings of tiercel"),
        (["--", "--kv-transfer-config.kv_connector=X"], "accepted: the settings of tiercel"),
        (["--ready-deadline", "soon"], "soon"),
        (["--otlp-traces-endpoint", "http://127.0.0.1:4318"], "vLLM sends its own spans; accepted after --"),
        (["--engine", "transformers", "--", "--max-model-len", "5"], "-- --max-model-len 5: is for vLLM"),
        (["--engine", "transformers", "--print-command"], "--print-command: is for vLLM"),
        (["--engine", "sglang"], "'sglang' is not one of"),
        (["--set", "ram.sise=1GiB"], "did you mean 'ram.size'?"),
    ],
)
def test_what_cannot_be_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    assert cli.run(["serve", str(folder), "--port", "0", *args]) == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1


def test_a_model_folder_that_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_command, "find_spec", lambda name: True)
    monkeypatch.setattr(serve_vllm, "version", lambda names=(): "0.32.1")
    assert cli.run(["serve", "/no/such/model", "--port", "0"]) == 2
    assert capsys.readouterr().err == "tiercel: error: model folder /no/such/model does not exist\n"


def test_a_vllm_that_is_not_supported_or_not_there(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_command, "find_spec", lambda name: None)
    assert cli.run(["serve", str(folder), "--engine", "vllm"]) == 2
    assert "vllm not installed; accepted: pip install 'tiercel[vllm]'" in capsys.readouterr().err
    monkeypatch.setattr(serve_command, "find_spec", lambda name: True)
    monkeypatch.setattr(serve_vllm, "version", lambda names=(): "0.11.2")
    assert cli.run(["serve", str(folder)]) == 2
    assert "vLLM 0.11.2 is not supported; accepted are 0.32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "flags", "has_vllm", "engine"),
    [
        (True, (), True, "vllm"),
        (True, (), False, "transformers"),
        (False, (), True, "transformers"),
        (False, ("--max-model-len", "5"), True, "vllm"),
        (False, (), False, "transformers"),
    ],
)
def test_which_engine_auto_is(
    monkeypatch: pytest.MonkeyPatch, model: bool, flags: tuple[str, ...], has_vllm: bool, engine: str
) -> None:
    """Without a model it is the demo, which our own engine shows in seconds."""
    monkeypatch.setattr(serve_command, "find_spec", lambda name: True if has_vllm else None)
    assert serve_command.chosen_engine("auto", Path("m") if model else None, flags) == engine


@pytest.mark.usefixtures("installed")
def test_settings_of_the_other_engine_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--port", "0", "--set", "serve.queue_requests=3", "--print-command"]
    assert cli.run(["serve", str(folder), *args]) == 0
    assert (
        "for the transformers engine, without effect here: serve.queue_requests;" in capsys.readouterr().err
    )


def test_a_port_that_is_taken(folder: Path) -> None:
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = tiercel("serve", str(folder), "--engine", "vllm", "--port", str(port))
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in done.stderr
