"""Daemons and clients as real processes: started, stopped, killed, paused. Nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.store.support import PAYLOAD

from tiercel.config import Config
from tiercel.service import RemoteStore, connect

ROOT = Path(__file__).parents[2]
READY_S = 60.0


def environ(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **(extra or {})}


class Running:
    """`tiercel daemon` on `path`; ready when made. `disk` adds a files tier."""

    def __init__(
        self,
        path: Path,
        *settings: str,
        disk: Path | None = None,
        disk_size: str = "100MiB",
        args: Sequence[str] = (),
        before: Sequence[str] = (),
        preexec: Callable[[], None] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self.log = path.with_suffix(".stderr")
        pairs = [f"ram.size={1 << 20}B", *settings]
        if disk is not None:
            pairs += [f"tiers.0.path={disk}", f"tiers.0.size={disk_size}"]
        self.settings = dict(pair.split("=", 1) for pair in pairs)
        command = [*before, sys.executable, "-m", "tiercel", "daemon", "--socket", str(path), *args]
        for name, value in self.settings.items():
            command += ["--set", f"{name}={value}"]
        with self.log.open("ab") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, env=environ(env), preexec_fn=preexec
            )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().decode()
        assert self.said.startswith(f"serving on {path}"), self.log.read_text()

    def connect(self, payload_bytes: int = PAYLOAD) -> RemoteStore:
        return connect(Config.load(None, {}, {"daemon.socket": str(self.path)}), payload_bytes)

    def status(self) -> dict[str, Any]:
        """`tiercel daemon status --json`."""
        done = tiercel("daemon", "--socket", str(self.path), "status", "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            # It stops when it is scheduled next; until all its threads have, it may still answer.
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(READY_S)

    def end(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.terminate()
        return self.process.wait(READY_S)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()


def tiercel(*args: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tiercel", *args],
        capture_output=True, text=True, timeout=READY_S, check=False, env=environ(env),
    )  # fmt: skip


class Script:
    """A Python script in a process of its own, whose lines of output are read one by one."""

    def __init__(self, source: str, *args: str, env: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", source, *args],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environ(env),
        )  # fmt: skip

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the script ended without a word"
        return line.rstrip("\n")

    def go(self) -> None:
        """End its input: the sign to go on."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(READY_S)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
