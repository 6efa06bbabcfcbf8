"""A store's figures for Prometheus, read from it when they are asked for, for every process that serves them.

Names follow Prometheus' conventions: base units, `_total` for what only grows. The series are few: their
number grows with the tiers, never with models, tenants, prompts or clients. Counts nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tiercel.codecs import LOSSY
from tiercel.store import RAM, Histogram, RequestTotals, StoreStats, TierStats

# What can be wrong with a tier; see `tiercel.store.lane`.
FAULT_KINDS = ("corrupt", "full", "read", "write", "delete", "contains", "scan", "dates")
BREAKER_STATES = ("closed", "open", "probing")


class StoreCollector(Collector):
    """`stats` gives the figures of this moment; None while there is no store (yet)."""

    def __init__(self, stats: Callable[[], StoreStats | None]) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        return ()  # or the registry would ask for figures once at start

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        yield from _requests(stats.requests)
        yield from _ram(stats)
        yield from _store(stats)
        yield from _tiers(stats)
        yield from _traffic(stats.tiers)
        yield _left(stats)
        yield _faults(stats)


def _requests(told: RequestTotals) -> Iterator[Metric]:
    yield _counted(
        "tiercel_requests", "Prompts that engines reported, by how they ended.", "outcome", told.outcomes
    )
    yield _counted(
        "tiercel_decisions", "Prompts by what was done with what was stored of them.", "action", told.actions
    )
    yield _counter("tiercel_prompt_tokens", "Tokens of prompts.", told.prompt_tokens)
    yield _counter("tiercel_computed_tokens", "Prompt tokens that were computed.", told.computed_tokens)
    yield _counted(
        "tiercel_reused_tokens",
        "Prompt tokens that were not computed, by where their KV lay (engine: in the engine's own memory).",
        "place",
        told.reused_tokens,
    )
    yield _counter(
        "tiercel_saved_prefill_seconds",
        "What computing the tokens that the store gave was expected to take, by the engine's measurements.",
        told.saved_s,
    )
    yield _counter(
        "tiercel_spent_seconds", "What requests waited for the store: lookups and loads.", told.spent_s
    )
    yield _counter(
        "tiercel_unpriced_requests",
        "Requests that reused tokens and could not say what it saved.",
        told.unpriced,
    )
    yield _histograms(
        "tiercel_time_to_first_token_seconds",
        "From when the engine took a prompt up to its first token, by what gave KV: store, else engine.",
        "reuse",
        told.ttft,
    )
    yield _counter("tiercel_lost_reports", "Requests whose report did not arrive.", told.lost)
    yield _counter("tiercel_bad_reports", "Reports that could not be counted.", told.bad)


def _ram(stats: StoreStats) -> Iterator[Metric]:
    yield _gauge("tiercel_store_slots", "Slots of the RAM tier.", stats.slots)
    yield _gauge("tiercel_store_free_slots", "Slots that hold nothing.", stats.slots_free)
    yield _gauge("tiercel_store_reserved_slots", "Slots that are for loading only.", stats.reserved)
    yield _gauge("tiercel_store_slot_bytes", "Bytes of one slot.", stats.slot_bytes)
    yield _gauge("tiercel_store_ram_blocks", "Blocks in the RAM tier.", stats.ram_blocks)
    yield _gauge("tiercel_store_leases", "Leases held now.", stats.leases)
    yield _gauge("tiercel_store_pinned_blocks", "Blocks kept from eviction.", stats.pins)
    lossy = GaugeMetricFamily(
        "tiercel_store_lossy", "1 where tiers may change answers, by codec.", labels=["codec"]
    )
    for codec in LOSSY:
        lossy.add_metric([codec], float(codec in stats.lossy))
    yield lossy


def _store(stats: StoreStats) -> Iterator[Metric]:
    told = stats.counters
    for name, words, value in (
        ("lookups", "Lookups, of which a prompt may cause several.", told.lookups),
        ("looked_up_blocks", "Blocks asked for.", told.looked_up),
        ("hit_blocks", "Blocks found.", told.hit),
        ("stored_blocks", "Blocks newly stored.", told.stored),
        ("skipped_blocks", "Blocks not stored: no room in time.", told.stores_skipped),
        ("aborted_blocks", "Blocks begun and not stored.", told.stores_aborted),
        ("not_admitted_blocks", "Blocks not stored: seen for the first time.", told.not_admitted),
        ("priced_out_blocks", "Blocks found, and not loaded: computing them is faster.", told.priced_out),
        ("tries", "Blocks read from a tier too slow to be used, to see how it is now.", told.probes),
        ("failed_loads", "Blocks a tier could not give.", told.loads_failed),
        ("timed_out_loads", "Loads that took longer than allowed.", told.loads_timed_out),
        ("staged_loads", "Loads that found only a reserved slot.", told.staged),
        ("slot_waits", "Stores that waited for a slot of RAM.", told.slot_waits),
        ("slot_wait_seconds", "Time that stores waited for a slot of RAM.", told.slot_wait_s),
    ):
        yield _counter(f"tiercel_store_{name}", words, value)
    loaded = {tier.name: told.loaded.get(tier.name, 0) for tier in stats.tiers}
    yield _counted("tiercel_store_loaded_blocks", "Blocks loaded from tiers.", "tier", loaded)


def _tiers(stats: StoreStats) -> Iterator[Metric]:
    tiers = stats.tiers
    yield _gauges("tiercel_tier_blocks", "Blocks in the tier.", {one.name: one.blocks for one in tiers})
    yield _gauges(
        "tiercel_tier_used_bytes", "Bytes in the tier.", {one.name: one.used_bytes for one in tiers}
    )
    limits = {one.name: one.cap_bytes for one in tiers if one.cap_bytes is not None}
    yield _gauges("tiercel_tier_limit_bytes", "Bytes the tier may hold.", limits)
    yield _gauges(
        "tiercel_tier_pending_writes",
        "Blocks to be written.",
        {one.name: one.pending_writes for one in tiers},
    )
    yield _gauges(
        "tiercel_tier_pending_reads", "Blocks to be read.", {one.name: one.pending_reads for one in tiers}
    )
    breaker = GaugeMetricFamily(
        "tiercel_tier_breaker", "1 for the state that it is in.", labels=["tier", "state"]
    )
    for one in tiers:
        for state in BREAKER_STATES:
            breaker.add_metric([one.name, state], int(one.breaker == state))
    yield breaker


def _traffic(tiers: Iterable[TierStats]) -> Iterator[Metric]:
    told = {one.name: one.counters for one in tiers}
    for name, words, field in (
        ("read_blocks", "Blocks read.", "read_blocks"),
        ("read_bytes", "Bytes read.", "read_bytes"),
        ("written_blocks", "Blocks written.", "written_blocks"),
        ("written_bytes", "Bytes written.", "written_bytes"),
        ("dropped_writes", "Blocks not written: too slow, broken or full.", "writes_dropped"),
        ("over_budget_blocks", "Blocks not written: the day's budget was used up.", "over_budget"),
        ("refused_reads", "Blocks not read: the queue was full.", "reads_refused"),
        ("breaker_openings", "How often it was left alone after faults.", "breaker_opened"),
    ):
        values = {tier: getattr(counters, field) for tier, counters in told.items()}
        yield _counted(f"tiercel_tier_{name}", words, "tier", values)
    yield _histograms(
        "tiercel_tier_read_seconds",
        "Reading one block, checked.",
        "tier",
        {one.name: one.reads for one in tiers},
    )
    yield _histograms(
        "tiercel_tier_write_seconds",
        "Writing up to 8 MiB of blocks at once.",
        "tier",
        {one.name: one.writes for one in tiers},
    )


def _left(stats: StoreStats) -> Metric:
    family = CounterMetricFamily(
        "tiercel_removed_blocks", "Blocks that left a place, by reason.", labels=["place", "reason"]
    )
    for place, reasons in ((RAM, stats.left), *((one.name, one.left) for one in stats.tiers)):
        for reason, blocks in reasons.items():
            family.add_metric([place, reason], blocks)
    return family


def _faults(stats: StoreStats) -> Metric:
    family = CounterMetricFamily("tiercel_tier_faults", "Faults of tiers by kind.", labels=["tier", "kind"])
    seen = {(one.tier, one.kind): one.count for one in stats.faults}
    for tier in stats.tiers:
        for kind in FAULT_KINDS:
            family.add_metric([tier.name, kind], seen.get((tier.name, kind), 0))
    return family


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(name, words, value=value)


def _gauges(name: str, words: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, words, labels=["tier"])
    for tier, value in values.items():
        family.add_metric([tier], value)
    return family


def _counter(name: str, words: str, value: float) -> Metric:
    return CounterMetricFamily(name, words, value=value)


def _counted(name: str, words: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, words, labels=[label])
    # A copy: the store goes on counting.
    for one, value in dict(values).items():
        family.add_metric([one], value)
    return family


def _histograms(name: str, words: str, label: str, values: Mapping[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, words, labels=[label])
    for one, seen in values.items():
        bounds = [*(f"{bound:g}" for bound in seen.bounds_s), "+Inf"]
        family.add_metric([one], list(zip(bounds, accumulate(seen.counts), strict=True)), seen.sum_s)
    return family
