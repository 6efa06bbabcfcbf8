"""Requests that are answered together: they overlap, leave each other alone, and each ends for itself."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tiercel.config import ServeConfig
from tiercel.engines.transformers import Delta, Event, Request, TransformersEngine
from tiercel.engines.transformers.answer import Answer
from tiercel.store import TieredStore
from tiercel.web.api.app import make_app
from tiercel.web.api.completions import Service
from tiercel.web.api.engine import Batch, Loaded
from tiercel.web.listening import bind
from tiercel.web.serving import served

from .test_app import until
from .test_bodies import PLAIN
from .tiny import BLOCK, FACTS, tiny_engine, write_tiny

SIZE = 3
# Of different lengths, two with a common beginning, one sampled.
BODIES: list[dict[str, Any]] = [
    {"prompt": [3 + at % 90 for at in range(2 * BLOCK + 5)], "max_tokens": 20, "temperature": 0},
    {"prompt": [9, 8, 7], "max_tokens": 31, "temperature": 0},
    {"prompt": [3 + at % 90 for at in range(4 * BLOCK)], "max_tokens": 25, "temperature": 1, "seed": 5},
    {"prompt": [50 - at % 40 for at in range(BLOCK)], "max_tokens": 2, "temperature": 0},
    {"prompt": [60 + at % 30 for at in range(3 * BLOCK + 1)], "max_tokens": 17, "temperature": 0},
]


class Words:
    """A tokenizer whose text tells every token."""

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return "".join(f"{one}." for one in ids)


@dataclass
class Gate:
    """A batch that steps only when it may, and keeps what came of every step."""

    batch: Batch
    steps: list[Sequence[tuple[Any, Event | BaseException]]] = field(default_factory=list)
    fault: Exception | None = None
    _may: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _open: bool = False
    _done: int = 0

    @property
    def size(self) -> int:
        return self.batch.size

    @property
    def full(self) -> bool:
        return self.batch.full

    def admit(self, request: Request, stop: Callable[[], bool]) -> Any:
        return self.batch.admit(request, stop)

    def drop(self, member: Any) -> None:
        self.batch.drop(member)

    def step(self) -> Sequence[tuple[Any, Event | BaseException]]:
        assert self._may.acquire(timeout=20), "nobody let it step for 20 s"
        if self._open:
            self._may.release()
        try:
            if self.fault is not None:
                raise self.fault
            told = list(self.batch.step())
            self.steps.append(told)
            return told
        finally:
            self.fault = None
            self._done += 1

    def let(self, steps: int) -> None:
        """Allow so many more, and wait until they are taken."""
        done = self._done + steps
        self._may.release(steps)
        until(lambda: self._done == done)

    def open(self) -> None:
        """Allow all."""
        self._open = True
        self._may.release()


@dataclass
class Together:
    """A server whose batch stands behind a gate."""

    url: str
    service: Service
    engine: TransformersEngine
    store: TieredStore
    gate: Gate
    threads: ThreadPoolExecutor

    def post(self, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}{PLAIN}", json=body, timeout=60)

    def ask(self, body: dict[str, Any], depth: tuple[int, int]) -> Any:
        """Post from another thread; returns the answer to come, once so many wait and run."""
        answer = self.threads.submit(self.post, body)
        self.depth_is(*depth)
        return answer

    def depth_is(self, waiting: int, running: int) -> None:
        """Wait until it is. Whoever waits has more than a place: its turn may come."""
        figure = self.service.metrics.registry.get_sample_value
        until(
            lambda: (
                self.service.queue.depth == (waiting, running)
                and figure("tiercel_http_queue_requests") == waiting
            )
        )

    def figure(self, series: str) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return float(next(one for one in lines if one.startswith(f"{series} ")).rsplit(" ", 1)[1])

    def cut(self, reason: str) -> float:
        return self.figure(f'tiercel_http_cut_requests_total{{reason="{reason}"}}')

    def send(self, body: dict[str, Any]) -> socket.socket:
        """Ask and hear nothing; to leave, close it."""
        host, port = self.url.removeprefix("http://").split(":")
        raw = json.dumps(body).encode()
        head = f"POST {PLAIN} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection((host, int(port)), timeout=20)
        connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        return connection

    def leaves_nothing(self) -> None:
        """Nobody is left, nothing held; and the next request is answered."""
        self.gate.open()
        self.depth_is(0, 0)
        assert self.store.stats().leases == 0
        assert self.post(BODIES[3]).status_code == 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return folder


@contextmanager
def together(model: Path, size: int, **limits: Any) -> Iterator[Together]:
    with tiny_engine(model, batch=size) as (engine, store):
        object.__setattr__(engine.model, "tokenizer", Words())
        gate = Gate(engine.batch())
        engine.batch = lambda: gate  # type: ignore[method-assign,assignment,return-value]
        service = Service(Loaded(engine, store, FACTS), ServeConfig(**limits))
        with (
            ThreadPoolExecutor(8) as threads,
            served(bind("127.0.0.1", 0), make_app(service)) as url,
        ):
            try:
                yield Together(url, service, engine, store, gate, threads)
            finally:
                gate.open()
        service.queue.refuse_more()
        assert service.queue.join(20)


@pytest.fixture
def three(model: Path) -> Iterator[Together]:
    with together(model, SIZE) as one:
        yield one


@pytest.fixture(scope="module")
def alone(model: Path) -> list[str]:
    """What each is answered by a server that answers one at a time."""
    with together(model, 1) as one:
        one.gate.open()
        return [text(one.post(body)) for body in BODIES]


def three_running(server: Together, bodies: Sequence[dict[str, Any]]) -> list[Any]:
    """Ask all three; they run, none of them at its end."""
    answers = [server.ask(body, (at, 1)) for at, body in enumerate(bodies)]
    server.gate.let(2)
    server.depth_is(0, 3)
    return answers


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, str(response.json()["error"]["code"])


def test_answers_overlap_and_are_what_they_are_alone(model: Path, alone: list[str]) -> None:
    with together(model, SIZE, queue_requests=2) as server:
        answers = three_running(server, BODIES[:3])
        answers += [server.ask(body, (at, 3)) for at, body in enumerate(BODIES[3:], 1)]
        assert server.figure("tiercel_http_running_requests") == 3
        assert server.figure("tiercel_http_queue_requests") == 2
        health = httpx.get(f"{server.url}/health").json()
        assert (health["waiting"], health["running"]) == (2, 3)
        refused = server.post(BODIES[0])
        assert code(refused) == (429, "queue_full")
        assert refused.headers["retry-after"] == "1"
        assert not any(one.done() for one in answers)
        server.gate.open()
        assert [text(one.result(60)) for one in answers] == alone
        server.depth_is(0, 0)
        tokens = sum(body["max_tokens"] for body in BODIES)
        assert server.figure("tiercel_http_generated_tokens_total") == tokens
        assert server.figure("tiercel_http_queue_wait_seconds_count") == len(BODIES)
        assert server.figure("tiercel_http_running_requests") == 0
        assert server.figure("tiercel_http_internal_faults_total") == 0
        model_entry = httpx.get(f"{server.url}/v1/models").json()["data"][0]
        assert (model_entry["id"], model_entry["tiercel"]["exact"]) == ("tiny", True)
        said = [{member for member, event in step if isinstance(event, Delta)} for step in server.gate.steps]
    assert max(len(one) for one in said) == SIZE
    for member in set().union(*said):
        at = [number for number, one in enumerate(said) if member in one]
        assert at == list(range(at[0], at[-1] + 1)), "from its first token to its last it is in every step"


def test_a_client_that_leaves_costs_the_others_nothing(three: Together, alone: list[str]) -> None:
    stays = three.ask(BODIES[0], (0, 1))
    with three.send(BODIES[1] | {"stream": True, "max_tokens": 400}) as leaving:
        three.depth_is(1, 1)
        three.gate.let(4)
        assert b"200 OK" in leaving.recv(1000), "the control: it was being answered"
    comes = three.ask(BODIES[2], (1, 2))
    until(lambda: three.cut("disconnect") == 1)
    three.gate.open()
    assert [text(stays.result(60)), text(comes.result(60))] == [alone[0], alone[2]]
    three.leaves_nothing()


def test_a_prompt_is_given_up_between_two_blocks(
    three: Together, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering, prompt = three.engine.answering, [7] * (6 * BLOCK)
    asked: list[bool] = []

    def watched(request: Request, stop: Callable[[], bool], alone: Callable[[], bool]) -> Any:
        def noted() -> bool:
            asked.append(stop())
            return asked[-1]

        return answering(request, noted if request.seed == 9 else stop, alone)

    monkeypatch.setattr(three.engine, "answering", watched)
    stays = three.ask(BODIES[0], (0, 1))
    with three.send({"prompt": prompt, "max_tokens": 5, "seed": 9}):
        three.depth_is(1, 1)
        three.gate.let(3 + 2)  # three blocks of the first one's, two of this one
    until(lambda: three.cut("disconnect") == 1)
    three.gate.open()
    assert text(stays.result(60)) == alone[0]
    assert asked == [False, False, True]
    chain = three.engine.chain(prompt)
    assert chain is not None
    assert three.store.lookup(chain).blocks == 2, "what was computed is kept"
    assert three.figure("tiercel_http_internal_faults_total") == 0
    three.leaves_nothing()


def test_a_deadline_ends_its_own_request(three: Together, alone: list[str]) -> None:
    first = three.ask(BODIES[0], (0, 1))
    three.service.limits = replace(three.service.limits, request_deadline_s=0.3)
    late = three.threads.submit(three.post, BODIES[1])
    three.depth_is(1, 1)
    three.gate.let(3)
    assert code(late.result(60)) == (504, "deadline_exceeded")
    three.service.limits = ServeConfig()
    last = three.threads.submit(three.post, BODIES[2])
    three.gate.open()
    assert [text(first.result(60)), text(last.result(60))] == [alone[0], alone[2]]
    assert three.cut("deadline") == 1
    three.leaves_nothing()


SECRET = "the secret of the prompt"
POISONED = BODIES[1] | {"max_tokens": 13, "seed": 13}


def poison(server: Together, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the engine fail at POISONED: when it is admitted, when it is read, or at its third token."""

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(request: Request, *rest: Any) -> Any:
            if request.seed == POISONED["seed"]:
                raise RuntimeError(SECRET)
            return call(request, *rest)

        return called

    if where == "token":
        add = Answer.add

        def adding(answer: Answer, token: int) -> Delta:
            if answer._tokens_max == POISONED["max_tokens"] and len(answer.tokens) == 2:
                raise RuntimeError(SECRET)
            return add(answer, token)

        monkeypatch.setattr(Answer, "add", adding)
    else:
        name = {"admission": "answering", "prompt": "prefill"}[where]
        monkeypatch.setattr(server.engine, name, failing(getattr(server.engine, name)))


