"""A store that someone meddles with between an engine's lookup and its load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tiercel.store import TieredStore


class Meddled:
    """Does `before_load` before each load; counts them."""

    def __init__(self, inner: TieredStore) -> None:
        self.inner = inner
        self.before_load: Callable[[Any], None] | None = None
        self.loads = 0

    def acquire(self, chain: Any, deadline_s: float = 10.0, start: int = 0) -> Any:
        self.loads += 1
        if self.before_load is not None:
            self.before_load(chain)
        return self.inner.acquire(chain, deadline_s, start)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def drop_blocks(store: TieredStore, chain: Any, blocks: Sequence[int]) -> None:
    with store.lock:
        for block in blocks:
            entry = store.ram.get(chain.keys[block])
            if entry is not None:
                store.ram.remove(entry)
