"""Servers that `tiercel bench` starts: `tiercel serve` with its store and without, `vllm serve` alone.

Each is in a session of its own, with its output in a log; whatever happens, it ends with the run. Our own
engine does nothing while nobody asks, so both sides stay. An idle vLLM takes most of a GPU: one at a time.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import click

from tiercel.bench.figures import of_daemon
from tiercel.bench.run import Server
from tiercel.bench.sides import WITHOUT_STORE
from tiercel.bench.spec import Spec
from tiercel.bench.stop import Stop
from tiercel.blocks import record_bytes
from tiercel.cli import serve_vllm
from tiercel.cli.children import Child
from tiercel.config import Config, RamConfig, TierConfig, human_bytes, writable_cache_dir
from tiercel.config.export import exported
from tiercel.config.schema import MIB
from tiercel.config.sources import API_KEY_VARIABLE
from tiercel.errors import ConfigError, GeometryError
from tiercel.geometry import KVGeometry
from tiercel.web.listening import bind

HOST = "127.0.0.1"
_GRACE_S = 20.0
# Of a RAM tier that is to be small: enough to load through.
_RESERVED = 2
_LAST_LINE_BYTES = 4096
_CommandAt = Callable[[int], Sequence[str]]


class StartedSide:
    """A side whose server is started for its turn; one that is not `resident` ends for another's."""

    def __init__(
        self,
        name: str,
        what: str,
        command: _CommandAt,
        environ: Mapping[str, str],
        *,
        log: Path,
        ready_deadline_s: float,
        stop: Stop,
        extra: Mapping[str, Any] | None = None,
        socket: Path | None = None,
        token_bytes: int | None = None,
        resident: bool = True,
    ) -> None:
        self.name, self.what, self.token_bytes, self.resident = name, what, token_bytes, resident
        self._command, self._environ, self._extra = command, environ, extra or {}
        self._log, self._deadline_s, self._stop, self._socket = log, ready_deadline_s, stop, socket
        self.failed = False
        self._child: Child | None = None
        self._sink: IO[bytes] | None = None

    def begin(self) -> Server:
        """Start it and wait until it takes requests. Raises ConfigError with its last line if it does not."""
        with bind(HOST, 0) as bound:
            port = int(bound.getsockname()[1])
        self._sink = self._log.open("ab")
        child = self._child = Child(self._command(port), self._environ, log=self._sink)
        url = f"http://{HOST}:{port}"
        until_s = time.monotonic() + self._deadline_s
        while not serve_vllm.healthy(url):
            if self._stop.wait(0.2):
                raise ConfigError("interrupted while a server was starting")
            if died := self._died(child):
                raise ConfigError(f"the server for '{self.name}' {died}")
            if time.monotonic() > until_s:
                self.failed = True
                raise ConfigError(
                    f"the server for '{self.name}' was not ready within {self._deadline_s:g} s; raise "
                    "--ready-deadline if it needs longer"
                )
        count = None if self._socket is None else lambda socket=self._socket: of_daemon(socket)
        return Server(url, self._extra, lambda: [child.process.pid], lambda: self._died(child), count)

    def end(self) -> None:
        """End it, if it runs."""
        if self._child is not None:
            self._child.stop(_GRACE_S, lambda: False)
            self._child = None
        if self._sink is not None:
            self._sink.close()
            self._sink = None

    def _died(self, child: Child) -> str:
        if (code := child.exit_code) is None:
            return ""
        self.failed = True
        last = _last_line(self._log)
        return f"ended with exit code {code}" + (f": {last}" if last else "")


def _last_line(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST_LINE_BYTES))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].removeprefix("tiercel: error: ") if lines else ""


