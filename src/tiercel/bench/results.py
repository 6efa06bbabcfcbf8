"""What a run brought, as the JSON report holds it, and what it comes to: per side, and side against side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path

import msgspec

from tiercel.bench.figures import Figures, summed
from tiercel.bench.numbers import MARGIN, Ratio, Rounds, Spread, compare, spread
from tiercel.bench.samples import Sample, answered
from tiercel.bench.spec import Spec
from tiercel.bench.workload import planned
from tiercel.report.files import read_json

FORMAT = 1
ON, OFF = "on", "off"
THROUGHPUT = "throughput"
_BYTES_MAX = 256 << 20


class RoundRun(msgspec.Struct, frozen=True, kw_only=True):
    """One round of one side; `position` is its place in the run, counted over everything that was run.

    `seconds` from the first request's start to the last answer's end, pauses included. Memory is the peak of
    the processes that were started for it; None for a server that was there before.
    """

    number: int
    position: int
    seconds: float
    cut: int
    ended: str
    figures: Figures | None
    host_bytes: int | None
    gpu_bytes: int | None


class SideRun(msgspec.Struct, frozen=True, kw_only=True):
    """All rounds of one side of one workload."""

    rounds: list[RoundRun]
    samples: list[Sample]
    said: dict[str, str]


class WorkloadRun(msgspec.Struct, frozen=True, kw_only=True):
    """One workload: what was asked for, and what each side did."""

    spec: Spec
    sides: dict[str, SideRun]


class SideInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One side: what it is, in words, and its model as the server names it.

    `token_bytes` is what a token's KV weighs, where bench started the server and knows its model.
    """

    name: str
    what: str
    model: str
    token_bytes: int | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. `run` made its prompts unlike those of any other; no `problems` means success."""

    format: int
    version: str
    when: str
    command: str
    run: str
    facts: list[tuple[str, str]]
    texts: list[str]
    chars_per_token: float
    sides: list[SideInfo]
    workloads: list[WorkloadRun]
    notes: list[str]
    problems: list[str]
    interrupted: bool

    def to_json(self) -> bytes:
        """As it is written to a file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def read_report(path: Path) -> Report:
    """A report from its file. Raises ConfigError for what is none."""
    return read_json(path, Report, FORMAT, "tiercel bench --json", _BYTES_MAX)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One side of one workload. Rates are over the rounds' seconds, pauses included; None: not known."""

    answered: int
    faults: dict[str, int]
    cut: int
    unsent: int
    seconds: float
    ttft_s: Spread
    ttft_new_s: Spread
    ttft_again_s: Spread
    tpot_s: Spread
    e2e_s: Spread
    late_s: Spread
    requests_per_s: float | None
    tokens_per_s: float | None
    prompt_tokens: Spread
    cached_share: float | None
    figures: Figures | None
    host_bytes: int | None
    gpu_bytes: int | None
    counted: bool

    @property
    def failed(self) -> int:
        """Requests with a fault."""
        return sum(self.faults.values())


