"""Loading a prefix from its end while the engine computes it from its beginning, until they meet.

The idea of Cake (Jin et al., "Compute Or Load KV Cache? Why Not Both?", 2024): neither waits for the other,
so a slow tier helps as far as it can and never delays. Later blocks cost more to compute, and are loaded
first. A load that fails or stalls costs nothing but the blocks it did not bring. Decides nothing about tiers.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from tiercel.blocks import Chain
from tiercel.engines.device import side_stream
from tiercel.engines.transformers.kv_cache import KVCache
from tiercel.errors import TiercelError

if TYPE_CHECKING:
    from tiercel.store import Store

# What a store may raise when it cannot serve at all: it is closed, say.
STORE_FAULTS = (TiercelError, OSError)
_BATCH = 4
# Loads that stall may hold a thread each until their deadline; more do not begin.
_THREADS_MAX = 8
_threads = threading.BoundedSemaphore(_THREADS_MAX)


class Meeting:
    """One prompt's blocks `first..len(chain)-1`. Used by the thread that computes; loads on one of its own.

    `cache` must have room for all of the chain. Blocks from `loaded_from` on are in place, all of them.
    """

    def __init__(
        self, store: Store, chain: Chain, first: int, cache: KVCache, device: torch.device, deadline_s: float
    ) -> None:
        self._store, self._chain, self._first, self._cache = store, chain, first, cache
        self._device, self._deadline_s = device, deadline_s
        self._changed = threading.Condition()
        self._computing = first - 1
        self._putting: int | None = None
        self._over = False
        self.failed = False
        self._began_s = time.perf_counter()
        self.loaded_from = len(chain)
        self.sources: Counter[str] = Counter()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Load in the background as long as the context lasts."""
        if not _threads.acquire(blocking=False):
            self._over = True
            yield
            return
        threading.Thread(target=self._run, name="tiercel-meeting", daemon=True).start()
        try:
            yield
        finally:
            self._leave()

    def claim(self, index: int, compute_s: float) -> bool:
        """Whether block `index` is to be computed, which takes about `compute_s`. False: they have met.

        Waits while the loading is expected to be done sooner than that.
        """
        with self._changed:
            until_s = time.perf_counter() + compute_s
            while index < self.loaded_from and not self._over:
                left_s = until_s - time.perf_counter()
                if left_s <= 0 or self._left_s() > left_s:
                    break
                self._changed.wait(left_s)
            while self._putting == index:
                self._changed.wait()
            if index >= self.loaded_from:
                self._over = True
                return False
            self._computing = index
            return True

    def _left_s(self) -> float:
        """How much longer the loading will take, judged by what it brought so far."""
        done = len(self._chain) - self.loaded_from
        if not done:
            return math.inf
        return (time.perf_counter() - self._began_s) / done * (self.loaded_from - self._computing - 1)

    def _leave(self) -> None:
        """From here on nothing is written to the cache any more."""
        with self._changed:
            self._over = True
            while self._putting is not None:
                self._changed.wait()

    def _run(self) -> None:
        try:
            with (
                side_stream(self._device),
                self._store.acquire(
                    self._chain, self._deadline_s, self._computing + 1, backward=True
                ) as lease,
            ):
                while not self._over and (blocks := lease.ready(_BATCH)):
                    for block in blocks:
                        if not self._put(block.index, block.payload, block.source):
                            return
                    lease.advance(len(blocks))
        except STORE_FAULTS:
            self.failed = True
        finally:
            _threads.release()
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _put(self, index: int, payload: memoryview, source: str) -> bool:
        with self._changed:
            fits = payload.nbytes == self._cache.layout.payload_bytes
            if self._over or index <= self._computing or index != self.loaded_from - 1 or not fits:
                return False
            self._putting = index
        there = False
        try:
            self._cache.put_block(index, payload)
            there = True
        finally:
            with self._changed:
                self._putting = None
                if there:
                    self.loaded_from = index
                    self.sources[source] += 1
                self._changed.notify_all()
        return True
