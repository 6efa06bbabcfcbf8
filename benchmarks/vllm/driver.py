"""Start and stop the processes of the bench, and talk to an engine. Every wait has an end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

START_S = 300.0
ANSWER_S = 300.0
STOP_S = 60.0


class ArmFailed(Exception):
    """A process of an arm died or did not answer; the arm is left out and the page says so."""


class Child:
    """A process in a session of its own, its output in a log; `stop` also ends whatever it started."""

    def __init__(
        self, name: str, call: Sequence[str], env: Mapping[str, str], log: Path, *, piped: bool = False
    ) -> None:
        self.name = name
        self.log = log
        pipe = subprocess.PIPE if piped else None
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                list(call),
                env={**os.environ, **env},
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or sink,
                stderr=sink,
                text=True,
                start_new_session=True,
            )

    def alive(self) -> bool:
        return self.process.poll() is None

    def failed(self, what: str) -> ArmFailed:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines if "Error" in line] or lines
        return ArmFailed(f"{self.name}: {what}; {errors[-1][-300:] if errors else 'no output'}")

    def wait_until(self, ready: Callable[[], bool]) -> None:
        until = time.monotonic() + START_S
        while not ready():
            if not self.alive():
                raise self.failed(f"ended with {self.process.returncode} before it was ready")
            if time.monotonic() > until:
                raise self.failed(f"not ready within {START_S:.0f} s")
            time.sleep(0.1)

    def memory_bytes(self) -> int:
        """Resident memory of the process and its children; what several share is divided among them."""
        total = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            for one in (parent, *parent.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += one.memory_full_info().pss
        return total

    def cpu_seconds(self) -> float:
        """Processor time used so far by the process and its living children."""
        total = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            for one in (parent, *parent.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = one.cpu_times()
                    total += times.user + times.system
        return total

    def stop(self) -> None:
        if self.process.stdin:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        elif self.alive():
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_S)


class EngineProcess(Child):
    """The engine of one arm: `ask` blocks for the answer."""

    def __init__(
        self, name: str, python: Path, options: dict[str, Any], env: Mapping[str, str], log: Path
    ) -> None:
        call = [str(python), "-m", "benchmarks.vllm.engine", json.dumps(options)]
        super().__init__(name, call, env, log, piped=True)
        self.answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_ready(self) -> float:
        return float(self._answer(START_S)["ready_s"])

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise self.failed("gone") from error
        return self._answer(ANSWER_S)

    def _answer(self, deadline_s: float) -> dict[str, Any]:
        try:
            line = self.answers.get(timeout=deadline_s)
        except queue.Empty:
            raise self.failed(f"no answer within {deadline_s:.0f} s") from None
        if not line:
            raise self.failed("ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def drop_page_cache(folder: Path) -> None:
    """Write the files of a folder out and drop them from the page cache."""
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)
