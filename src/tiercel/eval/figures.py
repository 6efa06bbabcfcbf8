"""Outcomes of several seeds as one row, with intervals: Student's t over the seeds' means, 95 %.

Differences to full attention are taken sample by sample, so that what makes a text hard does not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from tiercel.eval.judge import Outcome
from tiercel.eval.results import Row
from tiercel.eval.speed import Speed

# Two-sided 95 % quantiles of Student's t with 1 to 30 degrees of freedom.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_T_MANY = 1.96


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The 95 % interval of the mean of one value per seed; (None, None) for a single one, or where one is
    none.
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None, None
    freedom = len(values) - 1
    half = (_T[freedom - 1] if freedom <= len(_T) else _T_MANY) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def row_of(
    policy: str, kind: str, task: str, dense: bool, budget: float,
    outcomes: Sequence[Outcome], full: Sequence[Outcome], prefill_s: Sequence[float],
    speed: Speed | None = None,
) -> Row:  # fmt: skip
    """`outcomes` and `full` hold one outcome per seed, in the same order; `full` is exact attention's."""
    drops = [
        reference.accuracy - one.accuracy
        for one, reference in zip(outcomes, full, strict=True)
        if one.accuracy is not None and reference.accuracy is not None
    ]
    rises = [one.nll - reference.nll for one, reference in zip(outcomes, full, strict=True)]
    kl_low, kl_high = interval([one.kl for one in outcomes])
    drop_low, drop_high = interval(drops)
    rise_low, rise_high = interval(rises)
    context = fmean(one.context_tokens for one in outcomes)
    return Row(
        policy=policy,
        kind=kind,
        task=task,
        dense=dense,
        budget=budget,
        kl=fmean(one.kl for one in outcomes),
        kl_low=None if kl_low is None else max(kl_low, 0.0),
        kl_high=kl_high,
        agreement=fmean(one.agreement for one in outcomes),
        accuracy=_mean([one.accuracy for one in outcomes]),
        accuracy_full=_mean([one.accuracy for one in full]),
        accuracy_drop=_mean(drops),
        accuracy_drop_low=drop_low,
        accuracy_drop_high=drop_high,
        score=_mean([one.score for one in outcomes]),
        nll=fmean(one.nll for one in outcomes),
        nll_rise=fmean(rises),
        nll_rise_low=rise_low,
        nll_rise_high=rise_high,
        read_share=fmean(one.read_share for one in outcomes),
        device_share=fmean(one.device_bytes / one.full_bytes for one in outcomes),
        stored_share=fmean(one.host_bytes / one.full_bytes for one in outcomes),
        fetched_share=fmean(one.fetched_bytes / one.full_bytes for one in outcomes),
        device_bytes_per_token=fmean(one.device_bytes for one in outcomes) / context,
        fetched_bytes_per_token=fmean(one.fetched_bytes for one in outcomes) / context,
        seeds=len(outcomes),
        answers=sum(one.answers for one in outcomes),
        tokens=sum(one.tokens for one in outcomes),
        context_tokens=round(context),
        prefill_s=fmean(prefill_s),
        answer_s=fmean(one.answer_s for one in outcomes),
        ttft_s=None if speed is None else speed.ttft_s,
        tpot_s=None if speed is None else speed.tpot_s,
        device_bytes=None if speed is None else speed.device_bytes,
        moved_bytes_per_token=None if speed is None else speed.moved_bytes,
        acts=any(one.acts for one in outcomes),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return fmean(known) if known else None