@pytest.mark.parametrize("where", ["admission", "prompt", "token"])
def test_who_fails_fails_alone(
    three: Together,
    alone: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    poison(three, where, monkeypatch)
    before, fails, after = (
        three.ask(body, (at, 1)) for at, body in enumerate((BODIES[0], POISONED, BODIES[2]))
    )
    three.gate.open()
    assert code(fails.result(60)) == (500, "internal_error")
    assert [text(before.result(60)), text(after.result(60))] == [alone[0], alone[2]]
    assert three.figure("tiercel_http_internal_faults_total") == 1
    assert "RuntimeError at" in caplog.text
    assert SECRET not in caplog.text
    three.leaves_nothing()


def test_a_step_that_fails_ends_all_who_took_part(
    three: Together, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_together, failed = three.engine.run_together, []

    def failing(steps: Sequence[Any]) -> Any:
        if len(steps) == 2 and not failed:
            failed.append(len(steps))
            raise RuntimeError(SECRET)
        return run_together(steps)

    monkeypatch.setattr(three.engine, "run_together", failing)
    *took_part, reading = (three.ask(body, (at, 1)) for at, body in enumerate(BODIES[:3]))
    three.gate.open()
    assert [code(one.result(60)) for one in took_part] == [(500, "internal_error")] * 2
    assert text(reading.result(60)) == alone[2], "its prompt was read meanwhile"
    assert failed == [2]
    three.leaves_nothing()


def test_a_batch_that_fails_costs_those_in_it(three: Together, alone: list[str]) -> None:
    answers = three_running(three, BODIES[:3])
    waits = three.ask(BODIES[4], (1, 3))
    three.gate.fault = RuntimeError(SECRET)
    three.gate.let(1)
    assert [code(one.result(60)) for one in answers] == [(500, "internal_error")] * 3
    three.gate.open()
    assert text(waits.result(60)) == alone[4]
    three.leaves_nothing()


def test_a_server_that_stops_lets_all_that_run_finish(three: Together, alone: list[str]) -> None:
    answers = three_running(three, BODIES[:3])
    waits = three.ask(BODIES[3], (1, 3))
    queue = three.service.queue
    queue.refuse_more()
    assert code(waits.result(60)) == (503, "shutting_down")
    assert code(three.post(BODIES[0])) == (503, "shutting_down")
    assert not queue.join(0.0)
    three.gate.open()
    assert [text(one.result(60)) for one in answers] == alone[:3]
    assert queue.join(20)


def test_a_server_that_waits_no_more_ends_all_that_run(three: Together) -> None:
    answers = three_running(three, BODIES[:3])
    queue = three.service.queue
    queue.refuse_more()
    queue.stop_running()
    assert [code(one.result(60)) for one in answers] == [(503, "shutting_down")] * 3
    assert three.cut("shutdown") == 3
    assert not queue.join(0.0), "the engine is told with its next step"
    three.gate.open()
    assert queue.join(20)
    assert queue.depth == (0, 0)
    assert three.store.stats().leases == 0
