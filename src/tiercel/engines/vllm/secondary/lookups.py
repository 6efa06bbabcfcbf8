"""Which chunks are there: asked by vLLM's scheduler chunk by chunk, answered by a thread prompt by prompt.

What a step asks is put together when the step ends and goes to the daemon as one question per request. Until
it is answered the scheduler is told to retry; what is not answered by its deadline is a miss. A chunk that
could not be loaded stays a miss for its request, so that nothing is tried for ever.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import LookupResult

from tiercel.blocks import Chain
from tiercel.engines.vllm.asker import ASK_DEADLINE_S
from tiercel.engines.vllm.jobs import NOBODY
from tiercel.engines.vllm.naming import Names
from tiercel.engines.vllm.secondary.prefixes import Prefixes, Run
from tiercel.engines.vllm.stats import Tally
from tiercel.engines.vllm.threads import Desk
from tiercel.store import Prompt, Store
from tiercel.store.policy import Hints

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext

Noted = Callable[[Chain, Run], None]

_PROBE_S = 0.05
_WAITING_MAX = 4096
# Gaps that one question looks beyond, in a group of which the last chunks alone are wanted.
_GAPS_MAX = 16
_NONE: frozenset[bytes] = frozenset()


@dataclass(slots=True)
class Question:
    """Chunks of one request asked for in one step. `found` is the answering thread's to set."""

    keys: list[OffloadKey] = field(default_factory=list)
    runs: Sequence[Run] = ()
    until_s: float = math.inf
    pin_s: float = 0.0
    prompt: Prompt | None = None
    found: frozenset[bytes] | None = None


@dataclass(slots=True)
class Request:
    """What is known of a request that vLLM has not finished."""

    hints: Hints
    prefixes: Prefixes
    asked: dict[OffloadKey, Question] = field(default_factory=dict)
    asking: Question | None = None
    lost: set[OffloadKey] = field(default_factory=set)
    # Computed under weights that may have been replaced since: nothing of it is stored any more.
    stale: bool = False


class Lookups:
    """The scheduler's side belongs to the scheduler's thread. `noted` is told of chunks that were found."""

    def __init__(
        self, store: Store, names: Names, windowed: frozenset[bytes], tally: Tally, noted: Noted | None
    ) -> None:
        self._store = store
        self._names = names
        self._windowed = windowed
        self._tally = tally
        self._noted = noted
        self._requests: dict[str, Request] = {}
        self._asking: list[Request] = []
        self._desk = Desk("ask", 1, _WAITING_MAX)

    # On the scheduler's thread.

    def request(self, context: ReqContext, hints: Hints = Hints()) -> Request:  # noqa: B008 (it is frozen)
        """A request, new or known."""
        known = self._requests.get(context.req_id)
        if known is None:
            known = self._requests[context.req_id] = Request(hints, Prefixes(context))
        return known

    def forget(self, name: str) -> None:
        """A request is over."""
        self._requests.pop(name, None)

    def look(self, request: Request, key: OffloadKey) -> LookupResult:
        """Whether a chunk is there, as far as it is known by now."""
        if not request.hints.load or key in request.lost:
            return LookupResult.MISS
        question = request.asked.get(key)
        if question is None:
            if self._desk.busy_s > ASK_DEADLINE_S:
                return LookupResult.MISS
            self._ask(request, key)
            return LookupResult.RETRY
        found = question.found
        if found is None:
            if time.monotonic() < question.until_s:
                return LookupResult.RETRY
            self._tally.add("lookups_timed_out", 1)
            found = question.found = _NONE
        return LookupResult.HIT if key in found else LookupResult.MISS

    def lost(self, name: str, keys: Collection[OffloadKey]) -> None:
        """These could not be loaded for a request: it shall not ask for them again."""
        if (request := self._requests.get(name)) is not None:
            request.lost.update(keys)

    def send(self, priced: Callable[[Question], Prompt | None]) -> None:
        """A step is over: ask what it wanted to know."""
        asking, self._asking = self._asking, []
        for request in asking:
            question, request.asking = request.asking, None
            assert question is not None
            question.until_s = time.monotonic() + ASK_DEADLINE_S
            question.runs = request.prefixes.runs(question.keys)
            question.pin_s = request.hints.pin_s
            question.prompt = priced(question)
            if not self._desk.submit(partial(self._attend, question, self._names)):
                question.found = _NONE

    def touch(self, request: Request, keys: Collection[OffloadKey]) -> None:
        """Let chunks count as used; forgotten when too much else waits."""
        question = Question(list(keys), request.prefixes.runs(keys), time.monotonic() + ASK_DEADLINE_S)
        self._desk.submit(partial(self._attend, question, self._names))

    def restart(self, names: Names) -> None:
        """Go by other names from now on; nothing of the requests under way is stored under them."""
        self._names = names
        self._asking = []
        for request in self._requests.values():
            request.asked, request.asking, request.stale = {}, None, True

    def close(self) -> None:
        """End the thread. Waits a second at most."""
        self._desk.close(1.0)

    def _ask(self, request: Request, key: OffloadKey) -> None:
        if request.asking is None:
            request.asking = Question()
            self._asking.append(request)
        request.asking.keys.append(key)
        request.asked[key] = request.asking

    # On the thread.

    def _attend(self, question: Question, names: Names) -> None:
        found: set[bytes] = set()
        try:
            for run in question.runs:
                found |= self._found(question, run, names)
        finally:
            question.found = frozenset(found)

    def _found(self, question: Question, run: Run, names: Names) -> set[bytes]:
        chain = names.chain(f"{run.request}/{run.group.hex()}", run.keys, NOBODY)
        found: set[bytes] = set()
        at = run.start
        for _ in range(_GAPS_MAX):
            left_s = question.until_s - time.monotonic()
            if left_s <= 0:
                break
            # With others waiting, only what is known without asking around.
            probe_s = 0.0 if self._desk.waiting else min(_PROBE_S, left_s)
            hit = self._store.lookup(chain, probe_s, at, question.prompt)
            found.update(run.key(chunk) for chunk in range(at, at + hit.worth))
            at += hit.blocks + 1
            if at >= run.stop or run.group not in self._windowed:
                break
        if found and question.pin_s:
            self._store.pin(chain, question.pin_s)
        if found and self._noted is not None:
            self._noted(chain, run)
        return found
