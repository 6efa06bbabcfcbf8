"""What a server counts itself: prompt tokens by where their KV came from, and bytes moved, before and after.

Read from a Prometheus page by the names below, or from a daemon. Counters that went backwards (a restart) or
are not there are left out; nothing is estimated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from tiercel.store import StoreStats

# Where a page counts it: a sample's name and the label that names the place, or after a `=` the place itself.
# Of the groups the first that a page has is taken, for two may count the same.
_Names = tuple[tuple[tuple[str, str], ...], ...]
_REUSED: _Names = (
    (("tiercel_reused_tokens_total", "place"),),
    (("vllm:prefix_cache_hits_total", "=engine"), ("vllm:external_prefix_cache_hits_total", "=connector")),
)
_READ: _Names = ((("tiercel_tier_read_bytes_total", "tier"),),)
_WRITTEN: _Names = ((("tiercel_tier_written_bytes_total", "tier"),),)
_SAVED: _Names = ((("tiercel_saved_prefill_seconds_total", "="),),)
_SPENT: _Names = ((("tiercel_spent_seconds_total", "="),),)
_PROMPT: _Names = ((("tiercel_prompt_tokens_total", "="),), (("vllm:prompt_tokens_total", "="),))


_PLAIN = ("prompt_tokens", "saved_s", "spent_s")


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Totals, or what was added to them in a while. `reused_tokens` by place, bytes by tier.

    `saved_s` is prefill that was not computed, as the engine prices it, `spent_s` what requests waited for
    the store.
    """

    prompt_tokens: float = 0.0
    saved_s: float = 0.0
    spent_s: float = 0.0
    reused_tokens: dict[str, float] = {}
    read_bytes: dict[str, float] = {}
    written_bytes: dict[str, float] = {}


def of_page(text: str) -> Figures | None:
    """The figures on a Prometheus page; None if it has none that are known."""
    try:
        found = [
            (one.name, one.labels, one.value)
            for family in text_string_to_metric_families(text)
            for one in family.samples
        ]
    except ValueError:
        return None

    def by_place(groups: _Names) -> dict[str, float]:
        for group in groups:
            totals: dict[str, float] = {}
            for wanted, label in group:
                for name, labels, value in found:
                    if name == wanted and math.isfinite(value) and (label[0] == "=" or label in labels):
                        place = label[1:] if label[0] == "=" else labels[label]
                        totals[place] = totals.get(place, 0.0) + value
            if totals:
                return totals
        return {}

    figures = Figures(
        prompt_tokens=sum(by_place(_PROMPT).values()),
        saved_s=sum(by_place(_SAVED).values()),
        spent_s=sum(by_place(_SPENT).values()),
        reused_tokens=by_place(_REUSED),
        read_bytes=by_place(_READ),
        written_bytes=by_place(_WRITTEN),
    )
    known = {name for groups in (_REUSED, _READ, _WRITTEN, _PROMPT) for group in groups for name, _ in group}
    return figures if any(name in known for name, _, _ in found) else None


def of_daemon(socket: Path) -> Figures | None:
    """The figures of the daemon on `socket`; None if none answers."""
    from tiercel.errors import DaemonError
    from tiercel.service.connecting import reach

    try:
        store = reach(socket)
    except DaemonError:
        return None
    try:
        told = store.figures()
    finally:
        store.close()
    return None if told is None or told.stats is None else of_stats(told.stats)


def of_stats(stats: StoreStats) -> Figures:
    """The figures of a store."""
    return Figures(
        prompt_tokens=stats.requests.prompt_tokens,
        saved_s=stats.requests.saved_s,
        spent_s=stats.requests.spent_s,
        reused_tokens=dict(stats.requests.reused_tokens),
        read_bytes={tier.name: tier.counters.read_bytes for tier in stats.tiers},
        written_bytes={tier.name: tier.counters.written_bytes for tier in stats.tiers},
    )


def added(before: Figures | None, after: Figures | None) -> Figures | None:
    """What came between; None if one of them is missing or a counter went backwards."""
    if before is None or after is None:
        return None
    pairs = (
        (before.reused_tokens, after.reused_tokens),
        (before.read_bytes, after.read_bytes),
        (before.written_bytes, after.written_bytes),
    )
    plain = [(getattr(before, name), getattr(after, name)) for name in _PLAIN]
    if any(two < one for one, two in plain) or any(_back(one, two) for one, two in pairs):
        return None
    reused, read, written = (_minus(one, two) for one, two in pairs)
    return Figures(
        **{name: two - one for name, (one, two) in zip(_PLAIN, plain, strict=True)},
        reused_tokens=reused,
        read_bytes=read,
        written_bytes=written,
    )


def summed(parts: Iterable[Figures | None]) -> Figures | None:
    """All together; None if one is missing, for then nobody knows the whole."""
    all_parts = list(parts)
    known = [one for one in all_parts if one is not None]
    if not known or len(known) < len(all_parts):
        return None
    return Figures(
        **{name: sum(getattr(one, name) for one in known) for name in _PLAIN},
        reused_tokens=_plus([one.reused_tokens for one in known]),
        read_bytes=_plus([one.read_bytes for one in known]),
        written_bytes=_plus([one.written_bytes for one in known]),
    )


def _back(before: dict[str, float], after: dict[str, float]) -> bool:
    return any(after.get(name, 0.0) < value for name, value in before.items())


def _minus(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def _plus(parts: list[dict[str, float]]) -> dict[str, float]:
    names = {name: None for part in parts for name in part}
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}
