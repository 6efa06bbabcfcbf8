"""The measurements: every arm answers the same prompts in turn, and the order turns with the rounds."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.vllm.arms import SETTLE_S, Arm
from benchmarks.vllm.driver import ArmFailed
from benchmarks.vllm.servers import Example

# Whole blocks of 256 tokens and 64 more: every arm then reuses the same tokens, whatever its unit, and
# computes the same rest, so that first tokens must be equal too.
LENGTHS = (1088, 4160, 8000)
TOGETHER = 16
VOCABULARY = range(1000, 48000)
DRAIN_S = 60.0


@dataclass(slots=True)
class Samples:
    """All times of a run, by (prompt tokens, arm, kind), in the order of rounds; and what was odd."""

    times: dict[tuple[int, str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    first_tokens: dict[tuple[int, int], dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    short_hits: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(
        self, length: int, arm: str, kind: str, prompt: int, answer: dict[str, Any], *, hit: bool
    ) -> None:
        self.times[length, arm, kind].append(answer["seconds"])
        if hit and answer["reused"] < reusable(length):
            self.short_hits[f"{arm} {kind}"] += 1
        elif hit:
            self.first_tokens[length, prompt][f"{arm} {kind}"] = answer["token"]


def reusable(length: int) -> int:
    return length // 256 * 256


def prompt_of(length: int, number: int) -> list[int]:
    """Random tokens: nothing is shared with any other prompt."""
    source = random.Random(f"{length}:{number}")
    return [source.choice(VOCABULARY) for _ in range(length)]


def turned(arms: Sequence[Arm], round_number: int) -> Iterator[Arm]:
    """The arms still in the run, beginning with another one each round."""
    live = [arm for arm in arms if not arm.failed]
    start = round_number % len(live) if live else 0
    yield from [*live[start:], *live[:start]]


def each(arms: Sequence[Arm], round_number: int, act: Callable[[Arm], None]) -> None:
    for arm in turned(arms, round_number):
        with arm.guarded():
            act(arm)


def warm_up(arms: Sequence[Arm]) -> None:
    """Load code paths: one prompt cold and reused in every arm, not counted."""

    def act(arm: Arm) -> None:
        with arm.awake() as engine:
            tokens = prompt_of(1088, -1)
            engine.ask("ttft", tokens=tokens)
            time.sleep(SETTLE_S)
            engine.ask("reset")
            engine.ask("ttft", tokens=tokens)

    each(arms, 0, act)


def single_requests(arms: Sequence[Arm], lengths: Sequence[int], rounds: int, samples: Samples) -> None:
    """Cold, from vLLM's own prefix cache, and twice from the connector after vLLM's cache was emptied."""
    for number in range(rounds):
        for length in lengths:
            tokens = prompt_of(length, number)

            def act(arm: Arm, length: int = length, number: int = number, tokens: Any = tokens) -> None:
                with arm.awake() as engine:
                    samples.add(
                        length, arm.name, "cold", number, engine.ask("ttft", tokens=tokens), hit=False
                    )
                    time.sleep(SETTLE_S)
                    for _ in range(2):
                        own = engine.ask("ttft", tokens=tokens)
                        samples.add(length, arm.name, "own", number, own, hit=True)
                        time.sleep(SETTLE_S)
                    for _ in range(2 if arm.caches else 0):
                        engine.ask("reset")
                        time.sleep(SETTLE_S)
                        hit = engine.ask("ttft", tokens=tokens)
                        samples.add(length, arm.name, "hit", number, hit, hit=True)

            each(arms, number, act)
        latest(samples, number, rounds)


def latest(samples: Samples, number: int, rounds: int) -> None:
    """A line on how it goes, so that a run cut short has said something."""
    length = max(length for length, _, _ in samples.times)
    seen = [
        f"{arm} {kind} {times[-1]:.3f}"
        for (size, arm, kind), times in samples.times.items()
        if size == length
    ]
    print(f"  round {number + 1} of {rounds}: {length} tokens: {', '.join(seen)}", flush=True)


def store_for_disk(arms: Sequence[Arm], lengths: Sequence[int], rounds: int) -> None:
    """Let the arms with a file tier compute and store all prompts, before any is read back."""

    def act(arm: Arm) -> None:
        if not arm.caches:
            return
        with arm.awake() as engine:
            for number in range(rounds):
                for length in lengths:
                    engine.ask("ttft", tokens=prompt_of(length, number))
                    time.sleep(SETTLE_S)
                    engine.ask("reset")
            drained(arm)

    each(arms, 0, act)


def drained(arm: Arm) -> None:
    """Wait until an arm's file tier has written what is due."""
    assert arm.server
    assert not isinstance(arm.server, Example)
    until = time.monotonic() + DRAIN_S
    while arm.server.pending_writes():
        if time.monotonic() > until:
            raise ArmFailed(f"{arm.name}: writes still due after {DRAIN_S:.0f} s")
        time.sleep(0.5)


