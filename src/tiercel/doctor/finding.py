"""What one check found: a verdict, a sentence with the number behind it, and what to do. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Verdict(StrEnum):
    """FAIL: it will not work as configured. WARN: it works, worse than it could. SKIP: not looked at."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Finding:
    """`value` is the number that decided, in `unit`; `figures` are others, with units in their names."""

    verdict: Verdict
    said: str
    advice: str = ""
    value: float | None = None
    unit: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checked:
    """One line of the report: which check, of what, and what it found."""

    group: str
    name: str
    finding: Finding
    took_s: float


def ok(said: str, value: float | None = None, unit: str = "", **figures: float) -> Finding:
    """All is well."""
    return Finding(Verdict.OK, said, "", value, unit, figures)


def warn(said: str, advice: str, value: float | None = None, unit: str = "", **figures: float) -> Finding:
    """It works, worse than it could."""
    return Finding(Verdict.WARN, said, advice, value, unit, figures)


def fail(said: str, advice: str, value: float | None = None, unit: str = "", **figures: float) -> Finding:
    """It will not work as configured."""
    return Finding(Verdict.FAIL, said, advice, value, unit, figures)


def skip(said: str, advice: str = "") -> Finding:
    """Not looked at, and why."""
    return Finding(Verdict.SKIP, said, advice)


def worst(findings: list[Finding]) -> Verdict:
    """The verdict over several findings; what was skipped says nothing."""
    verdicts = {finding.verdict for finding in findings}
    for verdict in (Verdict.FAIL, Verdict.WARN):
        if verdict in verdicts:
            return verdict
    return Verdict.OK
