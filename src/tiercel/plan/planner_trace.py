"""Traffic read off a request trace, in the planner's terms. For curves and queues there is `simulate`.

It reduces a trace to a few means; the trace reader is the simulator's.
"""

from __future__ import annotations

import numpy as np

from tiercel.errors import TraceError
from tiercel.plan.planner_inputs import Traffic
from tiercel.plan.simulate.trace import Trace

SHARED_BY = 0.9  # a block in this share of all requests belongs to the prefix that all share


def traffic_of(trace: Trace) -> Traffic:
    """Means of a trace as traffic. Raises TraceError where it is too short to have a rate.

    A request returns if it reuses more than the prefix shared by all. Its interval is the time since its
    deepest reused block was last used. Sessions alive are arrivals per second times the mean interval.
    """
    requests = trace.request_count
    span_s = float(trace.arrival_s[-1] - trace.arrival_s[0]) if requests > 1 else 0.0
    if span_s <= 0:
        raise TraceError(
            f"{trace.source}: {requests} requests in {span_s:g} s; accepted: two or more over time"
        )
    uses = np.bincount(trace.blocks, minlength=trace.block_count)
    common = uses >= SHARED_BY * requests
    shared = int(common.sum()) * trace.block_tokens
    last_s = np.full(trace.block_count, np.nan)
    intervals: list[float] = []
    fresh: list[int] = []
    for index in range(requests):
        blocks = trace.blocks[trace.offsets[index] : trace.offsets[index + 1]]
        now = float(trace.arrival_s[index])
        known = int(np.isnan(last_s[blocks]).argmax()) if np.isnan(last_s[blocks]).any() else len(blocks)
        if known and not common[blocks[known - 1]]:
            intervals.append(now - float(last_s[blocks[known - 1]]))
            fresh.append(max(int(trace.input_tokens[index]) - known * trace.block_tokens, 1))
        last_s[blocks] = now
    if not intervals:
        raise TraceError(f"{trace.source}: no request reuses an earlier one; accepted: a trace with reuse")
    context = max(round(float(trace.input_tokens.mean())), 1)
    idle_s = max(float(np.mean(intervals)), 0.001)
    told = (
        f"{trace.source}: means over {requests} requests in {span_s:.0f} s; {len(intervals)} return; "
        "sessions alive = arrivals per second x mean time to return"
    )
    return Traffic(
        sessions=max(requests / span_s * idle_s, 1.0),
        context_tokens=context,
        new_tokens=min(max(round(float(np.mean(fresh))), 1), context),
        output_tokens=round(float(trace.output_tokens.mean())),
        turns=requests / max(requests - len(intervals), 1),
        idle_s=idle_s,
        shared_tokens=min(shared, context - 1),
        told=told,
    )
