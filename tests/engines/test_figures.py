"""Figures agree: 200 requests of every kind, and every figure is what happened, however the store is reached.

What happened is counted apart from what reports it: tokens where the model runs, blocks where they enter the
cache and where the tier is called, times by a clock of the test's own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.service.test_prometheus import exported
from tests.store.support import FaultyTier, Served, drop_ram, eventually, raising

from tiercel.blocks import BlockKey, record_bytes
from tiercel.engines.transformers import Delta, Request, Result, TransformersEngine
from tiercel.engines.transformers.account import Account
from tiercel.engines.transformers.kv_cache import KVCache
from tiercel.memory import Arena, ArenaKind
from tiercel.store import LaneOptions, StoreStats, TieredStore, overview_json
from tiercel.store.policy import Hints
from tiercel.tiers import Fate, FilesTier, Outcome, Tier

BLOCK = 16
RECORD = record_bytes(3 * 2 * 2 * BLOCK * 16 * 4)
Prompt = Callable[..., list[int]]


class Counting(FaultyTier):
    """Notes what it has written."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.written: list[BlockKey] = []

    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        outcomes = super().write(keys, records)
        self.written += [key for key, one in zip(keys, outcomes, strict=True) if one.fate is Fate.OK]
        return outcomes


class OutOfOrder(RuntimeError):
    """A fault of the model."""


@dataclass
class World:
    """An engine on a store, and what is known of it without asking either."""

    engine: TransformersEngine
    inner: TieredStore
    tier: Counting
    computed: list[int] = field(default_factory=list)
    restored: int = 0
    broken: bool = False
    answered: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    reused: Counter[str] = field(default_factory=Counter)
    waited_s: float = 0.0

    def stats(self) -> StoreStats:
        return self.engine.prefix._store.stats()  # type: ignore[union-attr]

    def ask(
        self, tokens: list[int], stop_at: int | None = None, *, leave: bool = False, **hints: Any
    ) -> None:
        """One request, given up once `stop_at` blocks are computed, or left after its first token."""
        request = Request(tokens, max_new_tokens=2, hints=Hints(**hints))
        self.computed, self.restored = [], 0
        stopping = (lambda: False) if stop_at is None else (lambda: len(self.computed) >= stop_at)
        began_s = time.perf_counter()
        answer = self.engine.generate(request, stop=stopping)
        try:
            first = next(answer, None)
        except OutOfOrder:
            self.failed += 1
            self._note(tokens, None)
            return
        self.waited_s += time.perf_counter() - began_s
        if first is None:
            self.cancelled += 1
            self._note(tokens, None)
            return
        assert isinstance(first, Delta)
        self.answered += 1
        self._note(tokens, None if leave else first)
        if leave:
            answer.close()  # type: ignore[attr-defined]
            self.reused.update({"ram": self.restored * BLOCK})
            return
        *_, last = answer
        assert isinstance(last, Result)
        assert sum(last.sources.values()) == self.restored
        self.reused.update({place: blocks * BLOCK for place, blocks in last.sources.items()})

    def _note(self, tokens: list[int], first: Delta | None) -> None:
        self.prompt_tokens += len(tokens)
        self.computed_tokens += sum(self.computed)
        if first is not None:
            assert sum(self.computed) + self.restored * BLOCK == len(tokens)


