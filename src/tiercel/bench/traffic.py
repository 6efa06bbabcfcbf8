"""One round on one server: sends the sessions as they arrive or as many at a time as asked, and measures.

With an arrival rate a request counts from when it was meant to be sent, so that a server that stalls is
charged for all who waited meanwhile, not only for the one it was asked by. Every request has a deadline, a
request that fails ends its session, and the round ends early when asked to, when its time is over or when the
server is gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tiercel.bench.client import Client, Reply
from tiercel.bench.samples import Sample, digest
from tiercel.bench.spec import IN_FLIGHT_MAX, Spec
from tiercel.bench.workload import Session, Turn

_LOOK_S = 0.05
# So many refused connections in a row, and nobody will come back.
_GONE_AFTER = 5
_FAULTS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Watch:
    """Reasons to end a round: `stop` is a person's, `died` tells how the server ended, or nothing."""

    stop: Callable[[], bool] = lambda: False
    died: Callable[[], str] = lambda: ""
    progress: Callable[[Sample], None] = lambda sample: None


@dataclass(slots=True)
class Traffic:
    """What a round brought. `seconds` from the first request's start to the last answer's end.

    `cut` requests were under way when the round was ended. `ended` says why it was, `said` what the server
    told of its refusals, by fault.
    """

    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    cut: int = 0
    ended: str = ""
    interrupted: bool = False
    said: dict[str, str] = field(default_factory=dict)


async def play(
    client: Client, spec: Spec, round_number: int, sessions: Iterator[Session], watch: Watch
) -> Traffic:
    """Play one round to its end and return what it brought. Raises nothing that a server could cause."""
    return await _Round(client, spec, round_number, watch).run(sessions)


class _Round:
    """All of it runs in one event loop; nothing here is locked."""

    def __init__(self, client: Client, spec: Spec, round_number: int, watch: Watch) -> None:
        self._client, self._spec, self._number, self._watch = client, spec, round_number, watch
        self._left = spec.requests_in(round_number)
        self._gate = asyncio.Semaphore(IN_FLIGHT_MAX if spec.rate else spec.concurrency)
        self._under_way = 0
        self._refused = 0
        self._begin_s = time.monotonic()
        self._until_s = self._begin_s + (spec.duration_per_round_s or float("inf"))
        self._traffic = Traffic()

    async def run(self, sessions: Iterator[Session]) -> Traffic:
        playing = asyncio.create_task(
            self._by_rate(sessions) if self._spec.rate else self._by_number(sessions)
        )
        while not playing.done():
            await asyncio.wait([playing], timeout=_LOOK_S)
            if why := self._reason_to_end():
                self._traffic.ended = why
                break
        if not playing.done():
            self._traffic.cut = self._under_way
            playing.cancel()
            await asyncio.wait([playing])
        if not playing.cancelled() and (fault := playing.exception()) is not None:
            raise fault
        ends = [one.start_s + one.e2e_s for one in self._traffic.samples if one.e2e_s is not None]
        self._traffic.seconds = max(ends, default=0.0)
        return self._traffic

    def _reason_to_end(self) -> str:
        if self._watch.stop():
            self._traffic.interrupted = True
            return "interrupted"
        if died := self._watch.died():
            return died
        return "nobody listens there any more" if self._refused >= _GONE_AFTER else ""

    async def _by_rate(self, sessions: Iterator[Session]) -> None:
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                at_s = self._begin_s + session.arrives_s
                if at_s >= self._until_s or self._left == 0:
                    break
                await asyncio.sleep(max(0.0, at_s - time.monotonic()))
                group.create_task(self._session(session, at_s))

    async def _by_number(self, sessions: Iterator[Session]) -> None:
        """As many sessions at once as requests may be; all of them where each is to wait for all others."""
        live = (self._spec.sessions or 1) if self._spec.workload == "overflow" else self._spec.concurrency

        async def one_after_another() -> None:
            for session in sessions:
                if time.monotonic() >= self._until_s or self._left == 0:
                    break
                await self._session(session, time.monotonic())

        async with asyncio.TaskGroup() as group:
            for _ in range(live):
                group.create_task(one_after_another())

    async def _session(self, session: Session, meant_s: float) -> None:
        messages = [{"role": "system", "content": session.system}] if session.system else []
        for at, turn in enumerate(session.turns):
            if turn.pause_s:
                meant_s += turn.pause_s
                await asyncio.sleep(max(0.0, meant_s - time.monotonic()))
            messages.append({"role": "user", "content": turn.text})
            async with self._gate:
                if self._left == 0 or time.monotonic() >= self._until_s:
                    return
                if self._left is not None:
                    self._left -= 1
                reply = await self._ask(messages)
            self._note(session, at, turn, meant_s if self._spec.rate else reply.sent_s, messages, reply)
            if reply.fault:
                return
            messages.append({"role": "assistant", "content": reply.heard.text})
            meant_s = reply.end_s

    async def _ask(self, messages: list[dict[str, str]]) -> Reply:
        self._under_way += 1
        try:
            return await self._client.ask(messages, self._spec.answer_tokens, self._spec.deadline_s)
        finally:
            self._under_way -= 1

    def _note(
        self,
        session: Session,
        at: int,
        turn: Turn,
        meant_s: float,
        messages: list[dict[str, str]],
        reply: Reply,
    ) -> None:
        heard = reply.heard
        self._refused = self._refused + 1 if reply.gone else 0
        good = not reply.fault and heard.first_s is not None
        if reply.said and len(self._traffic.said) < _FAULTS_SHOWN:
            self._traffic.said.setdefault(reply.fault, reply.said)
        sample = Sample(
            round=self._number,
            session=session.number,
            turn=at,
            again=turn.again,
            start_s=meant_s - self._begin_s,
            late_s=max(0.0, reply.sent_s - meant_s),
            ttft_s=heard.first_s - meant_s if good and heard.first_s is not None else None,
            tpot_s=heard.tpot_s if good else None,
            e2e_s=(heard.end_s or reply.end_s) - meant_s if good else None,
            prompt_tokens=heard.prompt_tokens if good else None,
            cached_tokens=heard.cached_tokens if good else None,
            tokens=heard.tokens if good else 0,
            usage=good and heard.counted_tokens is not None,
            prompt=digest("\0".join(one["content"] for one in messages)),
            answer=digest(heard.text) if good else "",
            fault=reply.fault,
        )
        self._traffic.samples.append(sample)
        self._watch.progress(sample)
