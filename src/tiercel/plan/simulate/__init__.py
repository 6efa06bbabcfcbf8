"""Replay a request trace against caches and hosts that do not exist yet, to know before buying.

`read_trace` reads, `simulate` reports; `policy_hits` and `play` are its two halves, for callers that want
less. Nothing here touches a GPU, a disk tier or the network.
"""

from __future__ import annotations

from tiercel.plan.simulate.costs import Fleet, PrefillCost, Prices, TierSpec
from tiercel.plan.simulate.fleet import Outcome, play
from tiercel.plan.simulate.policies import POLICIES, Hits, policy_hits
from tiercel.plan.simulate.report import Report, Request, simulate
from tiercel.plan.simulate.runs import Runs, join_runs
from tiercel.plan.simulate.synth import Shape, synthesize, write_trace
from tiercel.plan.simulate.trace import Trace, read_trace

__all__ = [
    "POLICIES",
    "Fleet",
    "Hits",
    "Outcome",
    "PrefillCost",
    "Prices",
    "Report",
    "Request",
    "Runs",
    "Shape",
    "TierSpec",
    "Trace",
    "join_runs",
    "play",
    "policy_hits",
    "read_trace",
    "simulate",
    "synthesize",
    "write_trace",
]
