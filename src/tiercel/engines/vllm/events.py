"""KV events for routers: which blocks lie in which of our tiers, in vLLM's own terms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tiercel.engines.vllm.naming import Names
from tiercel.engines.vllm.scheduler import Grid
from tiercel.store import Store

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent


class EventSource:
    """TO COME."""

    def __init__(self, store: Store, grid: Grid, media: Mapping[str, str]) -> None:
        self._names: Sequence[Names] = ()

    def use(self, names: Sequence[Names]) -> None:
        """Tell of blocks under these names."""
        self._names = names

    def take(self) -> Iterable[KVCacheEvent]:
        """What happened since the last time."""
        return ()

    def close(self) -> None:
        """End."""
