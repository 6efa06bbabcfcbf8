"""Load or compute, asked of a store's own lanes: how fast each is, and whether a slow one is better by now.

The rule itself is `policy.choose`; this brings it the figures. Never waits.

Locking: called under the store's lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from tiercel.blocks import BlockKey
from tiercel.store.figures import RAM, StoreCounters
from tiercel.store.movement import Traffic
from tiercel.store.policy import Choice, Prompt, choose

# A tier that was priced out is read once in a while, lest it stays so for ever.
_TRY_AGAIN_S = 5.0
# Where that went unexpectedly well: as many more as it takes to believe it, with others or alone.
_TRY_MORE_BLOCKS = 4


class Chooser:
    """Prices prompts. `read_for_nobody(key, traffic)` starts loading a block that nobody waits for."""

    def __init__(
        self,
        traffic: Sequence[Traffic],
        counters: StoreCounters,
        read_for_nobody: Callable[[BlockKey, Traffic], bool],
    ) -> None:
        self._traffic = {one.lane.name: one for one in traffic}
        self._counters = counters
        self._read_for_nobody = read_for_nobody
        self._tried_s: dict[str, float] = {}

    def choose_locked(
        self, prompt: Prompt, keys: Sequence[BlockKey], sources: Sequence[str], start: int
    ) -> Choice:
        """How much of what was found at `sources` to load; `keys` are those from block `start` on."""
        now_s = time.monotonic()

        def seconds(source: str, blocks: int) -> float:
            if source == RAM:
                return 0.0
            traffic = self._traffic[source]
            return traffic.lane.speed.seconds(blocks, traffic.queued_reads, now_s)

        choice = choose(prompt, sources, start, seconds)
        if choice.blocks < len(sources):
            self._counters.priced_out += len(sources) - choice.blocks
            if (source := sources[choice.blocks]) != RAM:
                # Of `keys` no more were found than `sources` tells of.
                refused = zip(keys[choice.blocks :], sources[choice.blocks :], strict=False)
                there = (key for key, place in refused if place == source)
                self._try_again_locked(self._traffic[source], there, now_s)
        return choice

    def _try_again_locked(self, traffic: Traffic, keys: Iterable[BlockKey], now_s: float) -> None:
        """Read a block of a tier that was too slow to be used, for nobody: it may be better by now."""
        speed, tried_s = traffic.lane.speed, self._tried_s.get(traffic.lane.name, 0.0)
        promising = speed.promising() and tried_s < speed.observed_at_s
        if not promising and now_s - max(speed.observed_at_s, tried_s) < _TRY_AGAIN_S:
            return
        self._tried_s[traffic.lane.name] = now_s
        for key in islice(keys, _TRY_MORE_BLOCKS if promising else 1):
            self._counters.probes += self._read_for_nobody(key, traffic)
