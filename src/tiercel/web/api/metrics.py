"""Figures of the HTTP server for Prometheus: requests, waiting, answers; beside them those of the store.

Every figure is counted where it happens; none is estimated. What became of prompts is the store's to tell
(`tiercel.service.prometheus`), for every engine alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tiercel.engines.transformers import Result
from tiercel.service.prometheus import StoreCollector
from tiercel.web.api.engine import PolicyFigures, Store

RAM, NONE = "ram", "none"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)


class Metrics:
    """All figures of one server."""

    def __init__(
        self, store: Store, waiting_max: int, policy: PolicyFigures | None = None, lossy: Sequence[str] = ()
    ) -> None:
        self.registry = CollectorRegistry()
        one = self.registry
        self.requests = Counter(
            "tiercel_http_requests", "Requests by endpoint and HTTP status (499: the client left).",
            ["endpoint", "status"], registry=one,
        )  # fmt: skip
        self.seconds = Histogram(
            "tiercel_http_request_duration_seconds", "From the first byte to the last.",
            ["endpoint"], buckets=_SECONDS, registry=one,
        )  # fmt: skip
        self.waiting = Gauge("tiercel_http_queue_requests", "Requests waiting for the engine.", registry=one)
        self.running = Gauge("tiercel_http_running_requests", "Requests in the engine.", registry=one)
        limit = Gauge("tiercel_http_queue_limit_requests", "Requests that may wait.", registry=one)
        limit.set(waiting_max)
        self.cut = Counter(
            "tiercel_http_cut_requests", "Requests ended before their answer was whole, by reason.",
            ["reason"], registry=one,
        )  # fmt: skip
        for reason in ("disconnect", "deadline", "shutdown"):
            self.cut.labels(reason)
        self.faults = Counter("tiercel_http_internal_faults", "Faults of the server itself.", registry=one)
        self.generated = Counter("tiercel_http_generated_tokens", "Tokens of whole answers.", registry=one)
        self.ttft = Histogram(
            "tiercel_http_time_to_first_token_seconds",
            "From a request's arrival to its first token, by the slowest place its KV came from.",
            ["place"], buckets=_SECONDS, registry=one,
        )  # fmt: skip
        self.queued = Histogram(
            "tiercel_http_queue_wait_seconds", "Waiting for the engine.", buckets=_SECONDS, registry=one
        )
        inexact = Gauge(
            "tiercel_http_lossy", "1 for what may make answers other than exact.", ["by"], registry=one
        )
        for by in lossy:
            inexact.labels(by).set(1)
        one.register(StoreCollector(store.stats))
        one.register(_PolicyCollector(policy))

    def answered(self, result: Result, ttft_s: float) -> None:
        """Count one whole answer; `ttft_s` is from the request's arrival."""
        self.generated.inc(len(result.tokens))
        self.ttft.labels(slowest(result)).observe(ttft_s)

    def text(self) -> bytes:
        """The figures of this moment, in Prometheus' text format."""
        return generate_latest(self.registry)


class _PolicyCollector(Collector):
    """What answers read of their prompts, and what that moved. Without a policy all of them, and nothing."""

    def __init__(self, policy: PolicyFigures | None) -> None:
        self._policy = policy

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """The figures of this moment."""
        policy = self._policy
        share = GaugeMetricFamily(
            "tiercel_attention_share",
            "Share of a prompt's tokens that answers may read; below 1 they are not exact.",
            labels=["policy"],
        )
        share.add_metric(["full" if policy is None else policy.name], 1.0 if policy is None else policy.share)
        yield share
        for name, words, value in (
            ("steps", "Tokens generated under a policy.", 0 if policy is None else policy.steps),
            ("moved_bytes", "KV from host to device for them.", 0 if policy is None else policy.moved_bytes),
        ):
            counter = CounterMetricFamily(f"tiercel_attention_{name}", words)
            counter.add_metric([], value)
            yield counter
        peak = GaugeMetricFamily(
            "tiercel_attention_device_peak_bytes", "Most KV on the device at a time, under a policy."
        )
        peak.add_metric([], 0 if policy is None else policy.device_peak_bytes)
        yield peak


def slowest(result: Result) -> str:
    """Where an answer's KV came from: a tier if any block did, else `ram`, else `none`."""
    tiers = sorted(source for source in result.sources if source != RAM)
    return tiers[-1] if tiers else RAM if result.sources else NONE
