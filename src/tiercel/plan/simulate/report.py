"""Run everything that was asked about one trace and gather it in one report.

The only module that knows the order of things; it computes nothing itself and prints nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tiercel.errors import ConfigError
from tiercel.plan.simulate.costs import Fleet, Prices
from tiercel.plan.simulate.fleet import Outcome, play
from tiercel.plan.simulate.policies import POLICIES, policy_hits
from tiercel.plan.simulate.runs import Runs, join_runs
from tiercel.plan.simulate.summary import (
    capacity_for_shares,
    curve_points,
    outcome_summary,
    reuse_intervals,
    trace_summary,
)
from tiercel.plan.simulate.trace import Trace

REPORT_VERSION = 1
CURVE_POINTS = 12
NO_CACHE, WITHOUT_FILTER, WITH_FILTER = "no cache", "admit all", "seen twice"


@dataclass(frozen=True, slots=True)
class Request:
    """What to report. Without `block_bytes` there are no bytes and no fleet, only blocks and tokens."""

    policies: Sequence[str] = tuple(POLICIES)
    capacities_bytes: Sequence[int] = ()
    block_bytes: int | None = None
    fleet: Fleet | None = None
    prices: Prices | None = None
    endurance_bytes: dict[str, int] = field(default_factory=dict)
    assumptions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """`data` is the JSON document; `ttft_s` the samples behind its percentiles, by arm, for plots."""

    data: dict[str, Any]
    ttft_s: dict[str, Any]


def simulate(trace: Trace, request: Request) -> Report:
    """Return the report on a trace."""
    runs = join_runs(trace)
    block_bytes = request.block_bytes
    capacities = _capacities(trace, request)
    curves = {
        name: curve_points(trace, policy_hits(name, trace, runs, capacities), block_bytes)
        for name in request.policies
    }
    data: dict[str, Any] = {
        "report_version": REPORT_VERSION,
        "trace": trace_summary(trace, block_bytes),
        "assumptions": request.assumptions,
        "curves": curves,
        "capacity_for_hits": capacity_for_shares(trace, _tiercel_hits(trace, runs), block_bytes),
        "reuse_intervals": reuse_intervals(trace, runs),
    }
    if request.fleet is None:
        return Report(data, {})
    outcomes = _arms(trace, request.fleet)
    baseline = outcomes[NO_CACHE]
    data["fleet"] = _fleet_words(request.fleet)
    data["arms"] = {
        name: outcome_summary(outcome, baseline, request.prices, request.endurance_bytes)
        for name, outcome in outcomes.items()
    }
    return Report(data, {name: o.ttft_s[o.measured] for name, o in outcomes.items()})


def _tiercel_hits(trace: Trace, runs: Runs) -> Any:
    return lambda capacities: policy_hits("tiercel", trace, runs, capacities)


def _capacities(trace: Trace, request: Request) -> list[int]:
    """Capacities in blocks: as asked, or spread evenly on a log scale up to all blocks of the trace."""
    if request.capacities_bytes:
        if request.block_bytes is None:
            raise ConfigError(
                "capacities are in bytes but the size of a block is unknown; give a model or bytes per token"
            )
        return sorted({size // request.block_bytes for size in request.capacities_bytes})
    if not trace.block_count:
        return []
    spread = np.geomspace(max(1, trace.block_count / 1000), trace.block_count, CURVE_POINTS)
    return sorted({round(x) for x in spread})


def _arms(trace: Trace, fleet: Fleet) -> dict[str, Outcome]:
    """The same requests on the same machines without a cache, and with it under both admissions."""
    arms = {NO_CACHE: replace(fleet, tiers=()), WITHOUT_FILTER: replace(fleet, admission="all")}
    if len(fleet.tiers) > 1:
        arms[WITH_FILTER] = replace(fleet, admission="seen-twice")
    return {name: play(trace, arm) for name, arm in arms.items()}


def _fleet_words(fleet: Fleet) -> dict[str, Any]:
    return {
        "hosts": fleet.hosts,
        "engines_per_host": fleet.engines_per_host,
        "gpus_per_engine": fleet.gpus_per_engine,
        "gpus": fleet.gpus,
        "router": fleet.router,
        "write": fleet.write,
        "promote": fleet.promote,
        "always_load": fleet.always_load,
        "split": fleet.split,
        "warmup": fleet.warmup,
        "seed": fleet.seed,
        "prefill_s": {
            "fixed": fleet.prefill.fixed_s,
            "per_token": fleet.prefill.linear_s,
            "per_token_pair": fleet.prefill.quadratic_s,
        },
        "tiers": [
            {
                "name": tier.name,
                "capacity_bytes": tier.capacity_bytes,
                "bytes_per_s": tier.bytes_per_s,
                "latency_s": tier.latency_s,
                "shared": tier.shared,
            }
            for tier in fleet.tiers
        ],
    }
