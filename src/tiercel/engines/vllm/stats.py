"""Figures for vLLM's own logging and Prometheus: counters that only grow, gathered per step.

A figure never reaches a request: values are clamped to what a counter takes, unknown names are left out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTERS = {
    "looked_up_tokens": "Tokens of prompts that were looked up",
    "hit_tokens": "Tokens found beyond vLLM's own prefix cache",
    "loaded_tokens": "Tokens whose KV was loaded, on all ranks together",
    "loaded_bytes": "Bytes copied into vLLM's KV cache",
    "load_seconds": "Time from a load's order to its end, summed over loads",
    "loads": "Loads that ended, whole or not",
    "loads_failed": "Loads that ended early; what was missing was computed",
    "saved_blocks": "Blocks stored",
    "saved_bytes": "Bytes copied out of vLLM's KV cache",
    "save_seconds": "Time from a save's order to its end, summed over saves",
    "saves_skipped": "Saves dropped because the queue was full or the deadline passed",
    "saves_postponed": "Times a save had to wait because others held too many blocks",
    "blocks_not_whole": "Blocks not stored because a window had already moved on",
    "lookups_timed_out": "Lookups that did not answer in time",
    "hints_ignored": "Hints of requests that were none, and were left out",
    "scheduler_calls": "Calls from vLLM's scheduler",
    "scheduler_calls_slow": "Calls from vLLM's scheduler that took more than 0.5 ms",
    "scheduler_seconds": "Time spent in calls from vLLM's scheduler",
}
_SLOW_S = 0.0005


class Tally:
    """Counters since they were last taken. Thread-safe."""

    def __init__(self, counters: Mapping[str, str] = COUNTERS) -> None:
        self._counters = counters
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}

    def add(self, name: str, amount: float) -> None:
        """Count; `name` is one of the counters."""
        assert name in self._counters, name
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + max(0, amount)

    def called(self, duration_s: float) -> None:
        """Count a call from the scheduler."""
        with self._lock:
            counts = self._counts
            counts["scheduler_calls"] = counts.get("scheduler_calls", 0) + 1
            counts["scheduler_seconds"] = counts.get("scheduler_seconds", 0) + duration_s
            if duration_s > _SLOW_S:
                counts["scheduler_calls_slow"] = counts.get("scheduler_calls_slow", 0) + 1

    def take_counts(self) -> dict[str, float]:
        """What was counted since the last time."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts

    def take(self) -> TiercelStats | None:
        """What was counted since the last time, for a connector; None if nothing was."""
        counts = self.take_counts()
        return TiercelStats(data=counts) if counts else None


class Tallied(Protocol):
    """Who counts its calls from vLLM's scheduler."""

    _tally: Tally


Caller = TypeVar("Caller", bound=Tallied)
Given = ParamSpec("Given")
Answer = TypeVar("Answer")


def timed(
    call: Callable[Concatenate[Caller, Given], Answer],
) -> Callable[Concatenate[Caller, Given], Answer]:
    """Count a scheduler's call and how long it took."""

    @wraps(call)
    def wrapper(self: Caller, /, *args: Given.args, **kwargs: Given.kwargs) -> Answer:
        started_s = time.perf_counter()
        try:
            return call(self, *args, **kwargs)
        finally:
            self._tally.called(time.perf_counter() - started_s)

    return wrapper


class TiercelStats(KVConnectorStats):
    """Counts of one interval; adding two gives those of both."""

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another interval's or worker's counts."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + _clamped(amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Counts and the two ratios people look for, for a log line."""
        shown = {name: round(_clamped(self.data[name]), 6) for name in COUNTERS if name in self.data}
        looked_up = _clamped(self.data.get("looked_up_tokens", 0))
        if looked_up:
            shown["hit_rate"] = round(min(1.0, _clamped(self.data.get("hit_tokens", 0)) / looked_up), 3)
        if load_s := _clamped(self.data.get("load_seconds", 0)):
            shown["load_GB_per_s"] = round(_clamped(self.data.get("loaded_bytes", 0)) / load_s / 1e9, 2)
        return shown

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class TiercelPromMetrics(KVConnectorPromMetrics):
    """`vllm:tiercel_…` counters, one per figure and engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, documentation in COUNTERS.items():
            counter = self._counter_cls(
                name=f"vllm:tiercel_{name}", documentation=documentation, labelnames=labelnames
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's counts."""
        for name, amount in transfer_stats_data.items():
            counter = self._counters.get(name, {}).get(engine_idx)
            if counter is not None:
                counter.inc(_clamped(amount))


def _clamped(amount: object) -> float:
    """A number a counter takes: nothing negative, nothing that is not a number."""
    return float(amount) if isinstance(amount, int | float) and 0 <= amount < float("inf") else 0.0
