"""Play a trace on simulated hosts: queues on links and engines, tiers that fill and evict, first tokens.

Event driven: a request arrives, its host decides what to load, the load queues on the tiers' links, then
the prefill queues for an engine (one request at a time, in order of readiness), which looks once more for
what memory has got meanwhile; when it ends the chain is stored and can be hit. Decoding is not simulated.
No real clock, no I/O; equal inputs give equal results.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
import numpy.typing as npt

from tiercel.plan.simulate.costs import Fleet
from tiercel.plan.simulate.decide import Plan, Situation, decide
from tiercel.plan.simulate.places import HostPlaces, Place
from tiercel.plan.simulate.router import Route
from tiercel.plan.simulate.runs import Runs, join_runs
from tiercel.plan.simulate.trace import Trace

REFS_MAX = 4_000_000
DECISIONS = ("nothing cached", "load all", "load part", "split", "recompute")
_READY, _DONE = 0, 1


@dataclass(slots=True)
class Outcome:
    """What happened; sums run over the requests after the warm-up, writes over all."""

    fleet: Fleet
    run_blocks_max: int
    ttft_s: npt.NDArray[np.float64]
    measured: slice
    input_tokens: int = 0
    used_tokens: int = 0
    compute_s: float = 0.0
    cached_blocks: int = 0
    chain_blocks: int = 0
    loaded_blocks: list[int] = field(default_factory=list)
    written_blocks: list[int] = field(default_factory=list)
    decisions: dict[str, int] = field(default_factory=dict)
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Job:
    request: int
    host: int
    plan: Plan
    near_s: float
    rest_s: float


class _Host:
    __slots__ = ("engine_free_s", "link_free_s", "places", "queue", "waiting_s")

    def __init__(self, places: HostPlaces, fleet: Fleet) -> None:
        self.places = places
        self.link_free_s: tuple[float, ...] = (0.0,) * len(fleet.tiers)
        self.engine_free_s = [0.0] * fleet.engines_per_host
        heapify(self.engine_free_s)
        self.queue: deque[_Job] = deque()  # loaded, waiting for an engine
        self.waiting_s = 0.0  # prefill of all that load or wait

    def free_s(self, now: float) -> float:
        """When an engine is expected to be free for a request that arrives now."""
        return max(self.engine_free_s[0], now) + self.waiting_s / len(self.engine_free_s)


def play(trace: Trace, fleet: Fleet) -> Outcome:
    """Simulate the whole trace on `fleet`.

    Blocks move one by one, or, in traces with millions of references, in runs of up to a few blocks.
    """
    runs, run_blocks_max = _fitting_runs(trace)
    return _Play(trace, fleet, runs, run_blocks_max).all()


def _fitting_runs(trace: Trace) -> tuple[Runs, int]:
    run_blocks_max = 1
    while len(trace.blocks) > REFS_MAX * run_blocks_max:
        run_blocks_max *= 2
    return join_runs(trace, run_blocks_max=run_blocks_max), run_blocks_max


class _Play:
    def __init__(self, trace: Trace, fleet: Fleet, runs: Runs, run_blocks_max: int) -> None:
        self.trace, self.fleet, self.runs = trace, fleet, runs
        self.weights = runs.weights.tolist()
        self.hosts = _hosts(fleet, self.weights)
        self.route = Route(fleet, runs.run_count)
        self.events: list[tuple[float, int, int, _Job]] = []
        self.events_made = 0
        first = int(trace.request_count * fleet.warmup)
        self.first = first
        ttft = np.zeros(trace.request_count)
        self.out = Outcome(fleet, run_blocks_max, ttft, slice(first, None), duration_s=trace.duration_s)
        self.out.loaded_blocks = [0] * len(fleet.tiers)
        self.out.decisions = dict.fromkeys(DECISIONS, 0)

    def all(self) -> Outcome:
        trace = self.trace
        for request in range(trace.request_count):
            now = float(trace.arrival_s[request])
            self._advance(now)
            self._arrive(request, now, self._chain(request), int(trace.input_tokens[request]))
        self._advance(float("inf"))
        places = {id(p): (i, p) for h in self.hosts for i, p in enumerate(h.places.places)}
        self.out.written_blocks = [0] * len(self.fleet.tiers)
        for number, place in places.values():
            self.out.written_blocks[number] += place.written_blocks
        return self.out

    def _situation(self, host: _Host, now: float, input_tokens: int) -> Situation:
        fleet = self.fleet
        return Situation(
            now, input_tokens, host.free_s(now), host.link_free_s, fleet.tiers, fleet.prefill,
            fleet.block_bytes, self.trace.block_tokens,
        )  # fmt: skip

    def _arrive(self, request: int, now: float, chain: list[int], input_tokens: int) -> None:
        def expect(number: int, chain_: object) -> float:
            host = self.hosts[number]
            cached = min(host.places.cached_blocks(chain) * self.trace.block_tokens, max(input_tokens - 1, 0))
            return host.free_s(now) - now + self.fleet.prefill.seconds(input_tokens - cached, cached)

        number = self.route.pick(chain, expect)
        host = self.hosts[number]
        stretches = host.places.lookup(chain)
        situation = self._situation(host, now, input_tokens)
        plan = decide(situation, stretches, always_load=self.fleet.always_load, split=self.fleet.split)
        host.link_free_s = plan.loads.link_done_s
        cached_blocks = sum(blocks for _, blocks in stretches)
        if request >= self.first:
            self._count(plan, input_tokens, cached_blocks, request)
        # A split starts at once: its near part is computed while the far part loads.
        ready = now if plan.near_tokens else plan.loads.ready_s
        near_s = self.fleet.prefill.seconds(plan.near_tokens, 0)
        rest_s = self._rest_s(request, plan.used_tokens)
        host.waiting_s += near_s + rest_s
        self._push(ready, _READY, _Job(request, number, plan, near_s, rest_s))

    def _count(self, plan: Plan, input_tokens: int, cached_blocks: int, request: int) -> None:
        out = self.out
        out.input_tokens += input_tokens
        out.cached_blocks += cached_blocks
        out.chain_blocks += int(self.trace.offsets[request + 1] - self.trace.offsets[request])
        for number, blocks in enumerate(plan.loads.blocks):
            out.loaded_blocks[number] += blocks
        loaded = sum(plan.loads.blocks)
        if not cached_blocks:
            kind = "nothing cached"
        elif plan.near_tokens:
            kind = "split"
        elif not loaded:
            kind = "recompute"
        else:
            kind = "load all" if loaded == cached_blocks else "load part"
        out.decisions[kind] += 1

    def _push(self, time_s: float, kind: int, job: _Job) -> None:
        self.events_made += 1
        heappush(self.events, (time_s, self.events_made, kind, job))

    def _advance(self, until_s: float) -> None:
        events = self.events
        while events and events[0][0] <= until_s:
            now, _, kind, job = heappop(events)
            host = self.hosts[job.host]
            if kind == _DONE:
                self._finish(now, job)
            else:
                host.queue.append(job)
            while host.queue and host.engine_free_s[0] <= now:
                self._start(now, host.queue.popleft())

    def _start(self, now: float, job: _Job) -> None:
        """An idle engine takes a job."""
        host = self.hosts[job.host]
        host.waiting_s = max(host.waiting_s - job.near_s - job.rest_s, 0.0)
        used, rest_s, begin = job.plan.used_tokens, job.rest_s, now
        if now > job.plan.loads.ready_s:
            used, begin = self._look_again(now, host, job)
            rest_s = self._rest_s(job.request, used)
        near_end = begin + job.near_s
        end = (max(near_end, job.plan.loads.ready_s) if job.near_s else near_end) + rest_s
        heapreplace(host.engine_free_s, end)
        if job.request >= self.first:
            self.out.compute_s += job.near_s + rest_s
            self.out.used_tokens += used - job.plan.near_tokens
        self._push(end, _DONE, job)

    def _look_again(self, now: float, host: _Host, job: _Job) -> tuple[int, float]:
        """(tokens to use, when they are there) if others stored more of the chain while the job waited."""
        stretches = host.places.lookup(self._chain(job.request))
        planned = job.plan.used_tokens
        if not stretches or stretches[0][0] != 0:
            return planned, now
        situation = self._situation(host, now, int(self.trace.input_tokens[job.request]))
        used = situation.usable(stretches[0][1])
        more = -(-(used - planned) // self.trace.block_tokens)
        if more <= 0:
            return planned, now
        loads = situation.loads([more] + [0] * (len(self.fleet.tiers) - 1))
        host.link_free_s = loads.link_done_s
        if job.request >= self.first:
            self.out.loaded_blocks[0] += more
        return used, loads.ready_s

    def _finish(self, now: float, job: _Job) -> None:
        self.out.ttft_s[job.request] = now - float(self.trace.arrival_s[job.request])
        self.hosts[job.host].places.commit(self._chain(job.request))

    def _chain(self, request: int) -> list[int]:
        start, end = self.runs.offsets[request], self.runs.offsets[request + 1]
        return self.runs.refs[start:end].tolist()  # type: ignore[no-any-return]

    def _rest_s(self, request: int, used_tokens: int) -> float:
        tokens = int(self.trace.input_tokens[request])
        return self.fleet.prefill.seconds(tokens - used_tokens, used_tokens)


def _hosts(fleet: Fleet, weights: list[int]) -> list[_Host]:
    shared = {
        number: Place(tier.capacity_bytes // fleet.block_bytes)
        for number, tier in enumerate(fleet.tiers)
        if tier.shared
    }
    hosts = []
    for _ in range(fleet.hosts):
        places = [
            shared[number] if tier.shared else Place(tier.capacity_bytes // fleet.block_bytes)
            for number, tier in enumerate(fleet.tiers)
        ]
        hosts.append(_Host(HostPlaces(places, weights, fleet), fleet))
    return hosts
