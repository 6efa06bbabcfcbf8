"""`tiercel serve --engine vllm` for real: what one server has read the next one has from disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.engines.vllm.driver import ENVIRON
from tests.service.running import environ, tiercel
from tests.store.support import eventually

pytestmark = pytest.mark.model
START_S = 400.0


class Serving:
    """A server of the demo model; made once it takes requests."""

    told: Any = None

    def __init__(self, model: Path, folder: Path) -> None:
        command = [
            sys.executable, "-m", "tiercel", "serve", str(model), "--engine", "vllm", "--port", "0",
            "--name", "demo", "--ram", "500MiB", "--disk", str(folder / "kv"), "--disk-size", "1GiB",
            "--set", f"daemon.socket={folder / 's'}", "--", "--max-model-len", "2048", "--enforce-eager",
        ]  # fmt: skip
        self.socket = folder / "s"
        with (folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environ(ENVIRON)
            )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("serving demo (vLLM "):
                self.url = line.rpartition(" at ")[2].strip()
                return
        raise AssertionError((folder / "log").read_text())

    def complete(self, prompt: str, **hints: object) -> str:
        """The answer; what the server tells of its decision is kept as `told`."""
        asked = {"model": "demo", "prompt": prompt, "max_tokens": 12, "temperature": 0}
        params = {"kv_transfer_params": {"tiercel": hints}} if hints else {}
        answer = httpx.post(f"{self.url}/completions", json=asked | params, timeout=120).json()
        self.told = answer.get("kv_transfer_params")
        return str(answer["choices"][0]["text"])

    def steer(self, action: str, session: str) -> dict[str, Any]:
        done = tiercel("cache", action, "--session", session, "--socket", str(self.socket), "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def counters(self) -> dict[str, Any]:
        said = tiercel("daemon", "--socket", str(self.socket), "status", "--json").stdout
        return dict(json.loads(said)["stats"]["counters"])

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stdout is not None
        self.process.stdout.read()
        code = self.process.wait(120)
        self.process.stdout.close()
        return code


@pytest.mark.timeout(2 * START_S)
def test_the_next_server_has_it_from_disk(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("s")
    prompt = (Path(__file__).parents[3] / "LICENSE").read_text()[:6000]
    first = Serving(model_dir, folder)
    try:
        answer = first.complete(prompt)
        assert not first.told
        assert first.complete(prompt, session="agent-7", explain=True, no_such_hint=1) == answer
        assert first.told["tiercel"]["outcome"] == "answered"
        assert eventually(lambda: first.counters()["stored"] > 5)
        paused = first.steer("demote", "agent-7")
        assert 5 < paused["done"] <= paused["blocks"]
        assert first.steer("prefetch", "agent-7")["done"] >= paused["done"]
    finally:
        assert first.end() == 0
    assert not first.socket.exists()
    assert list((folder / "kv").rglob("*.kv"))
    second = Serving(model_dir, folder)
    try:
        assert second.complete(prompt, explain=True) == answer
        assert second.told["tiercel"]["loaded"]["disk"] > 5
        counters = second.counters()
        assert (counters["loaded"].get("disk", 0) > 5, counters["stored"]) == (True, 0)
    finally:
        assert second.end() == 0
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert os.fspath(folder) not in left, "no process is left"
