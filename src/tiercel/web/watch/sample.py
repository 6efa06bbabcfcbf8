"""From what a source told to one sample of the history: what is kept, and when totals began anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.store import RAM
from tiercel.web.watch.history import Sample

# Of the store's counters, those that somebody may want to see over time.
_COUNTED = ("lookups", "looked_up", "hit", "stored")
_MOVED = ("read_bytes", "written_bytes", "read_blocks", "written_blocks")


def sample_of(told: Mapping[str, Any], at_s: float, epoch: int) -> Sample:
    """The figures of this moment; none while the store is away."""
    stats = told.get("stats")
    if not stats:
        return Sample(at_s, epoch)
    requests = stats["requests"]
    totals: dict[str, float | None] = {name: stats["counters"][name] for name in _COUNTED}
    totals |= {name: requests[name] for name in ("requests", "prompt_tokens", "computed_tokens")}
    totals |= {"saved_s": requests["saved_s"], "spent_s": requests["spent_s"]}
    for reused, taken in requests["ttft"].items():
        totals[f"ttft_{reused}_s"] = taken["sum_s"]
        totals[f"ttft_{reused}"] = sum(taken["counts"])
    reused_tokens = requests["reused_tokens"]
    totals["reused_tokens"] = sum(reused_tokens.values())
    places = {
        tier["name"]: {"used_bytes": tier["used_bytes"], "blocks": tier["blocks"]}
        | {name: tier["counters"][name] for name in _MOVED}
        for tier in stats["tiers"]
    }
    kept = stats["ram_blocks"]
    return Sample(
        at_s, epoch, totals, {RAM: {"used_bytes": kept * stats["slot_bytes"], "blocks": kept}} | places
    )


def grew(before: Sample, after: Sample) -> bool:
    """Whether `after` goes on from `before`: totals never fall, but for a store that began anew."""
    pairs = [(before.totals.get(name), value) for name, value in after.totals.items()]
    return all(old is None or new is None or new >= old for old, new in pairs)
