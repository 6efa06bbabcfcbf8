"""Traffic for who wants to see a store at work without an engine: made-up prompts over a real store.

A few users talk about a few documents, each behind the system prompt of a tenant, and go on with what was
said before. Blocks are really stored, moved, loaded and checked, on disk and in RAM, and times are by clock.
Only the tokens are made up, and computing is a pause as long as a prefill at `SPEED` would take.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tiercel.blocks import BlockKey, Chain, Identity, Scope
from tiercel.config import Config
from tiercel.demo.place import cache_place
from tiercel.store import PrefillCost, PrefillEstimator, Prompt, Store, open_store
from tiercel.store.policy import Decision, action_of, why

MODEL = "demo"
BLOCK_TOKENS = 64
PAYLOAD_BYTES = 60 << 10
RAM_BYTES, DISK_BYTES = 12 << 20, 64 << 20
# About 6,000 tokens a second, less behind a long context.
SPEED = PrefillCost(0.01, 1 / 6000, 2e-8)
USERS = 3
_TENANTS = (None, "tenant-1", "tenant-2")
_SYSTEM_TOKENS, _DOCUMENTS, _DOCUMENT_TOKENS = 520, 3, (900, 2600)
_TALKS_MAX, _TURNS_MAX = 14, 9
_SAID_TOKENS = (40, 260)
# Of so many prompts one is about something that nobody asks about again.
_ONCE = 12
_PAUSE_S = (0.4, 2.6)
_END_S = 5.0


class Engine:
    """Answers prompts as an engine would, but for computing them."""

    def __init__(self, store: Store, stop: threading.Event) -> None:
        self._store, self._stop = store, stop
        self._learned = PrefillEstimator()

    def answer(self, chain: Chain, tokens: int) -> Decision | None:
        """Look up, load, compute, store, report. None if it was stopped meanwhile."""
        began_s = time.perf_counter()
        cost = self._learned.cost()
        prompt = None if cost is None else Prompt(tokens, BLOCK_TOKENS, cost)
        hit = self._store.lookup(chain, 0.05, 0, prompt)
        looked_s = time.perf_counter()
        loaded = self._load(chain.prefix(hit.worth))
        ready_s = time.perf_counter()
        reused = len(loaded) * BLOCK_TOKENS
        if self._stop.wait(SPEED.seconds(tokens - reused, reused)):
            return None
        first_s = time.perf_counter()
        self._learned.observe(tokens - reused, reused, first_s - ready_s)
        self._keep(chain, len(loaded))
        found = Counter(hit.sources)
        reason = (
            why(found, hit.worth, False, hit.choice) if found else "all is computed: nothing of it is stored"
        )
        places = Counter(loaded)
        saved_s = 0.0 if not loaded else None if cost is None else cost.saved(reused)
        return self._store.report(
            Decision(
                prompt_tokens=tokens, block_tokens=BLOCK_TOKENS, reason=reason, found=found, loaded=places,
                reused_tokens={place: blocks * BLOCK_TOKENS for place, blocks in places.items()},
                computed_tokens=tokens - reused, choice=hit.choice, lookup_s=looked_s - began_s,
                load_s=ready_s - looked_s, prefill_s=first_s - ready_s,
                action=action_of(hit.blocks, len(loaded)), engine="demo", ttft_s=first_s - began_s,
                saved_s=saved_s, spent_s=ready_s - began_s, done=True,
            )
        )  # fmt: skip

    def _load(self, chain: Chain) -> list[str]:
        sources: list[str] = []
        if not len(chain):
            return sources
        with self._store.acquire(chain) as lease:
            for block in lease:
                if bytes(block.payload) != content(chain.keys[block.index]):
                    raise AssertionError("the store gave other bytes than were stored")
                sources.append(block.source)
        return sources

    def _keep(self, chain: Chain, start: int) -> None:
        with self._store.begin_store(chain, start, len(chain), PAYLOAD_BYTES) as lease:
            for block in lease:
                block.payload[:] = content(chain.keys[block.index])
            lease.commit()


def content(key: BlockKey) -> bytes:
    """A block's bytes, which follow from its key."""
    return (key * (PAYLOAD_BYTES // len(key) + 1))[:PAYLOAD_BYTES]


class _Talks:
    """Conversations, each of which goes on sometimes. Thread-safe."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        identity = Identity(MODEL, "1", "bf16", b"demo", "demo/1", BLOCK_TOKENS)
        self._tenants = [(Scope(identity, salt=salt), self._said(_SYSTEM_TOKENS)) for salt in _TENANTS]
        self._documents = [self._said(self._dice.randint(*_DOCUMENT_TOKENS)) for _ in range(_DOCUMENTS)]
        self._talks: list[tuple[Scope, list[int], int]] = []

    def prompt(self) -> tuple[Scope, list[int]]:
        """The next prompt: a new conversation, or what was said in an old one and a question more."""
        dice = self._dice
        with self._lock:
            if dice.randrange(_ONCE) == 0:
                return dice.choice(self._tenants)[0], self._said(dice.randint(*_DOCUMENT_TOKENS))
            if len(self._talks) < _TALKS_MAX or dice.random() < 0.15:
                scope, system = dice.choice(self._tenants)
                self._talks = self._talks[1 - _TALKS_MAX :]
                # Few ask about all documents, many about one.
                document = self._documents[min(int(dice.expovariate(1.2)), len(self._documents) - 1)]
                self._talks.append((scope, [*system, *document], 0))
                at = len(self._talks) - 1
            else:
                at = dice.randrange(len(self._talks))
            scope, tokens, turns = self._talks[at]
            tokens = tokens + self._said(dice.randint(*_SAID_TOKENS))
            if turns + 1 >= _TURNS_MAX:
                del self._talks[at]
            else:
                self._talks[at] = (scope, tokens, turns + 1)
            return scope, tokens

    def pause_s(self) -> float:
        """How long a user reads before the next question."""
        with self._lock:
            return self._dice.uniform(*_PAUSE_S)

    def _said(self, tokens: int) -> list[int]:
        return [self._dice.randrange(1 << 16) for _ in range(tokens)]


def _user(engine: Engine, talks: _Talks, stop: threading.Event) -> Iterator[Decision]:
    while not stop.is_set():
        scope, tokens = talks.prompt()
        decision = engine.answer(scope.chain(tokens), len(tokens))
        if decision is None:
            return
        yield decision
        stop.wait(talks.pause_s())


@contextmanager
def demo_store(folder: Path | None = None) -> Iterator[Store]:
    """A small store of its own in a directory that goes with it (or in `folder`, which stays)."""
    with cache_place(folder, keep=folder is not None) as place:
        config = Config.load(
            None, {},
            {"ram.size": f"{RAM_BYTES}B", "tiers.0.path": str(place.path), "tiers.0.size": f"{DISK_BYTES}B"},
        )  # fmt: skip
        store = open_store(config, PAYLOAD_BYTES)
        try:
            yield store
        finally:
            store.close(_END_S)


@contextmanager
def traffic(store: Store, *, seed: int = 7, users: int = USERS) -> Iterator[None]:
    """Users who ask and ask for as long as the block runs. A fault of theirs is raised at its end."""
    stop, talks = threading.Event(), _Talks(seed)
    engine = Engine(store, stop)

    def turns() -> None:
        for _ in _user(engine, talks, stop):
            pass

    pool = ThreadPoolExecutor(users, "tiercel-demo")
    asked = [pool.submit(turns) for _ in range(users)]
    try:
        yield
    finally:
        stop.set()
        pool.shutdown()
    for one in asked:
        one.result()
