"""Two reports against each other, and what of it is noise.

Each side of the second is compared with the same side of the first, metric by metric, by the rule of
`numbers`. Where both runs measured a server without offloading, that is the control: what changed there is
the machine, so a difference on the other side must exceed that change to count.
"""

from __future__ import annotations

import msgspec

from tiercel.bench.numbers import MARGIN, Ratio
from tiercel.bench.results import OFF, ON, Report, WorkloadRun, ratios
from tiercel.errors import ConfigError


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One side of one workload; `ratios` by metric, the first report being the base."""

    workload: str
    side: str
    ratios: dict[str, Ratio]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """`first` and `second` say what is compared."""

    first: str
    second: str
    parts: list[Part]
    notes: list[str]

    def to_json(self) -> bytes:
        """As it is written to a file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def compare_reports(first: Report, second: Report, names: tuple[str, str]) -> Comparison:
    """Compare the workloads that both have. Raises ConfigError if there is none."""
    parts: list[Part] = []
    notes: list[str] = []
    others = {run.spec.workload: run for run in second.workloads}
    for run in first.workloads:
        other = others.get(run.spec.workload)
        if other is None:
            continue
        paired = run.spec == other.spec and first.texts == second.texts
        if not paired:
            changed = _changed(run, other) or "the texts"
            notes.append(
                f"{run.spec.workload}: the runs differ in {changed}, so requests are not compared in pairs"
            )
        control = _control(run, other, paired)
        if control:
            parts.append(Part(workload=run.spec.workload, side=OFF, ratios=control))
        if ON in run.sides and ON in other.sides:
            found = ratios(run.sides[ON], other.sides[ON], margins=_margins(control), paired=paired)
            parts.append(Part(workload=run.spec.workload, side=ON, ratios=found))
        if not control:
            notes.append(
                f"{run.spec.workload}: no side without offloading in both runs, so a change of the "
                "machine would look like one of the server"
            )
    if not parts:
        raise ConfigError(
            f"{names[0]} and {names[1]} have no workload in common; accepted: reports of the same workloads"
        )
    if first.interrupted or second.interrupted or first.problems or second.problems:
        notes.append("one of the runs was not whole; only what both have is compared")
    return Comparison(
        first=_named(first, names[0]), second=_named(second, names[1]), parts=parts, notes=notes
    )


def _named(report: Report, name: str) -> str:
    models = ", ".join(dict.fromkeys(side.model for side in report.sides if side.model))
    return f"{name}: {report.when}, tiercel {report.version}, {models}"


def _changed(run: WorkloadRun, other: WorkloadRun) -> str:
    fields = [
        name for name in run.spec.__struct_fields__ if getattr(run.spec, name) != getattr(other.spec, name)
    ]
    return ", ".join(f"{name} ({getattr(run.spec, name)}, {getattr(other.spec, name)})" for name in fields)


def _control(run: WorkloadRun, other: WorkloadRun, paired: bool) -> dict[str, Ratio]:
    if OFF not in run.sides or OFF not in other.sides:
        return {}
    return ratios(run.sides[OFF], other.sides[OFF], paired=paired)


def _margins(control: dict[str, Ratio]) -> dict[str, float]:
    """By metric: what changed without offloading, and at least the usual margin."""
    return {name: max(MARGIN, one.ratio - 1, 1 / one.ratio - 1) for name, one in control.items()}
