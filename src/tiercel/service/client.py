"""`RemoteStore`: a daemon's store with the calls of `TieredStore`. A daemon that is gone is a miss.

Control goes over the socket, bytes only through the mapped arena. A lease has a connection of its own, so
whatever happens to this process, the daemon gets its slots back. No call raises for a fault of the daemon,
and none waits much longer than the deadline it was given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self, TypeVar

from tiercel.blocks import HEADER_BYTES, BlockKey, Chain, payload_of
from tiercel.codecs import LossyTiers
from tiercel.service import wire
from tiercel.service.link import Connection, Link, Slab
from tiercel.service.reporting import Reporting
from tiercel.store import (
    Decision,
    Event,
    Events,
    Hit,
    LeasedBlock,
    NewBlock,
    Overview,
    Prompt,
    Sight,
    StoreCounters,
    StoreStats,
)
from tiercel.store.sessions import BLOCKS_MAX
from tiercel.store.workers import Workers

Kind = TypeVar("Kind", bound=wire.Answer)
# What the way there and back and a busy host may add to a deadline.
_GRACE_S = 1.0
_CALL_S = 5.0
# Nobody waits for a session to be remembered; who asks must not be kept from lookups for long.
_SESSION_S = 0.5
# Nobody waits for a report.
_REPORT_S = 1.0
_PREFETCH_QUEUE = 64
_NOTHING = StoreStats(
    slots=0, slot_bytes=0, slots_free=0, ram_blocks=0, ram_evictions=0, leases=0, pins=0,
    counters=StoreCounters(), tiers=(),
)  # fmt: skip


class RemoteStore:
    """The store of the daemon at the other end of a link. Thread-safe; a lease belongs to one thread.

    With `load_always` it is never asked how much of what is found is worth loading.
    """

    def __init__(self, link: Link, *, load_always: bool = False) -> None:
        self._link, self._load_always = link, load_always
        self._prefetchers = Workers("remote-prefetch", 1, _PREFETCH_QUEUE)
        self._reporting = Reporting(self._send_reports)

    @property
    def up(self) -> bool:
        """Whether the daemon answered last time."""
        return self._link.up

    @property
    def failures(self) -> int:
        """How many calls the daemon did not answer so far."""
        return self._link.failures

    @property
    def slot_payload_bytes(self) -> int:
        """Largest block the daemon takes, in bytes; 0 before it was ever reached."""
        slab = self._link.slab
        return 0 if slab is None else slab.slot_bytes - HEADER_BYTES

    @property
    def lossy(self) -> LossyTiers:
        """The lossy codecs of the daemon's tiers; none before it was reached (all is kept exactly then)."""
        slab = self._link.slab
        return LossyTiers() if slab is None else slab.lossy

    @property
    def slab(self) -> memoryview | None:
        """The mapped arena, for registering it with a device."""
        return None if self._link.slab is None else self._link.slab.view

    def on_new_slab(self, tell: Callable[[memoryview], None]) -> None:
        """Call `tell` with the mapped arena whenever a restarted daemon brings another one."""
        self._link.on_new_slab.append(lambda slab: tell(slab.view))

    def lookup(
        self, chain: Chain, deadline_s: float = 0.05, start: int = 0, prompt: Prompt | None = None
    ) -> Hit:
        """See `TieredStore.lookup`."""
        question = wire.Lookup(wire.named(chain), deadline_s, start, None if self._load_always else prompt)
        found = self._call(question, wire.Found, deadline_s)
        return Hit() if found is None else Hit(found.sources, found.choice)

    def acquire(
        self, chain: Chain, deadline_s: float = 10.0, start: int = 0, *, backward: bool = False
    ) -> RemoteReading:
        """See `TieredStore.acquire`."""
        return RemoteReading(self._link, chain, deadline_s, start, backward=backward)

    def begin_store(
        self,
        chain: Chain,
        start: int,
        stop: int,
        payload_bytes: int,
        deadline_s: float = 1.0,
        sight: Sight = Sight.NEW,
    ) -> RemoteWriting:
        """See `TieredStore.begin_store`."""
        stop = min(stop, len(chain))
        return RemoteWriting(self._link, chain, start, stop, payload_bytes, deadline_s, sight)

    def pin(self, chain: Chain, ttl_s: float) -> int:
        """See `TieredStore.pin`."""
        return self._number(wire.Pin(wire.named(chain), ttl_s), _CALL_S)

    def unpin(self, chain: Chain) -> None:
        """See `TieredStore.unpin`."""
        self._number(wire.Pin(wire.named(chain), 0.0), _CALL_S)

    def prefetch(self, chain: Chain, deadline_s: float = 10.0) -> Future[int]:
        """See `TieredStore.prefetch`."""
        answer: Future[int] = Future()

        def run() -> None:
            if answer.set_running_or_notify_cancel():
                answer.set_result(
                    self._number(wire.Prefetch(wire.named(chain), deadline_s), deadline_s + 1.0)
                )

        if not self._prefetchers.submit(run):
            answer.cancel()
            answer.set_running_or_notify_cancel()
        return answer

    def demote(self, chain: Chain, deadline_s: float = 10.0) -> int:
        """See `TieredStore.demote`."""
        return self._number(wire.Demote(wire.named(chain), deadline_s), deadline_s)

    def drop(self, chain: Chain, deadline_s: float = 10.0) -> int:
        """See `TieredStore.drop`."""
        return self._number(wire.Drop(wire.named(chain), deadline_s), deadline_s)

    @property
    def sessions(self) -> RemoteSessions:
        """See `TieredStore.sessions`."""
        return RemoteSessions(self)

    def clear(self, tag: bytes | None = None, deadline_s: float = 30.0) -> int:
        """See `TieredStore.clear`."""
        return self._number(wire.Clear(tag, deadline_s), deadline_s)

    def report(self, decision: Decision) -> Decision:
        """See `TieredStore.report`: told in the background, and lost should the daemon be away."""
        return self._reporting.add(decision)

    def _send_reports(self, decisions: tuple[Decision, ...], lost: int) -> bool:
        return self._call(wire.Report(decisions, lost), wire.Number, _REPORT_S) is not None

    def decisions(self, limit: int = 256) -> list[Decision]:
        """See `TieredStore.decisions`; empty while the daemon is away."""
        told = self._call(wire.AskDecisions(limit), wire.Decided, _CALL_S)
        return [] if told is None else list(told.decisions)

    def overview(self, limit: int = 64) -> Overview:
        """See `TieredStore.overview`; all zeros and empty while the daemon is away."""
        seen = self._call(wire.AskOverview(limit), wire.Seen, _CALL_S)
        return Overview(time.time(), _NOTHING) if seen is None else seen.overview

    def chain_of(self, prefix: str) -> Chain | None:
        """See `TieredStore.chain_of`."""
        told = self._call(wire.AskChain(prefix), wire.Recalled, _CALL_S)
        try:
            return None if told is None or not told.chains else wire.chain_of(told.chains[0])
        except wire.WireError:
            return None

    def stats(self) -> StoreStats:
        """See `TieredStore.stats`; all zeros while the daemon is away."""
        figures = self.figures()
        return _NOTHING if figures is None or figures.stats is None else figures.stats

    def figures(self) -> wire.Figures | None:
        """What the daemon says of itself; None while it is away."""
        return self._call(wire.AskStats(), wire.Figures, _CALL_S)

    def events(self, after: int, tag: bytes) -> Events:
        """See `TieredStore.events`. After a restart of the daemon `lost` is set."""
        told = self._call(wire.EventsSince(after, tag), wire.Happened, _CALL_S)
        if told is None:
            return Events(after)
        events = tuple(Event(stored, BlockKey(key), place) for stored, key, place in told.events)
        return Events(told.next, events, told.lost)

    def flush(self, deadline_s: float = 30.0) -> bool:
        """See `TieredStore.flush`."""
        return self._number(wire.Flush(deadline_s), deadline_s) == 1

    def close(self, deadline_s: float = 30.0) -> bool:
        """Leave the daemon; what it holds stays there. True."""
        self._prefetchers.close()
        self._reporting.close()
        self._link.close()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _number(self, question: wire.Question, deadline_s: float) -> int:
        answer = self._call(question, wire.Number, deadline_s)
        return 0 if answer is None else answer.value

    def _call(self, question: wire.Question, kind: type[Kind], deadline_s: float) -> Kind | None:
        until_s = time.monotonic() + deadline_s + _GRACE_S
        connection = self._link.get(deadline_s + _GRACE_S)
        if connection is None:
            return None
        try:
            answer = connection.ask(question, until_s - time.monotonic())
            if not isinstance(answer, kind | wire.Refused):
                raise wire.WireError(f"answered {type(answer).__name__} to {type(question).__name__}")
        except wire.WireError as fault:
            self._link.broken(connection, fault)
            return None
        self._link.put(connection)
        return None if isinstance(answer, wire.Refused) else answer


