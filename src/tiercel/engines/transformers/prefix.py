"""Between one model's cache and the store: names blocks, asks, copies, tells. No I/O of its own.

Whatever the store cannot give is a shorter prefix, never an error: the engine computes the rest. Stored bytes
are only ever copied; no tensor of ours outlives the step of the lease that it reads.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tiercel.blocks import Chain, Identity, Scope
from tiercel.engines.transformers.kv_cache import KVCache
from tiercel.engines.transformers.meeting import STORE_FAULTS, Meeting
from tiercel.store import RAM, Choice, Decision, Hit, PrefillCost, Prompt, Sight

if TYPE_CHECKING:
    from tiercel.store import Store

# Computing while loading must promise to save at least this share of computing, and this one of loading: the
# cores that compute are the ones that copy.
_MEET_SHARE, _MEET_LOAD_SHARE = 0.02, 0.1
_COPY_WEIGHT = 0.2
_PREFETCH_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Found:
    """A stored prefix and what to do with it.

    Its first `load` blocks are loaded before anything is computed, for `deadline_s` at most; with `meet` the
    others are loaded from the end meanwhile.
    """

    chain: Chain
    load: int
    deadline_s: float
    meet: bool = False
    choice: Choice | None = None
    lookup_s: float = 0.0
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Restored:
    """What was brought back into a cache: whole `blocks`, counted by source, and the seconds it took."""

    blocks: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    load_s: float = 0.0


class PrefixStore:
    """One model's view of a store. `faults` counts calls that the store could not serve at all."""

    def __init__(
        self, store: Store, identity: Identity, *, adapter: bytes | None, load_deadline_s: float
    ) -> None:
        self._store, self._identity, self._adapter = store, identity, adapter
        self._load_deadline_s = load_deadline_s
        self._copy_s = 0.0
        self.faults = 0

    def chain(self, tokens: Sequence[int], salt: str | None) -> Chain:
        """Names of the full blocks of `tokens` under `salt`. Raises RequestError if either is malformed."""
        return Scope(self._identity, adapter=self._adapter, salt=salt).chain(tokens)

    def find(self, chain: Chain, tokens: int, cost: PrefillCost | None) -> Found:
        """Look the longest stored prefix of `chain` up, and choose what to do with it.

        `tokens` is the length of the whole prompt; without a `cost` to compare with, all is loaded.
        """
        started = time.perf_counter()
        size = self._identity.block_tokens
        prompt = None if cost is None else Prompt(tokens, size, cost, self._copy_s)
        hit = Hit()
        with self._fault_is_a_miss():
            hit = self._store.lookup(chain, prompt=prompt)
        lookup_s = time.perf_counter() - started
        chain, choice = chain[: hit.blocks], hit.choice
        sources = hit.sources
        if choice is None or cost is None:
            return Found(chain, hit.blocks, self._load_deadline_s, lookup_s=lookup_s, sources=sources)
        gain_s = choice.expected_s - choice.meet_s
        quick = choice.load_s <= cost.seconds(size) or gain_s < _MEET_LOAD_SHARE * choice.expected_s
        if choice.blocks == hit.blocks and quick:
            deadline_s = min(self._load_deadline_s, choice.patience_s)
            return Found(chain, hit.blocks, deadline_s, False, choice, lookup_s, sources)
        in_ram = next((at for at, source in enumerate(sources) if source != RAM), hit.blocks)
        meet = choice.meet_s < choice.recompute_s * (1 - _MEET_SHARE)
        return Found(chain, in_ram, self._load_deadline_s, meet, choice, lookup_s, sources)

    def restore(self, found: Found, cache: KVCache) -> Restored:
        """Copy the blocks to load first into the empty `cache`. Waits, at most the deadline."""
        started = time.perf_counter()
        sources: Counter[str] = Counter()
        if found.load:
            cache.reserve(len(found.chain) * self._identity.block_tokens)
            with self._fault_is_a_miss():
                self._load(found.chain[: found.load], cache, sources, found.deadline_s)
        return Restored(sources.total(), sources, time.perf_counter() - started)

    def meeting(self, found: Found, first: int, cache: KVCache, device: torch.device) -> Meeting:
        """Load blocks `first` and on of what was found, from the end, while the caller computes them."""
        return Meeting(self._store, found.chain, first, cache, device, self._load_deadline_s)

    def _load(self, chain: Chain, cache: KVCache, sources: Counter[str], deadline_s: float) -> None:
        with self._store.acquire(chain, deadline_s=deadline_s) as lease:
            for block in lease:
                in_order = block.index == sources.total()
                if not in_order or block.payload.nbytes != cache.layout.payload_bytes:
                    self.faults += 1
                    return
                copying = time.perf_counter()
                cache.restore_block(block.index, block.payload)
                self._copy_s += _COPY_WEIGHT * (time.perf_counter() - copying - self._copy_s)
                sources[block.source] += 1

    def save(
        self,
        chain: Chain,
        cache: KVCache,
        start: int,
        stop: int,
        *,
        deadline_s: float,
        sight: Sight = Sight.NEW,
    ) -> int:
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
                chain[:stop], start, stop, payload_bytes=size, deadline_s=deadline_s, sight=sight
            ) as write,
        ):
            for block in write:
                cache.save_block(block.index, block.payload)
            saved += write.commit()
        return saved

    def stored_blocks(self, chain: Chain) -> int:
        """How long a prefix of `chain` is stored. Answers from memory."""
        return self._count(lambda: self._store.lookup(chain, deadline_s=0.0).blocks)

    def report(self, decision: Decision) -> Decision:
        """Tell the store what became of a request; returns the decision as it is kept."""
        try:
            return self._store.report(decision)
        except STORE_FAULTS:
            self.faults += 1
            return decision

    # Steering: of no effect where the store cannot serve.

    def pin(self, chain: Chain, ttl_s: float) -> int:
        """Keep a prefix from eviction for `ttl_s` seconds; returns how many blocks are."""
        return self._count(lambda: self._store.pin(chain, ttl_s))

    def unpin(self, chain: Chain) -> None:
        """End the pins of a prefix."""
        with self._fault_is_a_miss():
            self._store.unpin(chain)

    def prefetch(self, chain: Chain, deadline_s: float = 10.0) -> int:
        """Bring a prefix up to RAM; waits for it. Returns how many blocks are there then."""
        grace_s = deadline_s + _PREFETCH_GRACE_S
        return self._count(lambda: self._store.prefetch(chain, deadline_s).result(grace_s))

    def demote(self, chain: Chain, deadline_s: float = 10.0) -> int:
        """Write a prompt's own blocks down and free their RAM; returns how many blocks left it."""
        return self._count(lambda: self._store.demote(chain, deadline_s))

    def drop(self, chain: Chain, deadline_s: float = 10.0) -> int:
        """Forget a prompt's own blocks everywhere; returns how many there were."""
        return self._count(lambda: self._store.drop(chain, deadline_s))

    def _count(self, call: Callable[[], int]) -> int:
        try:
            return call()
        except (*STORE_FAULTS, CancelledError):
            self.faults += 1
            return 0

    @contextmanager
    def _fault_is_a_miss(self) -> Iterator[None]:
        try:
            yield
        except STORE_FAULTS:
            self.faults += 1
