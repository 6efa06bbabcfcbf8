"""How much was prefetched and backed up, as SGLang's metrics want it. A figure never reaches a request."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_KEPT_MAX = 4096


class Tally:
    """Batches since the last time: pages and GB/s of each. Thread-safe, bounded; nothing unless `wanted`."""

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._lock = threading.Lock()
        self._batches: dict[str, deque[tuple[int, float]]] = {
            "prefetch": deque(maxlen=_KEPT_MAX),
            "backup": deque(maxlen=_KEPT_MAX),
        }

    @contextmanager
    def batch(self, kind: str, page_bytes: int) -> Iterator[list[int]]:
        """Time a batch; the caller appends the number of pages it moved."""
        started_s = time.perf_counter()
        moved: list[int] = []
        yield moved
        pages = sum(moved)
        if self._wanted and pages:
            duration_s = max(time.perf_counter() - started_s, 1e-9)
            with self._lock:
                self._batches[kind].append((pages, pages * page_bytes / duration_s / 1e9))

    def take(self) -> Any | None:  # SGLang's own class, wherever it lies
        """A `StorageMetrics` of what was counted since the last time; None where SGLang has none."""
        metrics = _metrics() if self._wanted else None
        if metrics is None:
            return None
        with self._lock:
            for kind, batches in self._batches.items():
                getattr(metrics, f"{kind}_pgs").extend(pages for pages, _ in batches)
                getattr(metrics, f"{kind}_bandwidth").extend(rate for _, rate in batches)
                batches.clear()
        return metrics


def _metrics() -> Any | None:
    try:
        from sglang.srt.observability.metrics_collector import (  # type: ignore[import-not-found]  # optional
            StorageMetrics,
        )
    except ImportError:
        return None
    return StorageMetrics()
