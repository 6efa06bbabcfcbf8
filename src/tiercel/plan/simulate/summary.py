"""From hits and outcomes to the numbers people asked for: ratios, latencies, money, drive wear.

Pure arithmetic on results; each formula is written once, here, and explained in docs/simulate.md.
Everything returned is plain data for JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tiercel.plan.simulate.costs import SECONDS_PER_MONTH, Fleet, Prices, TierSpec
from tiercel.plan.simulate.fleet import Outcome
from tiercel.plan.simulate.policies import Hits
from tiercel.plan.simulate.runs import Runs, next_uses
from tiercel.plan.simulate.trace import Trace

SHARES = (0.5, 0.75, 0.9, 0.95, 0.99)
INTERVAL_EDGES_S = (0, 1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10800, 43200, 86400, 604800)
PERCENTILES = (50, 90, 99)
SECONDS_PER_DAY = 86400
DAYS_PER_YEAR = 365.25

Json = dict[str, Any]


def trace_summary(trace: Trace, block_bytes: int | None) -> Json:
    """What is in the trace."""
    tokens = trace.input_tokens
    uses = np.bincount(trace.blocks, minlength=trace.block_count)
    return {
        "source": trace.source,
        "requests": trace.request_count,
        "duration_s": trace.duration_s,
        "block_tokens": trace.block_tokens,
        "block_bytes": block_bytes,
        "input_tokens": int(tokens.sum()),
        "output_tokens": int(trace.output_tokens.sum()),
        "input_tokens_mean": float(tokens.mean()) if len(tokens) else None,
        "input_tokens_p50": float(np.median(tokens)) if len(tokens) else None,
        "input_tokens_max": int(tokens.max()) if len(tokens) else None,
        "block_references": len(trace.blocks),
        "unique_blocks": trace.block_count,
        "blocks_used_once": int((uses == 1).sum()),
        "infinite_cache_block_hit_ratio": trace.block_hit_ratio_max,
        "rechained": trace.rechained,
        "bad_lines_skipped": trace.bad_lines,
        "first_bad_line": trace.first_bad_line or None,
    }


def curve_points(trace: Trace, hits: Sequence[Hits], block_bytes: int | None) -> list[Json]:
    """Hit and miss ratios of one policy, by blocks (= bytes: blocks are equal) and by input tokens."""
    references, tokens = len(trace.blocks), int(trace.input_tokens.sum())
    points = []
    for hit in hits:
        by_block = hit.blocks / references if references else 0.0
        by_token = hit.tokens / tokens if tokens else 0.0
        points.append(
            {
                "capacity_blocks": hit.capacity_blocks,
                "capacity_tokens": hit.capacity_blocks * trace.block_tokens,
                "capacity_bytes": hit.capacity_blocks * block_bytes if block_bytes else None,
                "block_hit_ratio": by_block,
                "block_miss_ratio": 1 - by_block,
                "token_hit_ratio": by_token,
                "token_miss_ratio": 1 - by_token,
            }
        )
    return points


def capacity_for_shares(
    trace: Trace, hits_at: Callable[[Sequence[int]], list[Hits]], block_bytes: int | None
) -> list[Json]:
    """The smallest capacity that reaches each share of the hits an unbounded cache has.

    Needs a policy whose hits never fall as capacity grows (LRU has that property); found by bisection.
    """
    best = len(trace.blocks) - trace.block_count
    if best == 0:
        return []
    low, high = [0] * len(SHARES), [trace.block_count] * len(SHARES)
    while any(a < b for a, b in zip(low, high, strict=True)):
        middle = [(a + b) // 2 for a, b in zip(low, high, strict=True)]
        for i, hit in enumerate(hits_at(middle)):
            if low[i] == high[i]:
                continue
            if hit.blocks >= SHARES[i] * best:
                high[i] = middle[i]
            else:
                low[i] = middle[i] + 1
    return [
        {
            "share_of_achievable_hits": share,
            "capacity_blocks": blocks,
            "capacity_tokens": blocks * trace.block_tokens,
            "capacity_bytes": blocks * block_bytes if block_bytes else None,
        }
        for share, blocks in zip(SHARES, low, strict=True)
    ]


def reuse_intervals(trace: Trace, runs: Runs) -> list[Json]:
    """How long until a block is used again, counted over all block references that have a next one."""
    following = next_uses(runs)
    again = following >= 0
    arrivals = np.repeat(trace.arrival_s, np.diff(runs.offsets))
    waits = arrivals[following[again]] - arrivals[again]
    counts, _ = np.histogram(waits, bins=[*INTERVAL_EDGES_S, np.inf], weights=runs.weights[runs.refs[again]])
    total = counts.sum()
    reached = np.cumsum(counts)
    return [
        {
            "from_s": start,
            "to_s": INTERVAL_EDGES_S[i + 1] if i + 1 < len(INTERVAL_EDGES_S) else None,
            "reuses": int(counts[i]),
            "share": float(counts[i] / total) if total else 0.0,
            "cumulative_share": float(reached[i] / total) if total else 0.0,
        }
        for i, start in enumerate(INTERVAL_EDGES_S)
    ]


def outcome_summary(
    outcome: Outcome, baseline: Outcome, prices: Prices | None, endurance_bytes: dict[str, int]
) -> Json:
    """One simulated arm against `baseline`, the same machines without a cache."""
    fleet, ttft = outcome.fleet, outcome.ttft_s[outcome.measured]
    gpu_s, gpu_s_before = (o.compute_s * o.fleet.gpus_per_engine for o in (outcome, baseline))
    engines = fleet.hosts * fleet.engines_per_host
    busy = outcome.duration_s * engines
    measured_share = len(ttft) / len(outcome.ttft_s) if len(outcome.ttft_s) else 0.0
    loaded = outcome.loaded_blocks
    summary: Json = {
        "requests_measured": len(ttft),
        "blocks_moved_together": outcome.run_blocks_max,
        "ttft_s": {f"p{p}": _percentile(ttft, p) for p in PERCENTILES},
        "ttft_mean_s": float(ttft.mean()) if len(ttft) else None,
        "token_hit_ratio": _ratio(outcome.used_tokens, outcome.input_tokens),
        "block_hit_ratio_by_tier": {
            tier.name: _ratio(loaded[i], outcome.chain_blocks) for i, tier in enumerate(fleet.tiers)
        },
        "cached_but_not_loaded_ratio": _ratio(
            max(outcome.cached_blocks - sum(loaded), 0), outcome.chain_blocks
        ),
        "gpu_s": gpu_s,
        "gpu_s_saved": gpu_s_before - gpu_s,
        "gpu_saved_share": _ratio(gpu_s_before - gpu_s, gpu_s_before),
        "engine_utilisation": _ratio(outcome.compute_s, busy * measured_share),
        "decisions": outcome.decisions,
        "tiers": {
            tier.name: _tier_traffic(outcome, i, tier, endurance_bytes.get(tier.name))
            for i, tier in enumerate(fleet.tiers)
        },
    }
    if prices is not None:
        summary["money"] = _money(outcome, gpu_s, gpu_s_before, prices, measured_share)
    return summary


def _percentile(values: Any, percent: int) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _tier_traffic(outcome: Outcome, number: int, tier: TierSpec, endurance_bytes: int | None) -> Json:
    """Reads and writes of one tier, per place (a host's tier, or the shared one), and what that wears."""
    fleet = outcome.fleet
    places = 1 if tier.shared else fleet.hosts
    written = outcome.written_blocks[number] * fleet.block_bytes
    rate = _ratio(written / places, outcome.duration_s)
    per_day = rate * SECONDS_PER_DAY if rate is not None else None
    per_year = per_day * DAYS_PER_YEAR / 1e12 if per_day is not None else None
    life_days = endurance_bytes / per_day if endurance_bytes and per_day else None
    return {
        "capacity_bytes": tier.capacity_bytes,
        "shared": tier.shared,
        "places": places,
        "read_bytes": outcome.loaded_blocks[number] * fleet.block_bytes,
        "written_bytes": written,
        "written_bytes_per_s_per_place": rate,
        "written_bytes_per_hour_per_place": rate * 3600 if rate is not None else None,
        "drive_writes_per_day": _ratio(per_day, tier.capacity_bytes) if per_day is not None else None,
        "terabytes_written_per_year_per_place": per_year,
        "rated_endurance_bytes": endurance_bytes,
        "years_until_rated_endurance": life_days / DAYS_PER_YEAR if life_days is not None else None,
    }


def _money(
    outcome: Outcome, gpu_s: float, gpu_s_before: float, prices: Prices, measured_share: float
) -> Json:
    """GPU time at the hourly price, storage for as long as the trace (its measured part) lasts."""
    months = outcome.duration_s * measured_share / SECONDS_PER_MONTH
    storage = sum(
        _total_bytes(outcome.fleet, tier) / 1e9 * prices.gb_month.get(tier.name, 0.0) * months
        for tier in outcome.fleet.tiers
    )
    gpu = gpu_s / 3600 * prices.gpu_hour
    saved = (gpu_s_before - gpu_s) / 3600 * prices.gpu_hour
    millions = outcome.input_tokens / 1e6
    return {
        "prices_as_of": prices.as_of,
        "gpu": gpu,
        "gpu_saved": saved,
        "storage": storage,
        "saved_after_storage": saved - storage,
        "per_million_input_tokens": _ratio(gpu + storage, millions),
        "tiers_without_price": [t.name for t in outcome.fleet.tiers if t.name not in prices.gb_month],
    }


def _total_bytes(fleet: Fleet, tier: TierSpec) -> int:
    return tier.capacity_bytes * (1 if tier.shared else fleet.hosts)