def from_disk(arms: Sequence[Arm], lengths: Sequence[int], rounds: int, samples: Samples) -> None:
    """Each prompt from files, RAM emptied and page cache dropped; recompute and own hit in the same round."""
    for number in range(rounds):
        for length in lengths:
            tokens = prompt_of(length, number)

            def act(arm: Arm, length: int = length, number: int = number, tokens: Any = tokens) -> None:
                with arm.awake() as engine:
                    engine.ask("reset")
                    if arm.server is None:
                        cold = engine.ask("ttft", tokens=tokens)
                        samples.add(length, arm.name, "cold", number, cold, hit=False)
                        time.sleep(SETTLE_S)
                        own = engine.ask("ttft", tokens=tokens)
                        samples.add(length, arm.name, "own", number, own, hit=True)
                        return
                    assert not isinstance(arm.server, Example)
                    arm.server.empty_ram()
                    time.sleep(SETTLE_S)
                    before = arm.server.read_blocks()
                    hit = engine.ask("ttft", tokens=tokens)
                    samples.add(length, arm.name, "hit", number, hit, hit=True)
                    if arm.server.read_blocks() == before:
                        samples.short_hits[f"{arm.name} not from disk"] += 1

            each(arms, number, act)
        latest(samples, number, rounds)


def after_restart(arm: Arm, lengths: Sequence[int], rounds: int, samples: Samples) -> None:
    """A new engine on the same daemon: each prompt once, after one unrelated prompt that loads code paths."""
    arm.restart_engine()
    if arm.failed:
        return
    with arm.guarded(), arm.awake() as engine:
        for number in (-1, -2):
            engine.ask("ttft", tokens=prompt_of(1088, number))
        time.sleep(SETTLE_S)
        for number in range(rounds):
            for length in lengths:
                hit = engine.ask("ttft", tokens=prompt_of(length, number))
                samples.add(length, arm.name, "restart", number, hit, hit=True)
                engine.ask("reset")
                time.sleep(SETTLE_S)


def concurrent(arms: Sequence[Arm], rounds: int) -> dict[str, Any]:
    """`TOGETHER` prompts at once: cold, then again from vLLM's own cache or, without it, the connector."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for number in range(rounds):
        prompts = [prompt_of(LENGTHS[0], 1000 + number * TOGETHER + index) for index in range(TOGETHER)]

        def act(arm: Arm, prompts: Any = prompts) -> None:
            with arm.awake() as engine:
                engine.ask("reset")
                found[arm.name]["cold"].append(engine.ask("together", prompts=prompts, max_tokens=1))
                time.sleep(3 * SETTLE_S)
                if arm.caches:
                    engine.ask("reset")
                    time.sleep(SETTLE_S)
                kind = "hit" if arm.caches else "own"
                found[arm.name][kind].append(engine.ask("together", prompts=prompts, max_tokens=1))

        each(arms, number, act)
    return found


def without_reuse(arms: Sequence[Arm], rounds: int) -> dict[str, list[float]]:
    """Tokens a second, prompt and answer, on prompts never seen again: what looking and storing costs."""
    rates: dict[str, list[float]] = defaultdict(list)
    for number in range(-1, rounds):  # the first is not counted
        source = random.Random(f"no reuse {number}")
        sizes = [source.randrange(512, 2048) for _ in range(8)]
        prompts = [prompt_of(size, 5000 + number * 8 + index) for index, size in enumerate(sizes)]

        def act(arm: Arm, prompts: Any = prompts, number: int = number, total: int = sum(sizes)) -> None:
            with arm.awake() as engine:
                answer = engine.ask("together", prompts=prompts, max_tokens=32)
                if number >= 0:
                    rates[arm.name].append((total + 32 * len(prompts)) / answer["seconds"])

        each(arms, number, act)
    return rates
