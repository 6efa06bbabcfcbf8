"""The findings for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiercel.doctor.finding import Checked, Verdict, worst

_NAME_WIDTH = 14


def lines_of(one: Checked) -> list[str]:
    """A finding as one line, and one of advice."""
    finding = one.finding
    lines = [f"  {finding.verdict.value:<5} {one.name:<{_NAME_WIDTH}} {finding.said}"]
    if finding.advice:
        lines.append(" " * (_NAME_WIDTH + 9) + "-> " + finding.advice)
    return lines


def summary(checks: Sequence[Checked]) -> str:
    """How many of each verdict, and how long it took."""
    counts = {verdict: sum(one.finding.verdict is verdict for one in checks) for verdict in Verdict}
    told = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items())
    return f"{len(checks)} checks in {sum(one.took_s for one in checks):.1f} s: {told}"


def as_json(checks: Sequence[Checked]) -> dict[str, Any]:
    """Plain values. `value` is in `unit`; `figures` have their units in their names."""
    return {
        "verdict": worst([one.finding for one in checks]).value,
        "checks": [
            {
                "group": one.group,
                "name": one.name,
                "verdict": one.finding.verdict.value,
                "value": one.finding.value,
                "unit": one.finding.unit,
                "figures": dict(one.finding.figures),
                "said": one.finding.said,
                "advice": one.finding.advice,
                "took_s": one.took_s,
            }
            for one in checks
        ],
    }