def summary(spec: Spec, side: SideRun) -> Summary:
    """What one side's samples come to."""
    good = answered(side.samples)
    seconds = sum(one.seconds for one in side.rounds)
    cached = [(one.cached_tokens, one.prompt_tokens) for one in good]
    known = [(c, p) for c, p in cached if c is not None and p]
    plans = [planned(spec, number) for number in range(spec.rounds)]
    plan = None if None in plans else sum(one for one in plans if one is not None)
    over = any(one.ended for one in side.rounds) or len(side.rounds) < spec.rounds
    cut = sum(one.cut for one in side.rounds)
    return Summary(
        answered=len(good),
        faults=dict(Counter(one.fault for one in side.samples if one.fault)),
        cut=cut,
        unsent=max(0, plan - len(side.samples) - cut)
        if plan is not None and (over or spec.duration_s is None)
        else 0,
        seconds=seconds,
        ttft_s=_spread(good, lambda one: one.ttft_s),
        ttft_new_s=_spread([one for one in good if not one.again], lambda one: one.ttft_s),
        ttft_again_s=_spread([one for one in good if one.again], lambda one: one.ttft_s),
        tpot_s=_spread(good, lambda one: one.tpot_s),
        e2e_s=_spread(good, lambda one: one.e2e_s),
        late_s=_spread(good, lambda one: one.late_s),
        requests_per_s=len(good) / seconds if seconds else None,
        tokens_per_s=sum(one.tokens for one in good) / seconds if seconds else None,
        prompt_tokens=_spread(good, lambda one: one.prompt_tokens),
        cached_share=sum(c for c, _ in known) / sum(p for _, p in known)
        if len(known) == len(good) > 0
        else None,
        figures=summed(one.figures for one in side.rounds) if side.rounds else None,
        host_bytes=max((one.host_bytes for one in side.rounds if one.host_bytes is not None), default=None),
        gpu_bytes=max((one.gpu_bytes for one in side.rounds if one.gpu_bytes is not None), default=None),
        counted=all(one.usage for one in good),
    )


def _spread(samples: list[Sample], of: Callable[[Sample], float | None]) -> Spread:
    return spread([value for one in samples if (value := of(one)) is not None])


# By the summary's field without its unit: its name for people, a sample's value, and which samples count.
METRICS: dict[str, tuple[str, Callable[[Sample], float | None], bool | None]] = {
    "ttft": ("TTFT", lambda one: one.ttft_s, None),
    "ttft_again": ("TTFT, seen before", lambda one: one.ttft_s, True),
    "ttft_new": ("TTFT, new", lambda one: one.ttft_s, False),
    "e2e": ("end to end", lambda one: one.e2e_s, None),
    "tpot": ("TPOT", lambda one: one.tpot_s, None),
}


def ratios(
    base: SideRun, other: SideRun, *, margins: Mapping[str, float] | None = None, paired: bool = True
) -> dict[str, Ratio]:
    """`other` against `base`, by metric, each with its margin; those with nothing to compare are left out.

    `throughput` compares the seconds per answer of whole rounds.
    """
    found = {}
    sides = {name: (_values(base, *rule[1:]), _values(other, *rule[1:])) for name, rule in METRICS.items()}
    sides[THROUGHPUT] = (_per_answer(base), _per_answer(other))
    for name, (one, two) in sides.items():
        ratio = compare(one, two, margin=(margins or {}).get(name, MARGIN), paired=paired)
        if ratio is not None:
            found[name] = ratio
    return found


def _values(side: SideRun, of: Callable[[Sample], float | None], again: bool | None) -> Rounds:
    found: dict[int, dict[Hashable, float]] = {}
    for one in answered(side.samples):
        if again in (None, one.again) and (value := of(one)) is not None and value > 0:
            found.setdefault(one.round, {})[one.name] = value
    return found


def _per_answer(side: SideRun) -> Rounds:
    """Of whole rounds, for one that was cut short has lost its end."""
    counts = Counter(one.round for one in answered(side.samples))
    return {
        one.number: {"": one.seconds / counts[one.number]}
        for one in side.rounds
        if counts[one.number] and one.seconds and not one.ended
    }


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of both sides to the same prompts. `parted`: their prompts differ, for earlier answers did."""

    same: int
    different: int
    parted: int


def agreement(one: SideRun, two: SideRun) -> Agreement:
    """Compare the answers of both sides, request by request."""
    others = {sample.name: sample for sample in answered(two.samples)}
    counted: Counter[str] = Counter()
    for sample in answered(one.samples):
        other = others.get(sample.name)
        if other is None:
            continue
        if sample.prompt != other.prompt:
            counted["parted"] += 1
        else:
            counted["same" if sample.answer == other.answer else "different"] += 1
    return Agreement(same=counted["same"], different=counted["different"], parted=counted["parted"])
