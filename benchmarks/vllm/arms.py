"""What is compared: an arm is one engine with its cache server, frozen while another is measured.

An idle vLLM keeps a fifth of a core busy, and all engines of a sitting are alive at once, so whoever is not
being measured is stopped by signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.vllm.driver import ArmFailed, EngineProcess
from benchmarks.vllm.servers import Example, LMCacheServer, TiercelDaemon

SETTLE_S = 0.3
# The same threads for every arm: told nothing, vLLM keeps one core more for itself when a connector is set.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "WARNING",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Where the arms of a run live and what they have in common."""

    folder: Path
    model: Path
    lmcache: Path | None
    ram_gib: int
    # Of the arms that read from disk: less than what is read between two uses of a prompt.
    small_ram_mib: int
    max_model_len: int = 8192

    def engine_options(self, connector: dict[str, Any] | None) -> dict[str, Any]:
        options = {
            "model": str(self.model),
            "dtype": "bfloat16",
            "enforce_eager": True,
            "max_model_len": self.max_model_len,
            "seed": 0,
        }
        return options | ({"kv_transfer_config": connector} if connector else {})


@dataclass(slots=True, kw_only=True)
class Arm:
    """One contestant. `failed` says why it is out, once it is."""

    name: str
    setup: Setup
    server: LMCacheServer | TiercelDaemon | Example | None = None
    engine: EngineProcess | None = None
    failed: str | None = None
    ready_s: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def caches(self) -> bool:
        return self.server is not None

    def start(self) -> None:
        """Start the server, if it has one, then the engine; then leave both frozen."""
        with self.guarded():
            if self.name.startswith("lmcache"):
                assert self.setup.lmcache
                files = self.name == "lmcache-files"
                ram = 1 if files else self.setup.ram_gib
                self.server = LMCacheServer(
                    self.setup.lmcache, self.setup.folder, self.name, ram, files=files
                )
            elif self.name.startswith("tiercel"):
                files = self.name == "tiercel-files"
                ram_text = f"{self.setup.small_ram_mib}MiB" if files else f"{self.setup.ram_gib}GiB"
                self.server = TiercelDaemon(self.setup.folder, self.name, ram_text, files=files)
            elif self.name == "example":
                self.server = Example(self.setup.folder)
            self.start_engine()

    def start_engine(self) -> None:
        python = self.setup.lmcache if self.name.startswith("lmcache") else Path(sys.executable)
        assert python
        options = self.setup.engine_options(self.server.connector() if self.server else None)
        log = self.setup.folder / f"{self.name}-engine.log"
        self.engine = EngineProcess(self.name, python, options, ENVIRONMENT, log)
        self.ready_s = self.engine.wait_ready()
        self.freeze()

    def restart_engine(self) -> None:
        """A new engine process on the same server."""
        with self.guarded():
            self._signal(signal.SIGCONT)
            if self.engine:
                self.engine.stop()
            self.start_engine()

    @contextlib.contextmanager
    def awake(self) -> Iterator[EngineProcess]:
        """The arm runs, alone, within this block; what it still has to do afterwards gets a moment."""
        assert self.engine
        self._signal(signal.SIGCONT)
        try:
            yield self.engine
            time.sleep(SETTLE_S)
        finally:
            self.freeze()

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn a failure into a note and leave the arm out from then on."""
        try:
            yield
        except ArmFailed as fault:
            self.failed = str(fault)
            print(f"left out: {fault}", file=sys.stderr, flush=True)
            self.stop()

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def stop(self) -> None:
        self._signal(signal.SIGCONT)
        if self.engine:
            self.engine.stop()
        if self.server:
            self.server.stop()
        self.engine = self.server = None

    def measure_memory(self) -> None:
        if self.engine:
            server = self.server.child if self.server else None
            self.memory = {
                "engine_bytes": self.engine.memory_bytes(),
                "server_bytes": server.memory_bytes() if server else 0,
            }

    def _signal(self, number: signal.Signals) -> None:
        """The server wakes before its engine and sleeps after it."""
        server = self.server.child if self.server else None
        both = [server, self.engine] if number == signal.SIGCONT else [self.engine, server]
        for child in both:
            if child:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.process.pid, number)
