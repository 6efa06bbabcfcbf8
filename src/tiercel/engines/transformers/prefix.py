"""Between one model's cache and the store: names blocks, asks, copies, tells. No policy, no I/O of its own.

Whatever the store cannot give is a shorter prefix, never an error: the engine computes the rest. Stored bytes
are only ever copied; no tensor of ours outlives the step of the lease that it reads.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiercel.blocks import Chain, Identity, Scope
from tiercel.engines.transformers.kv_cache import KVCache
from tiercel.errors import TiercelError

if TYPE_CHECKING:
    from tiercel.store import Store


# What a store may raise when it cannot serve at all: it is closed, or its daemon is gone.
_FAULTS = (TiercelError, OSError)


@dataclass(frozen=True, slots=True)
class Restored:
    """What was brought back into a cache: whole `blocks`, counted by source, and the seconds it took."""

    blocks: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    lookup_s: float = 0.0
    load_s: float = 0.0


class PrefixStore:
    """One model's view of a store. `faults` counts calls that the store could not serve at all."""

    def __init__(
        self, store: Store, identity: Identity, *, adapter: bytes | None, load_deadline_s: float
    ) -> None:
        self._store, self._identity, self._adapter = store, identity, adapter
        self._load_deadline_s = load_deadline_s
        self.faults = 0

    def chain(self, tokens: Sequence[int], salt: str | None) -> Chain:
        """Names of the full blocks of `tokens` under `salt`. Raises RequestError if either is malformed."""
        return Scope(self._identity, adapter=self._adapter, salt=salt).chain(tokens)

    def restore(self, chain: Chain, cache: KVCache) -> Restored:
        """Copy the longest stored prefix of `chain` into the empty `cache`. Waits, at most its deadline."""
        started = time.perf_counter()
        found = 0
        with self._fault_is_a_miss():
            found += self._store.lookup(chain).blocks
        looked_up = time.perf_counter()
        sources: Counter[str] = Counter()
        if found:
            cache.reserve(found * self._identity.block_tokens)
            with self._fault_is_a_miss():
                self._load(chain[:found], cache, sources)
        ended = time.perf_counter()
        return Restored(sources.total(), sources, looked_up - started, ended - looked_up)

    def _load(self, chain: Chain, cache: KVCache, sources: Counter[str]) -> None:
        with self._store.acquire(chain, deadline_s=self._load_deadline_s) as lease:
            for block in lease:
                in_order = block.index == sources.total()
                if not in_order or block.payload.nbytes != cache.layout.payload_bytes:
                    self.faults += 1
                    return
                cache.restore_block(block.index, block.payload)
                sources[block.source] += 1

    def save(self, chain: Chain, cache: KVCache, start: int, stop: int, *, deadline_s: float) -> int:
        """Store blocks `start..stop-1` of `cache`, as far as there is room; returns how many were new.

        Waits for room up to `deadline_s` in all; 0 takes only what is free.
        """
        saved = 0
        if start >= stop:
            return saved
        size = cache.layout.payload_bytes
        with (
            self._fault_is_a_miss(),
            self._store.begin_store(
                chain[:stop], start=start, stop=stop, payload_bytes=size, deadline_s=deadline_s
            ) as write,
        ):
            for block in write:
                cache.save_block(block.index, block.payload)
            saved += write.commit()
        return saved

    def stored_blocks(self, chain: Chain) -> int:
        """How long a prefix of `chain` is stored. Answers from memory."""
        try:
            return self._store.lookup(chain, deadline_s=0.0).blocks
        except _FAULTS:
            self.faults += 1
            return 0

    @contextmanager
    def _fault_is_a_miss(self) -> Iterator[None]:
        try:
            yield
        except _FAULTS:
            self.faults += 1
