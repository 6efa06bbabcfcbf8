"""Figures for Prometheus, in a registry of their own: requests, tokens, waiting, and what the store tells.

Every figure is counted where it happens or read from the store when asked for; none is estimated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tiercel.engines.transformers import Result
from tiercel.store import StoreStats, TierCounters
from tiercel.web.api.engine import Store

RAM, NONE = "ram", "none"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)


class Metrics:
    """All figures of one server."""

    def __init__(self, store: Store, block_tokens: int, waiting_max: int) -> None:
        self.registry = CollectorRegistry()
        self._block_tokens = block_tokens
        one = self.registry
        self.requests = Counter(
            "tiercel_http_requests", "Requests by endpoint and HTTP status (499: the client left).",
            ["endpoint", "status"], registry=one,
        )  # fmt: skip
        self.seconds = Histogram(
            "tiercel_http_request_duration_seconds", "From the first byte to the last.",
            ["endpoint"], buckets=_SECONDS, registry=one,
        )  # fmt: skip
        self.waiting = Gauge("tiercel_queue_requests", "Requests waiting for the engine.", registry=one)
        self.running = Gauge("tiercel_running_requests", "Requests in the engine.", registry=one)
        limit = Gauge("tiercel_queue_limit_requests", "Requests that may wait.", registry=one)
        limit.set(waiting_max)
        self.cut = Counter(
            "tiercel_cut_requests", "Requests ended before their answer was whole, by reason.",
            ["reason"], registry=one,
        )  # fmt: skip
        for reason in ("disconnect", "deadline", "shutdown"):
            self.cut.labels(reason)
        self.faults = Counter("tiercel_internal_faults", "Faults of the server itself.", registry=one)
        self.prompt = Counter("tiercel_prompt_tokens", "Tokens of answered prompts.", registry=one)
        self.reused = Counter(
            "tiercel_reused_tokens", "Prompt tokens whose KV was restored, by where it lay.",
            ["source"], registry=one,
        )  # fmt: skip
        self.generated = Counter("tiercel_generated_tokens", "Tokens of answers.", registry=one)
        self.ttft = Histogram(
            "tiercel_time_to_first_token_seconds",
            "From a request's arrival to its first token, by the slowest place its KV came from.",
            ["source"], buckets=_SECONDS, registry=one,
        )  # fmt: skip
        self.queued = Histogram(
            "tiercel_queue_wait_seconds", "Waiting for the engine.", buckets=_SECONDS, registry=one
        )
        one.register(_StoreFigures(store))

    def answered(self, result: Result, ttft_s: float) -> None:
        """Count one whole answer; `ttft_s` is from the request's arrival."""
        self.prompt.inc(result.prompt_tokens)
        self.generated.inc(len(result.tokens))
        for source, blocks in result.sources.items():
            self.reused.labels(source).inc(blocks * self._block_tokens)
        self.ttft.labels(slowest(result)).observe(ttft_s)

    def text(self) -> bytes:
        """The figures of this moment, in Prometheus' text format."""
        return generate_latest(self.registry)


def slowest(result: Result) -> str:
    """Where an answer's KV came from: a tier if any block did, else `ram`, else `none`."""
    tiers = sorted(source for source in result.sources if source != RAM)
    return tiers[-1] if tiers else RAM if result.sources else NONE


class _StoreFigures(Collector):
    """Reads the store when Prometheus asks."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def describe(self) -> Iterable[Metric]:
        return ()  # or the registry would ask for figures once at start

    def collect(self) -> Iterable[Metric]:
        stats = self._store.stats()
        yield from _ram(stats)
        yield from _tiers(stats)


def _ram(stats: StoreStats) -> Iterable[Metric]:
    gauges = {
        "slots": (stats.slots, "Slots of the RAM tier."),
        "slots_free": (stats.slots_free, "Slots of the RAM tier that hold nothing."),
        "slot_bytes": (stats.slot_bytes, "Bytes of one slot."),
        "ram_blocks": (stats.ram_blocks, "Blocks in the RAM tier."),
        "leases": (stats.leases, "Leases held now."),
        "pins": (stats.pins, "Blocks kept from eviction."),
    }
    for name, (value, words) in gauges.items():
        yield GaugeMetricFamily(f"tiercel_store_{name}", words, value=value)
    counted = stats.counters
    counters = {
        "ram_evicted_blocks": (stats.ram_evictions, "Blocks evicted from RAM."),
        "lookups": (counted.lookups, "Lookups."),
        "looked_up_blocks": (counted.looked_up, "Blocks asked for."),
        "hit_blocks": (counted.hit, "Blocks found."),
        "stored_blocks": (counted.stored, "Blocks newly stored."),
        "skipped_blocks": (counted.stores_skipped, "Blocks not stored: no room in time."),
        "aborted_blocks": (counted.stores_aborted, "Blocks begun and not stored."),
        "not_admitted_blocks": (counted.not_admitted, "Blocks not stored: seen for the first time."),
        "priced_out_blocks": (counted.priced_out, "Blocks found, and not loaded: computing them is faster."),
        "tries": (counted.probes, "Blocks read from a tier too slow to be used, to see how it is now."),
        "demoted_blocks": (counted.demoted, "Blocks whose RAM was freed on demand."),
        "dropped_blocks": (counted.dropped, "Blocks of single prompts forgotten on demand."),
        "failed_loads": (counted.loads_failed, "Blocks a tier could not give."),
        "timed_out_loads": (counted.loads_timed_out, "Loads that took longer than allowed."),
        "cleared_blocks": (counted.cleared, "Blocks dropped on demand."),
    }
    for name, (value, words) in counters.items():
        yield CounterMetricFamily(f"tiercel_store_{name}", words, value=value)
    loaded = CounterMetricFamily("tiercel_store_loaded_blocks", "Blocks loaded from tiers.", labels=["tier"])
    for tier, blocks in dict(counted.loaded).items():
        loaded.add_metric([tier], blocks)
    yield loaded


def _tiers(stats: StoreStats) -> Iterable[Metric]:
    gauges = {
        "blocks": GaugeMetricFamily("tiercel_tier_blocks", "Blocks in the tier.", labels=["tier"]),
        "used": GaugeMetricFamily("tiercel_tier_used_bytes", "Bytes in the tier.", labels=["tier"]),
        "cap": GaugeMetricFamily("tiercel_tier_limit_bytes", "Bytes the tier may hold.", labels=["tier"]),
        "writes": GaugeMetricFamily("tiercel_tier_pending_writes", "Blocks to be written.", labels=["tier"]),
        "up": GaugeMetricFamily("tiercel_tier_up", "0: left alone after faults.", labels=["tier"]),
    }  # fmt: skip
    for tier in stats.tiers:
        values = {
            "blocks": tier.blocks, "used": tier.used_bytes, "cap": tier.cap_bytes,
            "writes": tier.pending_writes, "up": 0 if tier.breaker == "open" else 1,
        }  # fmt: skip
        for key, value in values.items():
            if value is not None:
                gauges[key].add_metric([tier.name], value)
    yield from gauges.values()
    for item in fields(TierCounters):
        # Prometheus spells units out: read_s is read_seconds.
        name = f"{item.name[:-2]}_seconds" if item.name.endswith("_s") else item.name
        family = CounterMetricFamily(f"tiercel_tier_{name}", f"Tier counter {name}.", labels=["tier"])
        for tier in stats.tiers:
            family.add_metric([tier.name], getattr(tier.counters, item.name))
        yield family