class Servers:
    """The two sides of a model, and the directory for their logs and blocks. Use it as a context."""

    def __init__(
        self,
        model: Path,
        engine: str,
        config: Config,
        *,
        flags: Sequence[str],
        specs: Sequence[Spec],
        ready_deadline_s: float,
        stop: Stop,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tiercel-bench-"))
        self._blocks: Path | None = None
        self.notes: list[str] = []
        self.sides: list[StartedSide] = []
        self._engine = engine
        self._model, self._flags, self._stop, self._deadline_s = model, tuple(flags), stop, ready_deadline_s
        with ExitStack() as undo:
            undo.callback(self.close)
            config = self._sized(config, specs)
            self.sides = self._vllm(config) if engine == "vllm" else self._transformers(config)
            undo.pop_all()

    def close(self) -> None:
        """Remove blocks and logs; logs of a server that failed stay, and it is said where."""
        if self._blocks is not None:
            shutil.rmtree(self._blocks, ignore_errors=True)
        if any(side.failed for side in self.sides):
            click.echo(f"tiercel: logs of the servers: {self.folder}", err=True)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _sized(self, config: Config, specs: Sequence[Spec]) -> Config:
        """For `overflow`, where nobody said how much memory there is: RAM for half of it, disk for all."""
        spec = next((one for one in specs if one.workload == "overflow"), None)
        if spec is None or config.tiers or "ram.size" in config.origins:
            return config
        token_bytes = self._token_bytes(config)
        if token_bytes is None:
            self.notes.append(
                f"overflow: the size of {self._model}'s KV is not known; give --ram to limit memory"
            )
            return config
        need = int((spec.sessions or 1) * spec.tokens_longest * token_bytes)
        least = self._slots(config, _RESERVED + 2)
        ram = RamConfig(size_bytes=max(need // 2, least), kind=config.ram.kind, reserved_slots=_RESERVED)
        # Not in the temporary directory, which is memory on many hosts.
        self._blocks = Path(tempfile.mkdtemp(prefix="bench-", dir=writable_cache_dir()))
        disk = TierConfig(path=self._blocks, size_bytes=4 * need * spec.rounds + 64 * MIB)
        self.notes.append(
            f"overflow: the sessions of a round need about {human_bytes(need)} of KV; RAM tier "
            f"{human_bytes(ram.size_bytes)}, the rest on disk in {self._blocks.parent}"
        )
        return dataclasses.replace(config, ram=ram, tiers=(disk,))

    def _token_bytes(self, config: Config) -> int | None:
        """What a token's KV weighs; None for a model that is no folder here."""
        dtype = "bfloat16" if config.model.dtype == "auto" else config.model.dtype
        try:
            return KVGeometry.from_config(self._model).bytes_per_token(dtype)
        except GeometryError:
            return None

    def _slots(self, config: Config, count: int) -> int:
        """Bytes for so many blocks in the widest number format."""
        token_bytes = KVGeometry.from_config(self._model).bytes_per_token("float32")
        return count * record_bytes(int(token_bytes * config.model.block_tokens)) + MIB

    def _transformers(self, config: Config) -> list[StartedSide]:
        # The same engine, block by block, whose requests say to go without the store; it is kept tiny.
        tiny = RamConfig(size_bytes=self._slots(config, 3), reserved_slots=1)
        off = dataclasses.replace(config, ram=tiny, tiers=())

        def command(port: int) -> list[str]:
            start = [sys.executable, "-m", "tiercel", "serve", str(self._model), "--engine", "transformers"]
            return [*start, "--host", HOST, "--port", str(port)]

        return [
            self._side("on", f"tiercel serve, transformers engine, {_places(config)}", command, config),
            self._side(
                "off", "tiercel serve, transformers engine, nothing stored or loaded", command, off,
                extra=WITHOUT_STORE,
            ),
        ]  # fmt: skip

    def _vllm(self, config: Config) -> list[StartedSide]:
        socket = self.folder / "daemon.sock"
        config = dataclasses.replace(
            config, daemon=dataclasses.replace(config.daemon, socket=socket), origins=dict(config.origins)
        )
        served = dataclasses.replace(config, serve=dataclasses.replace(config.serve, host=HOST))

        def with_tiercel(port: int) -> list[str]:
            start = [sys.executable, "-m", "tiercel", "serve", str(self._model), "--engine", "vllm"]
            until = ["--ready-deadline", f"{self._deadline_s:g}s"]
            return [*start, "--host", HOST, "--port", str(port), *until, "--", *self._flags]

        def alone(port: int) -> list[str]:
            words = list(serve_vllm.plan(served, str(self._model), None, port, (), self._flags).engine)
            at = words.index("--kv-transfer-config")
            return words[:at] + words[at + 2 :]

        version = serve_vllm.version()
        return [
            self._side(
                "on", f"vLLM {version} with Tiercel, {_places(config)}", with_tiercel, config, socket=socket
            ),
            self._side("off", f"vLLM {version} alone, with its own prefix cache", alone, config),
        ]

    def _side(
        self,
        name: str,
        what: str,
        command: _CommandAt,
        config: Config,
        *,
        extra: Mapping[str, Any] | None = None,
        socket: Path | None = None,
    ) -> StartedSide:
        environ = exported(config)
        if key := os.environ.get(API_KEY_VARIABLE):
            environ[serve_vllm.VLLM_KEY_VARIABLE] = key
        return StartedSide(
            name, what, command, environ, log=self.folder / f"{name}.log",
            ready_deadline_s=self._deadline_s, stop=self._stop, extra=extra, socket=socket,
            token_bytes=self._token_bytes(config), resident=self._engine != "vllm",
        )  # fmt: skip


def _places(config: Config) -> str:
    """The tiers, in words; no path and no address."""
    tiers = [f"RAM {human_bytes(config.ram.size_bytes)}"]
    for tier in config.tiers:
        kind = "disk" if tier.kind == "files" else tier.kind
        tiers.append(kind if tier.size_bytes is None else f"{kind} {human_bytes(tier.size_bytes)}")
    return ", ".join(tiers)
