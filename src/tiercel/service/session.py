"""One client's connection, served by one thread: questions in, calls to the store, answers out.

A session holds at most one lease. It ends with the connection, whatever ended that but the daemon's own end,
and gives everything back. Nothing a client sends raises beyond here; what is malformed ends the session.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Protocol

from tiercel.blocks import HEADER_BYTES
from tiercel.errors import TiercelError
from tiercel.service import wire
from tiercel.store import ReadLease, TieredStore, WriteLease
from tiercel.store.policy.hints import SESSION_CHARS_MAX

log = logging.getLogger("tiercel")
_PATIENCE_S = 10.0
# No client may keep a thread of the daemon for longer than this with one question.
_DEADLINE_MAX_S = 300.0
_LIMIT_MAX = 1024
_TENANT_BYTES_MAX = 64


class Host(Protocol):
    """What a session needs of its daemon."""

    def welcome(self, hello: wire.Hello) -> tuple[wire.Welcome, list[int]]: ...

    def figures(self) -> wire.Figures: ...

    @property
    def store(self) -> TieredStore | None: ...

    @property
    def ending(self) -> bool: ...


class Session:
    """The conversation with one client."""

    def __init__(self, sock: socket.socket, host: Host) -> None:
        self._sock = sock
        self._host = host
        self._reading: ReadLease | None = None
        self._writing: WriteLease | None = None
        self._handed_out = 0
        self._greeted = False

    def run(self) -> None:
        """Answer until the client leaves, misbehaves or the socket is shut down. Blocks."""
        try:
            while (question := wire.receive_question(self._sock, _PATIENCE_S)) is not None:
                self._respond(question)
        except wire.WireError as fault:
            log.debug("a client's connection ended: %s", fault)
        finally:
            # A daemon that ends hangs up on clients that copy from their slots at this moment: nobody else
            # may get those while it still writes down.
            if not self._host.ending:
                self._give_back()
            self._sock.close()

    def _respond(self, question: wire.Question) -> None:
        fds: list[int] = []
        try:
            if isinstance(question, wire.Hello):
                answer: wire.Answer
                answer, fds = self._host.welcome(question)
                self._greeted = True
            else:
                answer = self._answer(question)
        except TiercelError as fault:
            answer = wire.Refused(str(fault))
        wire.send(self._sock, answer, fds)

    def _answer(self, question: wire.Question) -> wire.Answer:
        if not self._greeted:
            raise wire.WireError("the first message is not a hello")
        if isinstance(question, wire.AskStats):
            return self._host.figures()
        store = self._host.store
        if store is None:
            return wire.Refused("no engine has opened the store yet")
        call: Callable[[TieredStore, wire.Question], wire.Answer] = getattr(
            self, f"_on_{type(question).__name__.lower()}"
        )
        return call(store, question)

    # Leases.

    def _on_acquire(self, store: TieredStore, ask: wire.Acquire) -> wire.Answer:
        self._give_back()
        self._reading = store.acquire(
            wire.chain_of(ask.chain), _bounded(ask.deadline_s), max(0, ask.start), backward=ask.backward
        )
        return self._ready(ask.limit)

    def _on_next(self, store: TieredStore, ask: wire.Next) -> wire.Answer:
        if self._reading is None or not 0 <= ask.advance <= self._handed_out:
            raise wire.WireError("no read lease is open, or more is given back than was had")
        self._reading.advance(ask.advance)
        return self._ready(ask.limit)

    def _ready(self, limit: int) -> wire.Answer:
        assert self._reading is not None
        blocks = self._reading.ready(_limit(limit))
        self._handed_out = len(blocks)
        return wire.Blocks(
            tuple(wire.Block(one.index, one.slot, one.payload.nbytes, one.source) for one in blocks)
        )

    def _on_beginstore(self, store: TieredStore, ask: wire.BeginStore) -> wire.Answer:
        self._give_back()
        if not 0 < ask.payload_bytes <= store.arena.slot_bytes - HEADER_BYTES or ask.start < 0:
            raise wire.WireError("a block without bytes, larger than a slot, or before the first")
        self._writing = store.begin_store(
            wire.chain_of(ask.chain),
            ask.start,
            ask.stop,
            ask.payload_bytes,
            _bounded(ask.deadline_s),
            ask.sight,
        )
        return self._take(ask.limit)

    def _on_take(self, store: TieredStore, ask: wire.Take) -> wire.Answer:
        return self._take(ask.limit)

    def _take(self, limit: int) -> wire.Answer:
        if self._writing is None:
            raise wire.WireError("no write lease is open")
        blocks = self._writing.take(_limit(limit))
        return wire.Blocks(tuple(wire.Block(one.index, one.slot, one.payload.nbytes) for one in blocks))

    def _on_commit(self, store: TieredStore, ask: wire.Commit) -> wire.Answer:
        if self._writing is None:
            raise wire.WireError("no write lease is open")
        stored, self._writing = self._writing.commit(), None
        return wire.Number(stored)

    def _on_release(self, store: TieredStore, ask: wire.Release) -> wire.Answer:
        self._give_back()
        return wire.Number(0)

    def _give_back(self) -> None:
        if self._reading is not None:
            self._reading.release()
            self._reading = None
        if self._writing is not None:
            self._writing.abort()
            self._writing = None

    # The rest.

    def _on_lookup(self, store: TieredStore, ask: wire.Lookup) -> wire.Answer:
        chain = wire.chain_of(ask.chain)
        hit = store.lookup(chain, _bounded(ask.deadline_s), max(0, ask.start), ask.prompt)
        return wire.Found(hit.sources, hit.choice)

    def _on_pin(self, store: TieredStore, ask: wire.Pin) -> wire.Answer:
        chain = wire.chain_of(ask.chain)
        if ask.ttl_s > 0:
            return wire.Number(store.pin(chain, ask.ttl_s))
        store.unpin(chain)
        return wire.Number(0)

    def _on_prefetch(self, store: TieredStore, ask: wire.Prefetch) -> wire.Answer:
        deadline_s = _bounded(ask.deadline_s)
        future = store.prefetch(wire.chain_of(ask.chain), deadline_s)
        if future.cancelled():
            return wire.Refused("too many prefetches wait already")
        try:
            return wire.Number(future.result(deadline_s + 1.0))
        except TimeoutError:
            return wire.Number(0)

    def _on_demote(self, store: TieredStore, ask: wire.Demote) -> wire.Answer:
        return wire.Number(store.demote(wire.chain_of(ask.chain), _bounded(ask.deadline_s)))

    def _on_drop(self, store: TieredStore, ask: wire.Drop) -> wire.Answer:
        return wire.Number(store.drop(wire.chain_of(ask.chain), _bounded(ask.deadline_s)))

    def _on_remember(self, store: TieredStore, ask: wire.Remember) -> wire.Answer:
        if len(ask.session) > SESSION_CHARS_MAX or len(ask.tenant) > _TENANT_BYTES_MAX:
            raise wire.WireError("a session's name or a tenant that is too long")
        store.sessions.note(ask.tenant, ask.session, [wire.chain_of(one) for one in ask.chains])
        return wire.Number(0)

    def _on_recall(self, store: TieredStore, ask: wire.Recall) -> wire.Answer:
        chains = store.sessions.chains(ask.tenant, ask.session)
        return wire.Recalled(tuple(wire.named(one) for one in chains))

    def _on_clear(self, store: TieredStore, ask: wire.Clear) -> wire.Answer:
        return wire.Number(store.clear(ask.tag, _bounded(ask.deadline_s)))

    def _on_eventssince(self, store: TieredStore, ask: wire.EventsSince) -> wire.Answer:
        told = store.events(ask.after, ask.tag)
        return wire.Happened(
            told.next, told.lost, tuple((one.stored, one.key, one.place) for one in told.events)
        )

    def _on_report(self, store: TieredStore, ask: wire.Report) -> wire.Answer:
        for decision in ask.decisions[:_LIMIT_MAX]:
            store.report(decision)
        store.reports.note_lost(ask.lost + max(0, len(ask.decisions) - _LIMIT_MAX))
        return wire.Number(len(ask.decisions))

    def _on_askdecisions(self, store: TieredStore, ask: wire.AskDecisions) -> wire.Answer:
        return wire.Decided(tuple(store.decisions(_limit(ask.limit))))

    def _on_askoverview(self, store: TieredStore, ask: wire.AskOverview) -> wire.Answer:
        return wire.Seen(store.overview(ask.limit))

    def _on_askchain(self, store: TieredStore, ask: wire.AskChain) -> wire.Answer:
        chain = store.chain_of(ask.prefix)
        return wire.Recalled(() if chain is None else (wire.named(chain),))

    def _on_flush(self, store: TieredStore, ask: wire.Flush) -> wire.Answer:
        return wire.Number(int(store.flush(_bounded(ask.deadline_s))))


def _bounded(deadline_s: float) -> float:
    # `not <=` also sorts out what is no number.
    return max(0.0, deadline_s) if deadline_s <= _DEADLINE_MAX_S else _DEADLINE_MAX_S


def _limit(limit: int) -> int:
    return min(max(1, limit), _LIMIT_MAX)
