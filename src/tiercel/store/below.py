"""All tiers below RAM, asked as one: fastest first where the order matters, each of them where all must know.

Knows what lies in tiers and is on its way there, not what is in RAM, on lease or pinned. Never raises for a
fault of a tier.

Locking: methods named `*_locked` are called under the store's lock; the rest take it themselves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import cached_property

from tiercel.blocks import BlockKey
from tiercel.store.figures import TierStats
from tiercel.store.lane import Lane
from tiercel.store.lane_index import LaneIndex
from tiercel.store.movement import Traffic
from tiercel.store.options import WriteMode
from tiercel.store.ram import Entry

# A tier that has work of its own to end gets this long for it, also when writing took the whole deadline.
_TIER_CLOSE_S = 0.5
_SCAN_LOOK_S = 0.002


class Below:
    """The tiers' traffic, fastest first."""

    def __init__(self, traffic: Sequence[Traffic]) -> None:
        self.traffic = tuple(traffic)

    @cached_property
    def lasting(self) -> Below:
        """Those of them that outlive this process, and that others may write to: all but its own memory."""
        return Below([one for one in self.traffic if not one.lane.options.own_memory])

    def scan(self) -> None:
        """Begin to learn what all of them hold."""
        for traffic in self.traffic:
            traffic.scan()

    def scanned(self, deadline_s: float) -> bool:
        """Wait until every tier's content is indexed."""
        until_s = time.monotonic() + deadline_s
        while not all(traffic.lane.scanned for traffic in self.traffic):
            if time.monotonic() > until_s:
                return False
            time.sleep(_SCAN_LOOK_S)
        return True

    def close(self, until_s: float) -> bool:
        """Stop all of it until the monotonic time `until_s`, or half a second later for each tier.

        False if not all was deleted that should be.
        """
        for traffic in self.traffic:
            traffic.stop()
        finished = [traffic.join(until_s) for traffic in self.traffic]
        for traffic, all_deleted in zip(self.traffic, finished, strict=True):
            traffic.lane.close(max(_TIER_CLOSE_S, until_s - time.monotonic()), all_deleted=all_deleted)
        return all(finished)

    def stats_locked(self) -> tuple[TierStats, ...]:
        """Figures of every tier."""
        return tuple(traffic.lane.stats(traffic.queued_reads) for traffic in self.traffic)

    # Finding.

    def lanes_locked(self) -> list[Lane]:
        """The tiers that may be asked now."""
        now_s = time.monotonic()
        return [traffic.lane for traffic in self.traffic if traffic.lane.gate.available(now_s)]

    def has_locked(self, key: BlockKey) -> bool:
        """Whether any tier has a block."""
        return any(traffic.lane.has(key) for traffic in self.traffic)

    def source_of_locked(self, key: BlockKey) -> Traffic | None:
        """The fastest tier that has a block and may be asked now."""
        now_s = time.monotonic()
        for traffic in self.traffic:
            if traffic.lane.has(key) and traffic.lane.gate.available(now_s):
                return traffic
        return None

    def stuck_locked(self, source: str) -> bool:
        """Whether a tier does not answer, so that waiting for a load from it is in vain."""
        now_s = time.monotonic()
        lanes = [traffic.lane for traffic in self.traffic if traffic.lane.name == source]
        return any(lane.gate.stuck(now_s) for lane in lanes)

    def indexes(self) -> list[tuple[LaneIndex, str]]:
        """What each tier holds, and its name."""
        return [(traffic.lane.index, traffic.lane.name) for traffic in self.traffic]

    def probe(self, keys: Sequence[BlockKey], until_s: float) -> bool:
        """Ask tiers that others may write to for blocks not known here; whether any was found in time."""
        found = [traffic.probe(keys, until_s - time.monotonic()) for traffic in self.lasting.traffic]
        return max(found, default=0) > 0

    def touch_locked(self, keys: Sequence[BlockKey]) -> None:
        """Date a chain as used now in every tier."""
        for traffic in self.traffic:
            traffic.lane.index.touch(keys)

    # Writing.

    @property
    def any_on_evict(self) -> bool:
        """Whether any tier gets blocks only when RAM needs their slots."""
        return any(traffic.lane.options.write is WriteMode.ON_EVICT for traffic in self.traffic)

    def write_locked(self, entry: Entry, chain: Sequence[BlockKey]) -> None:
        """Send the last block of a chain to every tier that takes blocks at once."""
        for traffic in self.traffic:
            if traffic.lane.has(entry.key):
                traffic.has_locked(entry)
            elif traffic.lane.options.write is WriteMode.THROUGH:
                traffic.write_locked(entry, chain)

    def spill_locked(self, entry: Entry) -> bool:
        """See to it that every tier that should have a block gets it. True: it must stay until they do."""
        return any([traffic.spill_locked(entry) for traffic in self.traffic])  # noqa: C419 (each is asked)

    def owes_locked(self, entry: Entry) -> bool:
        """Whether a tier should have a block but was never asked to take it."""
        return any(traffic.owes_locked(entry) for traffic in self.traffic)

    def writing_locked(self) -> bool:
        """Whether any block waits to be written, or is being."""
        return any(traffic.lane.pending_writes for traffic in self.traffic)

    def refused_locked(self) -> int:
        """How many writes were dropped so far."""
        return sum(traffic.lane.counters.writes_dropped for traffic in self.traffic)

    def give_up_locked(self) -> None:
        """Drop what waits for tiers that are down or stuck."""
        now_s = time.monotonic()
        for traffic in self.traffic:
            traffic.give_up_locked(now_s)

    def make_way_locked(self, fence: int) -> bool:
        """RAM is full of blocks for slow tiers: drop their oldest stores, none younger than tick `fence`."""
        return any([traffic.make_way_locked(fence) for traffic in self.traffic])  # noqa: C419 (each is asked)

    # Deleting.

    def count_dropped_locked(self, keys: Sequence[BlockKey]) -> None:
        """These blocks are about to be forgotten, wherever they are."""
        for traffic in self.traffic:
            lane = traffic.lane
            lane.counters.dropped_blocks += sum(lane.index.bytes_of(key) is not None for key in keys)

    def forget(self, keys: Sequence[BlockKey]) -> list[threading.Event]:
        """Delete records everywhere, in the background. Each is set when its tier is done."""
        return [traffic.deletions.forget(keys) for traffic in self.traffic]

    def bar_locked(self, tag: bytes | None) -> list[dict[BlockKey, int]]:
        """A scope is cleared: find nothing of it until it is purged. Its records by tier, with bytes."""
        return [traffic.lane.bar_locked(tag) for traffic in self.traffic]

    def purge(self, tag: bytes | None, doomed: Sequence[dict[BlockKey, int]]) -> list[threading.Event]:
        """Delete a barred scope's records, in the background. Each is set when its tier is done."""
        return [
            traffic.deletions.purge(tag, found) for traffic, found in zip(self.traffic, doomed, strict=True)
        ]
