"""Lookups off the scheduler's thread: questions go in, answers are there when they are there.

One thread owns every lookup, and everything slow that naming a prompt may need (reading an adapter). The
scheduler only ever looks at an `Ask`; what is not answered by its deadline is a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tiercel.engines.vllm.adapters import Adapters
from tiercel.engines.vllm.jobs import HASH_BYTES, NOBODY, Owner
from tiercel.engines.vllm.naming import Names
from tiercel.engines.vllm.threads import Desk, Task
from tiercel.store import Hit, Prompt, Store
from tiercel.store.figures import RAM
from tiercel.store.sessions import tenant_of

log = logging.getLogger("tiercel")
# Longer than any lookup takes, also on a busy host; what it finds saves more than it costs to wait.
ASK_DEADLINE_S = 1.0
_PROBE_S = 0.05
_QUEUE_MAX = 4096


@dataclass(slots=True)
class Ask:
    """One question: how much of a prompt is cached. The fields after `until_s` are the asker's to set.

    `adapter` is (vLLM's number, path) of the request's adapter; `known` turns true once `owner` has its
    digest. `price()` is asked what computing the prompt costs; with that, `prompt`, the store chooses how
    much of a hit is worth loading. `hit` is set last, after `there`, the blocks that every shard has. What is
    found is kept for `pin_s`, and with `prefetch` brought to RAM.
    """

    request: str
    hashes: bytes
    adapter: tuple[int, str] | None
    price: Callable[[], Prompt | None]
    salt: str | None = field(default=None, repr=False)
    pin_s: float = 0.0
    prefetch: bool = False
    until_s: float = field(default_factory=lambda: time.monotonic() + ASK_DEADLINE_S)
    owner: Owner = NOBODY
    known: bool = False
    prompt: Prompt | None = None
    there: int = 0
    hit: Hit | None = None
    answered_s: float = 0.0
    answered: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Left:
    """The blocks that a session has left, to be remembered by its name."""

    request: str
    hashes: bytes
    owner: Owner
    session: str


class Asker:
    """The thread and its queue. A question that finds the queue full is answered as a miss at once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._names: Sequence[Names] = ()
        self._adapters = Adapters()
        self._desk = Desk("ask", 1, _QUEUE_MAX)

    def use(self, names: Sequence[Names]) -> None:
        """Ask under these names from now on, one per shard."""
        self._names = names

    def stuck(self) -> bool:
        """Whether a lookup has not come back for so long that others need not wait behind it."""
        return self._desk.busy_s > ASK_DEADLINE_S

    def ask(self, question: Ask) -> None:
        """Queue a question. Never blocks."""
        if not self._desk.submit(partial(self._attend, question)):
            question.hit = Hit()

    def remember(self, left: Left) -> None:
        """Queue what a session left; forgotten when the queue is full. Never blocks."""
        self.do(partial(self._remember, left))

    def do(self, task: Task) -> None:
        """Queue something else that may take its time; left undone when the queue is full. Never blocks."""
        self._desk.submit(task)

    def close(self) -> None:
        """End the thread after the question it is at. Waits a second at most."""
        self._names = ()
        self._desk.close(1.0)

    # On the thread.

    def _attend(self, question: Ask) -> None:
        try:
            self._answer(question)
        finally:
            if question.hit is None:
                question.hit = Hit()
            question.answered_s = time.monotonic()
            question.answered.set()
        self._see_to(question)

    def _answer(self, question: Ask) -> None:
        digest = None
        if question.adapter is not None:
            digest = self._adapters.digest(*question.adapter)
            if digest is None:
                return
        question.owner = Owner(digest, question.salt)
        question.known = True
        left_s = question.until_s - time.monotonic()
        if left_s <= 0 or not question.hashes:
            return
        question.prompt = question.price()
        # With others waiting, only what is known without asking around.
        probe_s = min(_PROBE_S, left_s) if not self._desk.waiting else 0.0
        shortest: Hit | None = None
        there = len(question.hashes) // HASH_BYTES
        for names in self._names:
            chain = names.chain(question.request, question.hashes, question.owner)
            hit = self._store.lookup(chain, probe_s, prompt=question.prompt)
            there = min(there, hit.blocks)
            if shortest is None or hit.worth < shortest.worth:
                shortest = hit
            if not hit.blocks:
                break
        question.there, question.hit = there, shortest

    def _see_to(self, question: Ask) -> None:
        """Do what the request's hints ask of what was found; nobody waits for it."""
        hit = question.hit
        if hit is None or not hit.blocks or not (question.pin_s or question.prefetch):
            return
        for names in self._names:
            chain = names.chain(question.request, question.hashes, question.owner)
            if question.pin_s:
                self._store.pin(chain, question.pin_s)
            if question.prefetch and any(place != RAM for place in hit.sources):
                brought = self._store.prefetch(chain)
                if hit.worth < hit.blocks:
                    # What was not worth loading may be, once it is in RAM: so the question is asked again.
                    brought.add_done_callback(lambda _: setattr(question, "answered_s", 0.0))

    def _remember(self, left: Left) -> None:
        chains = [names.chain(left.request, left.hashes, left.owner) for names in self._names]
        self._store.sessions.note(tenant_of(left.owner.salt), left.session, chains)