class RemoteSessions:
    """The table of sessions that the daemon keeps; see `Sessions`. Of no effect while it is away."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = store

    def note(self, tenant: bytes, session: str, chains: Sequence[Chain]) -> None:
        """See `Sessions.note`."""
        if sum(len(chain) for chain in chains) > BLOCKS_MAX:
            chains = ()
        told = wire.Remember(tenant, session, tuple(wire.named(one) for one in chains))
        self._store._call(told, wire.Number, _SESSION_S)

    def chains(self, tenant: bytes, session: str) -> tuple[Chain, ...]:
        """See `Sessions.chains`."""
        known = self._store._call(wire.Recall(tenant, session), wire.Recalled, _CALL_S)
        try:
            return () if known is None else tuple(wire.chain_of(one) for one in known.chains)
        except wire.WireError:
            return ()


class _Lease:
    """A connection that carries a lease, until the lease ends or the daemon fails."""

    def __init__(self, link: Link, deadline_s: float) -> None:
        self._link = link
        self._until_s = time.monotonic() + deadline_s
        self._connection: Connection | None = link.get(deadline_s + _GRACE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(wire.Release())

    def _ask(self, question: wire.Question) -> wire.Answer | None:
        """The answer; None, and the lease is over, if there is none in time."""
        if self._connection is None:
            return None
        try:
            left_s = max(0.0, self._until_s - time.monotonic())
            return self._connection.ask(question, left_s + _GRACE_S)
        except wire.WireError as fault:
            connection, self._connection = self._connection, None
            self._link.broken(connection, fault)
            return None

    def _blocks(self, question: wire.Question) -> list[tuple[wire.Block, memoryview]]:
        """The blocks of an answer with their payloads; a slot that does not exist ends the lease."""
        answer = self._ask(question)
        slab = None if self._connection is None else self._connection.slab
        if not isinstance(answer, wire.Blocks) or slab is None:
            return []
        if not all(_fits(one, slab) for one in answer.blocks):
            self._end(wire.Release())
            return []
        return [(one, payload_of(slab.slot(one.slot), one.payload_bytes)) for one in answer.blocks]

    def _end(self, question: wire.Question) -> wire.Answer | None:
        answer = self._ask(question)
        connection, self._connection = self._connection, None
        if connection is not None:
            self._link.put(connection)
        return answer


class RemoteReading(_Lease):
    """A prefix on lease from a daemon; see `ReadLease`."""

    def __init__(
        self, link: Link, chain: Chain, deadline_s: float, start: int, *, backward: bool = False
    ) -> None:
        super().__init__(link, deadline_s)
        self._opening: Callable[[int], wire.Question] | None = lambda limit: wire.Acquire(
            wire.named(chain), deadline_s, start, limit, backward
        )
        self._done = 0

    def __iter__(self) -> Iterator[LeasedBlock]:
        while blocks := self.ready(1):
            try:
                yield blocks[0]
            finally:
                self.advance(1)

    def ready(self, limit: int) -> list[LeasedBlock]:
        """See `ReadLease.ready`."""
        if self._opening is not None:
            question, self._opening = self._opening(limit), None
        else:
            question = wire.Next(self._done, limit)
            self._done = 0
        return [
            LeasedBlock(one.index, payload, one.source, one.slot) for one, payload in self._blocks(question)
        ]

    def advance(self, count: int) -> None:
        """See `ReadLease.advance`. The daemon is told with the next question."""
        self._done += count

    def release(self) -> None:
        """See `ReadLease.release`."""
        self._end(wire.Release())


class RemoteWriting(_Lease):
    """Room for new blocks on lease from a daemon; see `WriteLease`."""

    def __init__(
        self,
        link: Link,
        chain: Chain,
        start: int,
        stop: int,
        payload_bytes: int,
        deadline_s: float,
        sight: Sight = Sight.NEW,
    ) -> None:
        super().__init__(link, deadline_s)
        self._payload_bytes = payload_bytes
        self._opening: Callable[[int], wire.Question] | None = lambda limit: wire.BeginStore(
            wire.named(chain), start, stop, payload_bytes, deadline_s, limit, sight
        )

    def __iter__(self) -> Iterator[NewBlock]:
        while blocks := self.take(1):
            yield blocks[0]

    def take(self, limit: int) -> list[NewBlock]:
        """See `WriteLease.take`."""
        question: wire.Question = wire.Take(limit)
        if self._opening is not None:
            question, self._opening = self._opening(limit), None
        return [NewBlock(one.index, payload, one.slot) for one, payload in self._blocks(question)]

    def commit(self) -> int:
        """See `WriteLease.commit`."""
        if self._opening is not None:
            self.abort()
            return 0
        answer = self._end(wire.Commit())
        return answer.value if isinstance(answer, wire.Number) else 0

    def abort(self) -> None:
        """See `WriteLease.abort`."""
        self._end(wire.Release())


def _fits(block: wire.Block, slab: Slab) -> bool:
    return 0 <= block.slot < slab.slots and 0 < block.payload_bytes <= slab.slot_bytes - HEADER_BYTES