@pytest.fixture(params=["embedded", "daemon"])
def world(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[World]:
    tier = Counting(FilesTier(tmp_path / "disk"))
    kind = ArenaKind.SHARED if request.param == "daemon" else ArenaKind.PRIVATE
    with ExitStack() as opened:
        inner = TieredStore(Arena(RECORD, 96, reserved=8, kind=kind), [(tier, LaneOptions(read_workers=1))])
        assert inner.scanned(10)
        store: Any = opened.enter_context(Served(inner) if request.param == "daemon" else inner)
        engine = TransformersEngine(
            tiny_model(), store, dtype="float32", device="cpu", block_tokens=BLOCK, load_always=True
        )
        object.__setattr__(engine.model, "eos_ids", frozenset())
        world = World(engine, inner, tier)
        forward, restore = engine._forward, KVCache.restore_block

        def counting(tokens: Sequence[int], cache: KVCache) -> Any:
            if world.broken:
                raise OutOfOrder
            logits = forward(tokens, cache)
            world.computed.append(len(tokens))
            return logits

        def restoring(cache: KVCache, index: int, payload: memoryview) -> None:
            restore(cache, index, payload)
            world.restored += 1

        monkeypatch.setattr(engine, "_forward", counting)
        monkeypatch.setattr(KVCache, "restore_block", restoring)
        yield world


def script(world: World, prompt: Prompt) -> int:
    """200 requests: new, repeated, longer, from RAM and disk, given up, broken, and with a failing tier."""
    for number in range(200):
        known = prompt(3 * BLOCK + 5, seed=number % 7)
        kind = number % 10
        if kind in (0, 5):
            world.ask(prompt(2 * BLOCK + number % BLOCK, seed=1000 + number))
        elif kind == 1:
            world.ask(known + prompt(BLOCK, seed=number))
        elif kind == 2:
            world.ask(known, load=False)
        elif kind == 3:
            world.ask(prompt(3 * BLOCK, seed=2000 + number), stop_at=1)
        elif kind == 4:
            # Who leaves gets no result that says where its blocks lay.
            world.inner.prefetch(world.engine.chain(known)).result(10)
            world.ask(known, leave=True)
        elif kind == 6 and number % 20 == 6:
            world.broken = True
            world.ask(prompt(BLOCK + 3, seed=3000 + number))
            world.broken = False
        elif kind == 7:
            world.inner.flush(10)
            drop_ram(world.inner)
            world.ask(known)
        elif number == 188:
            # Late: a tier that failed is left alone for longer than all of this takes.
            world.inner.flush(10)
            drop_ram(world.inner)
            world.tier.faults["read"] = raising
            world.ask(known)
            world.tier.faults.clear()
        else:
            world.ask(prompt(BLOCK - 3, seed=number) if kind == 9 else known)
    return 200


def test_figures_agree_over_200_requests(world: World, prompt: Prompt) -> None:
    requests = script(world, prompt)
    assert eventually(lambda: world.stats().requests.requests == requests)
    world.inner.flush(10)
    stats = world.stats()
    told = stats.requests
    assert min(world.answered, world.cancelled, world.failed) >= 10
    assert told.outcomes == {"answered": world.answered, "cancelled": world.cancelled, "failed": world.failed}
    assert told.prompt_tokens == world.prompt_tokens
    assert told.computed_tokens == world.computed_tokens
    assert told.reused_tokens == dict(world.reused)
    assert set(world.reused) == {"ram", "disk"}
    assert told.hit_rate == sum(world.reused.values()) / world.prompt_tokens
    assert sum(told.actions.values()) == requests
    assert all(told.actions[action] > 0 for action in ("load", "miss", "recompute"))
    assert sum(seen.count for seen in told.ttft.values()) == world.answered
    assert told.ttft["engine"].count == 0
    assert 0 < sum(seen.sum_s for seen in told.ttft.values()) <= world.waited_s
    assert 0 < told.spent_s < world.waited_s
    assert told.saved_s > 0
    assert (told.unpriced, told.lost, told.bad) == (0, 0, 0)
    check_tier(world, stats)
    check_shown(world, stats)


def check_tier(world: World, stats: StoreStats) -> None:
    (tier,), counters, calls = stats.tiers, stats.counters, Counter(world.tier.calls)
    assert tier.reads.count == calls["read"] == len(world.tier.reads)
    assert tier.counters.read_blocks == counters.loaded["disk"] == calls["read"] - world.tier.fired
    assert world.tier.fired == tier.counters.failed == counters.loads_failed > 0
    assert tier.writes.count == calls["write"]
    # What could not be read is doubted, and written again when it is computed.
    assert tier.counters.written_blocks == len(world.tier.written)
    assert tier.blocks == len(set(world.tier.written)) == len(list(world.tier.inner.scan()))
    assert tier.counters.written_bytes == tier.counters.written_blocks * RECORD
    assert tier.used_bytes == sum(one.record_bytes for one in world.tier.inner.scan())
    assert (tier.pending_reads, tier.pending_writes, stats.leases) == (0, 0, 0)
    assert [(one.kind, one.count) for one in stats.faults] == [("read", world.tier.fired)]
    assert stats.slots - stats.slots_free == stats.ram_blocks


def check_shown(world: World, stats: StoreStats) -> None:
    """The same in Prometheus and in what a dashboard gets."""
    series = exported(stats)
    assert series["tiercel_requests_total{outcome=answered}"] == world.answered
    assert series["tiercel_prompt_tokens_total"] == world.prompt_tokens
    assert series["tiercel_computed_tokens_total"] == world.computed_tokens
    assert series["tiercel_reused_tokens_total{place=disk}"] == world.reused["disk"]
    assert series["tiercel_tier_faults_total{kind=read,tier=disk}"] == world.tier.fired
    store = world.engine.prefix._store  # type: ignore[union-attr]
    shown = overview_json(store.overview(64))
    assert shown["stats"]["requests"]["outcomes"]["failed"] == world.failed
    assert shown["stats"]["tiers"][0]["blocks"] == len(list(world.tier.inner.scan()))
    (scope,) = shown["scopes"]
    assert (scope["model"], scope["blocks"]["disk"]) == ("tiny", stats.tiers[0].blocks)
    assert len(shown["decisions"]) == 64
    assert shown["decisions"][0]["number"] == 200
    assert {one["engine"] for one in shown["decisions"]} == {"transformers"}


def test_d39_a_fault_in_reporting_never_reaches_a_request(
    world: World, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    fired = []

    def failing(*_: Any) -> None:
        fired.append(1)
        raise ZeroDivisionError

    with monkeypatch.context() as broken:
        broken.setattr("tiercel.store.reports._count", failing)
        world.ask(prompt(50))
        assert eventually(lambda: fired == [1])
        assert eventually(lambda: world.stats().requests.bad == 1)
    world.ask(prompt(50))
    assert eventually(lambda: world.stats().requests.requests == 1), "the control"
    assert world.answered == 2


def test_accounts_add_up_whatever_came_while_computing() -> None:
    account = Account(100, 10)
    account.restored.sources.update({"ram": 2, "disk": 3})
    account.loaded = Counter({"ram": 2})
    assert account.reused_blocks == 5
    told = account.done("answered")
    assert (told.loaded, told.met, told.reused_tokens) == ({"ram": 2}, {"disk": 3}, {"ram": 20, "disk": 30})
