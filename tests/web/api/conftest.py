"""A stub engine for what must be quick or go wrong, and real servers in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("starlette")

from starlette.testclient import TestClient

from tiercel.blocks import Chain, Identity
from tiercel.blocks import Scope as KeyScope
from tiercel.config import ServeConfig
from tiercel.engines.transformers import Delta, Event, Request, Result, Timing
from tiercel.errors import RequestError
from tiercel.store import Hit, StoreCounters, StoreStats
from tiercel.store.policy import Decision
from tiercel.store.reports import Reports
from tiercel.store.sessions import Sessions
from tiercel.web.api.app import make_app
from tiercel.web.api.completions import Service
from tiercel.web.api.engine import Loaded, ModelFacts

NAME = "stub"
CONTEXT = 64
VOCAB = 100


@dataclass
class StubEngine:
    """Says "word " for every token it may. `go` holds it before its second token, `fault` is raised there."""

    block_tokens: int = 4
    go: threading.Event = field(default_factory=threading.Event)
    fault: Exception | None = None
    requests: list[Request] = field(default_factory=list, repr=False)
    closed: int = 0
    store: StubStore = field(default_factory=lambda: StubStore())

    def chain(self, tokens: Sequence[int], salt: str | None = None) -> Chain:
        return KeyScope(Identity("stub", "1", "bf16", b"g", "layout/1", self.block_tokens), salt=salt).chain(
            tokens
        )

    def explain(self, tokens: Sequence[int], *, salt: str | None = None) -> Decision:
        return Decision(prompt_tokens=len(tokens), block_tokens=self.block_tokens, reason="a stub knows none")

    def encode(self, text: str) -> list[int]:
        return [ord(one) % VOCAB for one in text]

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if messages[0]["content"] == "refuse this":
            raise RequestError("the model's chat template refuses these messages")
        return [ord(one) % VOCAB for message in messages for one in message["role"] + message["content"]]

    def batch(self) -> StubBatch:
        return StubBatch(self)

    def generate(self, request: Request) -> Generator[Event, None, None]:
        count = min(request.max_new_tokens, 3)
        try:
            for at in range(count):
                if at == 1 or count == 1:
                    self.go.wait(10)
                    if self.fault is not None:
                        raise self.fault
                told = replace(self.explain(request.tokens), reused_tokens={"ram": 4})
                decision = self.store.report(told) if at == 0 else None
                yield Delta(7, "word ", "length" if at + 1 == count else None, 4, decision)
            yield Result(
                (7,) * count, "word " * count, "length", len(request.tokens), 4, 0,
                Timing(0, 0, 0, 0, 0, 0, 0), {"ram": 1},
            )  # fmt: skip
        finally:
            self.closed += 1


@dataclass
class StubBatch:
    """Answers one request at a time."""

    engine: StubEngine
    size: int = 1
    answers: list[Generator[Event, None, None]] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return bool(self.answers)

    def admit(self, request: Request, stop: Callable[[], bool]) -> Generator[Event, None, None]:
        self.engine.requests.append(request)
        self.answers.append(self.engine.generate(request))
        return self.answers[-1]

    def step(self) -> list[tuple[Generator[Event, None, None], Event | Exception]]:
        try:
            return [(one, next(one)) for one in self.answers]
        except Exception as fault:  # noqa: BLE001  # as the real one does
            return [(self.answers[0], fault)]

    def drop(self, member: Generator[Event, None, None]) -> None:
        self.answers.remove(member)
        member.close()


class StubStore:
    """Notes what it is asked to do with how many blocks, and does it with all of them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.reports = Reports()
        self.sessions = Sessions()

    def report(self, decision: Decision) -> Decision:
        return self.reports.add(decision)

    def decisions(self, limit: int = 256) -> list[Decision]:
        return self.reports.latest(limit)

    def lookup(self, chain: Chain, deadline_s: float = 0.05) -> Hit:
        return Hit(("ram",) * len(chain))

    def prefetch(self, chain: Chain, deadline_s: float = 10.0) -> Future[int]:
        done: Future[int] = Future()
        done.set_result(self._noted("prefetch", chain))
        return done

    def pin(self, chain: Chain, ttl_s: float) -> int:
        return self._noted(f"pin {ttl_s:g}", chain)

    def unpin(self, chain: Chain) -> None:
        self._noted("unpin", chain)

    def demote(self, chain: Chain, deadline_s: float = 10.0) -> int:
        return self._noted("demote", chain)

    def drop(self, chain: Chain, deadline_s: float = 10.0) -> int:
        return self._noted("drop", chain)

    def _noted(self, what: str, chain: Chain) -> int:
        self.calls.append((what, len(chain)))
        return len(chain)

    def stats(self) -> StoreStats:
        return StoreStats(
            slots=2, slot_bytes=1, slots_free=1, ram_blocks=1, ram_evictions=0, leases=0, pins=0,
            counters=StoreCounters(), tiers=(), requests=self.reports.totals(),
        )  # fmt: skip

    def flush(self, deadline_s: float = 30.0) -> bool:
        return True

    def close(self, deadline_s: float = 30.0) -> bool:
        return True


@dataclass(repr=False)
class Stub:
    """An application on a stub engine, and a client for it."""

    engine: StubEngine
    service: Service
    client: TestClient
    store: StubStore

    def post(self, body: Any, path: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)


@pytest.fixture(scope="module")
def make_stub() -> Iterator[Callable[..., Stub]]:
    """A function (limits, facts, api key) -> `Stub`."""
    clients: list[TestClient] = []

    def make(limits: ServeConfig | None = None, *, api_key: str | None = None, **facts: Any) -> Stub:
        engine = StubEngine()
        engine.go.set()
        told: dict[str, Any] = {
            "name": NAME, "fingerprint": "fp_0", "context_tokens": CONTEXT, "vocab_tokens": VOCAB,
            "has_tokenizer": True, "chats": True, "running_on": "nothing",
        }  # fmt: skip
        store = engine.store
        service = Service(Loaded(engine, store, ModelFacts(**told | facts)), limits or ServeConfig())
        client = TestClient(make_app(service, api_key), raise_server_exceptions=False)
        clients.append(client.__enter__())
        return Stub(engine, service, client, store)

    yield make
    for client in clients:
        client.__exit__(None, None, None)


class ServerProcess:
    """`tiercel serve` in a process of its own, made once it takes requests."""

    def __init__(self, *args: str, log: Path, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        clean = {name: value for name, value in os.environ.items() if name != "TIERCEL_API_KEY"}
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tiercel", "serve", "--engine", "transformers", "--port", "0", *args],
                stdout=subprocess.PIPE, stderr=errors, text=True, env=clean | dict(env or {}),
            )  # fmt: skip
        self.said: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.rstrip())
            if line.startswith("serving "):
                break
        else:
            self.__exit__()
            pytest.fail(f"the server did not start: {log.read_text()}")
        self.url = self.said[-1].split(" at ")[1].split("/v1")[0].replace("0.0.0.0", "127.0.0.1")

    def figures(self) -> dict[str, float]:
        """/metrics as a dictionary of series."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    def health(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/health").json())

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave no process behind when a test fails."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def end(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)
