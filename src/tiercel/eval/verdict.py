"""What the figures come to: a sentence per policy, and whether the gates held.

noise      KL up to 0.003 nats a token: what two exact computations of one prompt differ by in bf16
loss       share of the answers that full attention gets right and the policy does not, over the dense tasks
safe       loses 5 % of the answers at most
A task on which full attention itself is right less than one time in five says nothing about losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from tiercel.eval.results import DROPS, EXACT, EndpointRow, Row

NOISE_KL = 0.003
_SAFE_LOSS = 0.05
_BASELINE_MIN = 0.2


def verdicts(rows: Sequence[Row]) -> dict[str, str]:
    """A sentence for each policy and budget, by `label_of`."""
    by: dict[str, list[Row]] = {}
    for row in rows:
        by.setdefault(label_of(row), []).append(row)
    return {label: _verdict(mine) for label, mine in by.items()}


def label_of(row: Row) -> str:
    """`quest 25 %`; only the name where a budget means nothing."""
    return row.policy if row.budget >= 1 else f"{row.policy} {row.budget:.3g}".replace("0.", "@0.")


def loss(rows: Sequence[Row]) -> float | None:
    """The mean share of right answers that are lost; None where full attention has too few to lose."""
    shares = [
        max(row.accuracy_drop, 0.0) / row.accuracy_full
        for row in rows
        if row.accuracy_drop is not None and row.accuracy_full is not None
        if row.accuracy_full >= _BASELINE_MIN
    ]
    return fmean(shares) if shares else None


def _verdict(rows: Sequence[Row]) -> str:
    worst = max(row.kl for row in rows)
    if rows[0].kind == EXACT:
        return "exact: the reference"
    if not any(row.acts for row in rows):
        return "did nothing: every layer has a sliding window of the model's own, which no policy touches"
    if worst <= NOISE_KL:
        return f"as good as exact on these tasks (KL {worst:.4f} at most, the noise of bf16)"
    parts = []
    dense, single = loss([row for row in rows if row.dense]), loss([row for row in rows if not row.dense])
    if dense is not None:
        parts += [_many(dense, [row for row in rows if row.dense])]
    if single is not None:
        parts += ["finds the needle" if single <= _SAFE_LOSS else f"misses {single:.0%} of single needles"]
    texts = [row for row in rows if row.accuracy is None]
    if texts:
        parts += [f"text {fmean(row.nll_rise for row in texts):+.3f} nats a token"]
    if not parts:
        parts = [f"KL {worst:.3f}: full attention is right too rarely here to say what is lost"]
    head = _head(dense, single)
    gone = "; what it drops is gone" if rows[0].kind == DROPS and (dense or 0) > _SAFE_LOSS else ""
    return f"{head}{', '.join(parts)}{gone}"


def _head(dense: float | None, single: float | None) -> str:
    if dense is not None and dense <= _SAFE_LOSS and (single or 0) <= _SAFE_LOSS:
        return "safe on these tasks: "
    if single is not None and single <= _SAFE_LOSS:
        return "safe for needle-type use only: "
    return "" if dense is None else "not safe: "


def _many(lost: float, rows: Sequence[Row]) -> str:
    if lost < 0.005:
        return "loses no facts"
    worst = max(rows, key=lambda row: loss([row]) or 0.0)
    return f"loses {lost:.0%} of facts where many are asked ({loss([worst]) or 0:.0%} on {worst.task})"


def endpoint_gates(rows: Sequence[EndpointRow], min_accuracy_drop: float | None) -> list[str]:
    """The tasks on which the server is right less often than the baseline by that much or more."""
    return [
        f"{row.task}: accuracy falls by {row.accuracy_drop:.3f} to {row.accuracy:.3f}, "
        f"which is not below {min_accuracy_drop:g}"
        for row in rows
        if min_accuracy_drop is not None and not row.accuracy_drop < max(min_accuracy_drop, 1e-9)
    ]


def gates(rows: Sequence[Row], max_kl: float | None, min_accuracy_drop: float | None) -> list[str]:
    """The rows that do not pass, in words. A drop fails from `min_accuracy_drop` on, as a share of all
    answers.
    """
    failed = []
    for row in rows:
        name = f"{label_of(row)} on {row.task}"
        if max_kl is not None and not row.kl <= max_kl:
            failed.append(f"{name}: KL {row.kl:.4f} is above {max_kl:g}")
        drop = row.accuracy_drop
        if min_accuracy_drop is not None and drop is not None and drop > 0 and not drop < min_accuracy_drop:
            failed.append(
                f"{name}: accuracy falls by {drop:.3f} to {row.accuracy:.3f}, "
                f"which is not below {min_accuracy_drop:g}"
            )
    return failed
