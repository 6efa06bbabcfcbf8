"""How a round is played: in what order, how many at once, from when latencies count, and how it ends."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from tests.bench.fake import MODEL, Act, FakeServer, Handler, good, serving
from tests.bench.test_workload import TEXTS

pytest.importorskip("httpx")

from tiercel.bench.client import Client
from tiercel.bench.spec import Asked, Spec
from tiercel.bench.traffic import Traffic, Watch, play
from tiercel.bench.workload import sessions_of


def played(server: FakeServer, spec: Spec, watch: Watch | None = None) -> Traffic:
    async def run() -> Traffic:
        async with Client(server.url, MODEL, None) as client:
            return await play(client, spec, 0, sessions_of(spec, TEXTS, "run", 0), watch or Watch())

    return asyncio.run(run())


def test_a_conversation_goes_on_from_what_was_answered() -> None:
    with serving(good) as server:
        traffic = played(server, Asked(sessions=1, turns=3, tokens=50, pause_s=0).spec("chat"))
    assert [one.turn for one in traffic.samples] == [0, 1, 2]
    assert [one.again for one in traffic.samples] == [False, True, True]
    said = [one["messages"] for one in server.bodies]
    assert said[1][:1] == said[0]
    assert said[1][1] == {"role": "assistant", "content": "answer 1 of three"}
    assert said[2][:3] == said[1]
    assert len({one.prompt for one in traffic.samples}) == 3


class Gauge:
    """The most requests that were answered at once."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, handler: Handler, body: dict[str, Any]) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        good(handler, body, wait_s=0.05)
        with self._lock:
            self.now -= 1


@pytest.mark.parametrize("workload", ["unique", "overflow"])
def test_no_more_at_once_than_asked_for(workload: str) -> None:
    gauge = Gauge()
    with serving(gauge) as server:
        traffic = played(
            server, Asked(sessions=8, turns=2, tokens=50, concurrency=3, pause_s=0).spec(workload)
        )
    assert len(traffic.samples) == (8 if workload == "unique" else 16)
    assert 2 <= gauge.most <= 3


def test_sessions_that_overflow_come_back_after_all_others() -> None:
    with serving(good) as server:
        traffic = played(server, Asked(sessions=5, turns=2, tokens=50, pause_s=0).spec("overflow"))
    assert [(one.session, one.turn) for one in traffic.samples] == [
        *((number, 0) for number in range(5)),
        *((number, 1) for number in range(5)),
    ]


def test_a_stall_is_charged_to_all_who_were_to_be_sent_meanwhile() -> None:
    """Coordinated omission: a server that answers one at a time stops for a second under 20 requests/s."""
    turn = threading.Lock()
    stalled = threading.Event()

    def act(handler: Handler, body: dict[str, Any]) -> None:
        with turn:
            if len(handler.server.bodies) >= 5 and not stalled.is_set():
                stalled.set()
                time.sleep(1.0)
            good(handler, body)

    with serving(act) as server:
        traffic = played(server, Asked(sessions=40, rate=20.0, tokens=16).spec("unique"))
    assert stalled.is_set()
    assert len(traffic.samples) == 40
    slow = [one for one in traffic.samples if one.ttft_s is not None and one.ttft_s > 0.3]
    assert len(slow) >= 5
    # Arrivals are the plan's, not the server's.
    plan = [
        one.arrives_s for one in sessions_of(Asked(sessions=40, rate=20.0).spec("unique"), TEXTS, "run", 0)
    ]
    by_number = sorted(traffic.samples, key=lambda one: one.session)
    assert [one.start_s for one in by_number] == pytest.approx(plan, abs=0.02)
    assert traffic.seconds >= plan[-1]


def test_requests_and_time_are_limits() -> None:
    with serving(good) as server:
        few = played(
            server, Asked(sessions=9, turns=2, tokens=16, requests=7, rounds=1, pause_s=0).spec("chat")
        )
        assert len(few.samples) == 7
        assert not few.ended
        begun = time.monotonic()
        timed = played(server, Asked(duration_s=0.4, rounds=1, tokens=16).spec("unique"))
    assert 0.4 <= time.monotonic() - begun < 10
    assert len(timed.samples) > 3
    assert not timed.ended


def test_a_failed_request_ends_its_session_only() -> None:
    def act(handler: Handler, body: dict[str, Any]) -> None:
        if "run-chat-0-1" in body["messages"][0]["content"]:
            handler.whole(500, '{"error": {"message": "no"}}')
        else:
            good(handler, body)

    with serving(act) as server:
        traffic = played(server, Asked(sessions=3, turns=2, tokens=16, pause_s=0).spec("chat"))
    assert [(one.session, one.turn, one.fault) for one in traffic.samples] == [
        (0, 0, ""), (0, 1, ""), (1, 0, "HTTP 500"), (2, 0, ""), (2, 1, ""),
    ]  # fmt: skip
    assert traffic.said == {"HTTP 500": "no"}
    failed = traffic.samples[2]
    assert (failed.ttft_s, failed.e2e_s, failed.answer) == (None, None, "")


def test_a_server_that_is_gone_ends_the_round() -> None:
    with serving(good) as server:
        pass
    begun = time.monotonic()
    traffic = played(server, Asked(sessions=1000, tokens=16).spec("unique"))
    assert "nobody listens" in traffic.ended
    assert 5 <= len(traffic.samples) < 1000
    assert {one.fault for one in traffic.samples} == {"no connection"}
    assert time.monotonic() - begun < 20


def hangs(handler: Handler, body: dict[str, Any]) -> None:
    handler.server.let_go.wait(30)


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_round_ends_when_told_or_when_the_server_died_though_requests_hang(interrupted: bool) -> None:
    act: Act = hangs
    begun = time.monotonic()
    with serving(act) as server:
        late = time.monotonic() + 0.3

        def over() -> bool:
            return time.monotonic() > late

        watch = (
            Watch(stop=over)
            if interrupted
            else Watch(died=lambda: "ended with exit code 9" if over() else "")
        )
        traffic = played(server, Asked(sessions=4, concurrency=2, tokens=16).spec("unique"), watch)
    assert time.monotonic() - begun < 20
    assert (traffic.cut, traffic.samples) == (2, [])
    assert traffic.interrupted == interrupted
    assert traffic.ended == ("interrupted" if interrupted else "ended with exit code 9")
