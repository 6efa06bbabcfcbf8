"""`TieredStore`: find the longest cached prefix, lease it, store new blocks, keep what is worth keeping.

One object, one lock, short critical sections, no I/O under the lock. Every fault of a tier is a miss and a
counter; nothing here raises for one. Engines hold this object or a client that offers the same calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

from tiercel.blocks import TAG_BYTES, BlockKey, Chain
from tiercel.blocks.record import HEADER_BYTES
from tiercel.codecs import LossyTiers
from tiercel.memory import Arena
from tiercel.store import steering
from tiercel.store.below import Below
from tiercel.store.choosing import Chooser
from tiercel.store.family import Family
from tiercel.store.faults import FaultLog
from tiercel.store.figures import RAM, Hit, StoreCounters, StoreStats
from tiercel.store.journal import Events, Journal
from tiercel.store.lane import Lane
from tiercel.store.leases import ReadLease, WriteLease
from tiercel.store.movement import Traffic
from tiercel.store.options import LaneOptions
from tiercel.store.overview import Overview, Watch
from tiercel.store.pins import Pins
from tiercel.store.policy import Decision, Prompt, SecondSight, Sight
from tiercel.store.ram import Entry, Ram, State
from tiercel.store.reports import Reports
from tiercel.store.scopes import Scopes
from tiercel.store.sessions import Sessions
from tiercel.store.workers import Workers
from tiercel.tiers import Tier

_PREFETCH_QUEUE = 64
# Pins may hold at most this share of the slots for keeping: a store that is all pins could keep nothing new.
_PINNED_SHARE = 0.5
# On-evict tiers are written ahead of need once fewer than this share of the slots is free.
_SPILL_AHEAD_SHARE = 1 / 8


class TieredStore:
    """An arena over tiers, fastest first. Thread-safe. Takes ownership of the arena and the tiers.

    `admission` None stores everything at once; `lossy` is what engines mark their blocks with. `self.lock`
    protects everything in here and below, the arena's slot list included.
    """

    def __init__(
        self,
        arena: Arena,
        tiers: Sequence[tuple[Tier, LaneOptions]] = (),
        admission: SecondSight | None = None,
        lossy: LossyTiers = LossyTiers(),  # noqa: B008 (it is frozen)
        *,
        load_always: bool = False,
    ) -> None:
        self.arena = arena
        self._load_always = load_always
        self.lossy = lossy
        self.lock = threading.Condition(threading.Lock())
        self.counters = StoreCounters()
        self.closing = False
        self.leases: set[ReadLease | WriteLease] = set()
        self.wanted: dict[BlockKey, int] = {}
        self._journal = Journal()
        self.ram = Ram(arena, self._spare_locked, self._journal)
        self.admission = admission
        self.family = Family()
        self.scopes = Scopes()
        self.reports = Reports()
        self._watch = Watch(self)
        self.sessions = Sessions()
        self._pins = Pins(int((arena.slots - arena.reserved) * _PINNED_SHARE))
        self._faults = FaultLog()
        self.below = Below(
            [
                Traffic(
                    Lane(tier, options, self.lock, self._protected_locked, self._faults, self._journal),
                    self.ram,
                    self.lock,
                    self.counters,
                    number,
                )
                for number, (tier, options) in enumerate(tiers)
            ]
        )
        self._chooser = Chooser(self.below.traffic, self.counters, self._read_for_nobody_locked)
        self._prefetches: set[Future[int]] = set()
        self._prefetchers = Workers("prefetch", 1, _PREFETCH_QUEUE)
        self.below.scan()

    # Finding.

    def lookup(
        self, chain: Chain, deadline_s: float = 0.05, start: int = 0, prompt: Prompt | None = None
    ) -> Hit:
        """The longest cached prefix of `chain`, from block `start` on: what lies before, the caller has.

        With a `prompt` it also chooses how much of that to load so that the first token comes soonest, unless
        the store is told to have all of it loaded always.

        Answers from memory, then asks tiers others may write to (or that are still being scanned) for what
        follows, for `deadline_s` at most; 0 never leaves memory. Counts as a use of what it finds.
        """
        keys = chain.keys[start:]
        with self.lock:
            sources = self.walk_locked(keys)
        until_s = time.monotonic() + deadline_s
        while deadline_s > 0 and len(sources) < len(keys) and self.below.probe(keys[len(sources) :], until_s):
            with self.lock:
                longer = self.walk_locked(keys)
            if len(longer) <= len(sources):
                break
            sources = longer
        with self.lock:
            self.counters.lookups += 1
            self.counters.looked_up += len(keys)
            self.counters.hit += len(sources)
            self._touch_locked(chain.keys[: start + len(sources)])
            choice = None
            if prompt is not None and sources and not self._load_always:
                choice = self._chooser.choose_locked(prompt, keys, sources, start)
        return Hit(tuple(sources), choice)

    def acquire(
        self, chain: Chain, deadline_s: float = 10.0, start: int = 0, *, backward: bool = False
    ) -> ReadLease:
        """Lease the cached blocks of `chain` from `start` on: none is evicted, those in tiers are loaded.

        `backward` begins with the last block, for an engine that computes the first ones meanwhile.
        """
        return ReadLease(self, chain, deadline_s, start, backward=backward)

    def begin_store(
        self,
        chain: Chain,
        start: int,
        stop: int,
        payload_bytes: int,
        deadline_s: float = 1.0,
        sight: Sight = Sight.NEW,
    ) -> WriteLease:
        """Lease room for blocks `start..stop-1` of `chain`, each `payload_bytes` long.

        `deadline_s` bounds the whole wait for slots; 0 takes only what is free at once. With an admission
        policy, `sight` says what it may make of the request.
        """
        assert HEADER_BYTES + payload_bytes <= self.arena.slot_bytes, "block larger than a slot"
        return WriteLease(self, chain, start, min(stop, len(chain)), payload_bytes, deadline_s, sight)

    # Steering.

    def pin(self, chain: Chain, ttl_s: float) -> int:
        """Keep a prefix from eviction for `ttl_s` seconds. Returns how many blocks are pinned.

        Only cached blocks are pinned, and together at most half of RAM: a pin always ends by itself.
        """
        with self.lock:
            return self._pins.add(chain.keys[: len(self.walk_locked(chain.keys))], ttl_s)

    def unpin(self, chain: Chain) -> None:
        """End the pins of a prefix now."""
        with self.lock:
            self.unpin_locked(chain.keys)

    def prefetch(self, chain: Chain, deadline_s: float = 10.0) -> Future[int]:
        """Bring a prefix up to RAM in the background. The future tells how many blocks are there then.

        Cancelled at once when too many prefetches wait already.
        """
        answer: Future[int] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            with self.acquire(chain, deadline_s) as lease:
                for _ in lease:
                    pass
            with self.lock:
                blocks = self._in_ram_locked(chain.keys)
            # Not under the lock: who waits may call the store from a callback.
            answer.set_result(blocks)

        with self.lock:
            self._prefetches.add(answer)
        answer.add_done_callback(self._prefetches.discard)
        if not self._prefetchers.submit(run):
            answer.cancel()
            answer.set_running_or_notify_cancel()
        return answer

    def demote(self, chain: Chain, deadline_s: float = 10.0) -> int:
        """Write a prompt down where tiers lack it, then free its RAM: see `steering.demote`."""
        return steering.demote(self, chain, deadline_s)

    def drop(self, chain: Chain, deadline_s: float = 10.0) -> int:
        """Forget a prompt and what follows it, but for what others share: see `steering.drop`."""
        return steering.drop(self, chain, deadline_s)

    def clear(self, tag: bytes | None = None, deadline_s: float = 30.0) -> int:
        """Drop every block of a scope (its 8-byte tag), or of all, from RAM and tiers. Returns how many.

        Nothing stored before the call is served after it, also not what is being written or loaded now.
        A tier that does not finish deleting within the deadline goes on in the background; until it has,
        it stores and finds nothing of the scope.
        """
        until_s = time.monotonic() + deadline_s
        with self.lock:
            # All at once, so that no block can slip from one place into another that was cleared before.
            for lease in self.leases:
                if isinstance(lease, WriteLease):
                    lease.clear_locked(tag)
            in_ram = [entry for entry in self.ram.entries() if tag is None or entry.key.startswith(tag)]
            for entry in in_ram:
                self.ram.remove(entry)
            self.counters.ram_cleared += len(in_ram)
            self._pins.clear(tag)
            doomed = self.below.bar_locked(tag)
            gone = {entry.key for entry in in_ram}.union(*doomed)
            self.lock.notify_all()
        for found, done in zip(doomed, self.below.purge(tag, doomed), strict=True):
            if done.wait(max(0.0, until_s - time.monotonic())):
                gone.update(found)
        with self.lock:
            self.counters.cleared += len(gone)
        return len(gone)

    # Looking and ending.

    def events(self, after: int, tag: bytes) -> Events:
        """What of a scope (its 8-byte tag) came and went since event number `after`; see `Journal`."""
        with self.lock:
            return self._journal.since(after, tag)

    def report(self, decision: Decision) -> Decision:
        """Count what became of a request. Never fails; returns the decision as it is kept."""
        return self.reports.add(decision)

    def decisions(self, limit: int = 256) -> list[Decision]:
        """What requests reported, the latest first."""
        return self.reports.latest(limit)

    def overview(self, limit: int = 64) -> Overview:
        """Figures with whose blocks lie where, shared prefixes, faults, decisions: `limit` of each."""
        return self._watch.overview(limit)

    def chain_of(self, prefix: str) -> Chain | None:
        """The chain that ends with a prefix of a recent overview, for steering it."""
        return self._watch.chain_of(prefix)

    def stats(self) -> StoreStats:
        """Figures of this moment; its counters are live objects."""
        requests, faults = self.reports.totals(), self._faults.latest()
        with self.lock:
            return StoreStats(
                slots=self.arena.slots,
                slot_bytes=self.arena.slot_bytes,
                slots_free=self.arena.free_slots,
                ram_blocks=len(self.ram),
                ram_evictions=self.ram.evictions,
                leases=len(self.leases),
                pins=self._pins.count(),
                counters=self.counters,
                tiers=self.below.stats_locked(),
                reserved=self.arena.reserved,
                lossy=self.lossy.codecs,
                requests=requests,
                faults=faults,
            )

    def scanned(self, deadline_s: float) -> bool:
        """Wait until every tier's content is indexed. Lookups do not need it; exact figures do."""
        return self.below.scanned(deadline_s)

    def flush(self, deadline_s: float = 30.0) -> bool:
        """Write down everything that tiers should have, but for what ends with this process.

        False if the deadline came first or a tier refused.
        """
        until_s, lasting = time.monotonic() + deadline_s, self.below.lasting
        with self.lock:
            refused = lasting.refused_locked()
            while True:
                lasting.give_up_locked()
                left = self._spill_locked(self.arena.slots, lasting)
                if not left and not lasting.writing_locked():
                    return not self._owed_locked(lasting) and refused == lasting.refused_locked()
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return False
                self.lock.wait(min(left_s, 0.1))

    def close(self, deadline_s: float = 30.0) -> bool:
        """Flush and end deletions within the deadline, then stop; later calls find nothing. True if flushed.

        What could not be deleted is told as a fault of its tier: the next store may find it.
        """
        with self.lock:
            if self.closing:
                return True
        until_s = time.monotonic() + deadline_s
        flushed = self.flush(deadline_s)
        with self.lock:
            self.closing = True
            self.lock.notify_all()
        self._prefetchers.close()
        for answer in list(self._prefetches):
            answer.cancel()
        self.below.close(until_s)
        with self.lock:
            self.arena.close()
        return flushed

    def __enter__(self) -> TieredStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # For leases, under the lock.

    def walk_locked(self, keys: Sequence[BlockKey]) -> list[str]:
        """Where each block of the longest cached prefix lies."""
        if self.closing:
            return []
        self.below.give_up_locked()
        lanes, now_s = self.below.lanes_locked(), time.monotonic()
        sources: list[str] = []
        get = self.ram.get
        for key in keys:
            entry = get(key)
            if entry is not None and entry.state is State.READY:
                sources.append(RAM)
                continue
            if entry is not None and entry.state is State.WRITING:
                break
            for lane in lanes:
                if lane.index.has(key, now_s):
                    sources.append(lane.name)
                    break
            else:
                break
        return sources

    def there_locked(self, key: BlockKey) -> bool:
        """Whether a block is in RAM, on its way into it or in a tier."""
        return self.ram.get(key) is not None or self.below.has_locked(key)

    def where_locked(self, key: BlockKey) -> str | None:
        """Where one block lies, if anywhere."""
        sources = self.walk_locked([key])
        return sources[0] if sources else None

    def load_locked(self, key: BlockKey, traffic: Traffic, *, tick: int, fence: int) -> Entry | None:
        """Start loading a block, into a slot to keep it in or else for staging. None: no slot, or refused."""
        slot = self.ram.take(fence, key[:TAG_BYTES])
        staged = slot is None
        if slot is None:
            slot = self.arena.allocate(staging=True)
        if slot is None:
            return None
        entry = self.ram.insert(key, slot, State.LOADING, tick, staged=staged)
        if traffic.load_locked(entry):
            self.counters.staged += staged
            return entry
        self.ram.remove(entry)
        self.ram.release(entry)
        return None

    def want_locked(self, key: BlockKey) -> None:
        """One lease more waits for a block: tiers must not evict it."""
        self.wanted[key] = self.wanted.get(key, 0) + 1

    def unwant_locked(self, key: BlockKey) -> None:
        """One lease fewer waits for a block."""
        count = self.wanted.get(key, 0)
        if count > 1:
            self.wanted[key] = count - 1
        else:
            self.wanted.pop(key, None)

    def write_down_locked(self, entry: Entry, chain: Sequence[BlockKey]) -> None:
        """Send the last block of a chain to every tier that takes blocks at once; keep some slots clean."""
        self.below.write_locked(entry, chain)
        few = self.arena.free_slots - self.arena.reserved < self.arena.slots * _SPILL_AHEAD_SHARE
        if few and self.below.any_on_evict:
            self._spill_locked(int(self.arena.slots * _SPILL_AHEAD_SHARE), self.below)

    # Inner workings.

    def _read_for_nobody_locked(self, key: BlockKey, traffic: Traffic) -> bool:
        return self.ram.get(key) is None and self.load_locked(key, traffic, tick=0, fence=0) is not None

    def _in_ram_locked(self, keys: Sequence[BlockKey]) -> int:
        for count, key in enumerate(keys):
            entry = self.ram.get(key)
            if entry is None or entry.state is not State.READY:
                return count
        return len(keys)

    def _touch_locked(self, keys: Sequence[BlockKey]) -> None:
        self.ram.touch(keys, rises=False, sunk=True)
        self.below.touch_locked(keys)

    def _spare_locked(self, entry: Entry) -> bool:
        """Whether RAM must keep an entry: it is pinned, or a tier is to have it before it goes."""
        return self.pinned_locked(entry.key) or self.below.spill_locked(entry)

    def _spill_locked(self, blocks: int, below: Below) -> int:
        """Write the coldest blocks to those tiers that lack them. Returns how many are not there yet."""
        return sum(below.spill_locked(entry) for entry in self.ram.coldest(blocks))

    def _owed_locked(self, below: Below) -> bool:
        ready = [entry for entry in self.ram.entries() if entry.state is State.READY and not entry.staged]
        return any(below.owes_locked(entry) for entry in ready)

    def unpin_locked(self, keys: Sequence[BlockKey]) -> None:
        """End the pins of some blocks."""
        self._pins.end(keys)

    def pinned_locked(self, key: BlockKey) -> bool:
        """Whether a block is kept from eviction."""
        return key in self._pins

    def _protected_locked(self, key: BlockKey) -> bool:
        """Whether a tier must keep a block: somebody pinned it, or is about to load it."""
        loading = self.ram.get(key)
        return (
            key in self.wanted
            or self.pinned_locked(key)
            or (loading is not None and loading.state is State.LOADING)
        )
