"""Engines of several ranks: one copy per shard, and the same decisions on all of them."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm.meddled import Meddled, drop_blocks
from tests.engines.vllm.toy import Toy, ToyEngine, prompt, toy_store

from tiercel.engines.vllm.jobs import NOBODY


@pytest.mark.parametrize(("ranks", "shards"), [(2, 2), (4, 2), (2, 1), (4, 4)])
@pytest.mark.parametrize("window", [None, 40])
def test_ranks_store_one_copy_per_shard(tmp_path: Path, ranks: int, shards: int, window: int | None) -> None:
    store = toy_store()
    with Toy(tmp_path, store, ranks=ranks, shards=shards, window=window).start() as engine:
        tokens = prompt(161)
        engine.run("cold", tokens, 4)
        engine.forget()
        assert store.stats().ram_blocks == 10 * shards
        assert engine.cached(engine.run("warm", tokens, 4)) == 160
        assert engine.stats["loaded_tokens"] == 160 * ranks
        engine.settled()


def test_another_number_of_ranks_misses(tmp_path: Path) -> None:
    store, tokens = toy_store(), prompt(161)
    with Toy(tmp_path, store, ranks=4, shards=4).start() as engine:
        engine.run("cold", tokens, 4)
        engine.settled()
    with Toy(tmp_path, store, ranks=2, shards=2).start() as engine:
        assert engine.cached(engine.run("other", tokens, 4)) == 0
    with Toy(tmp_path, store, ranks=4, shards=4).start() as engine:
        assert engine.cached(engine.run("same", tokens, 4)) == 160


@pytest.mark.parametrize("window", [None, 40])
def test_shards_that_were_evicted_differently(tmp_path: Path, window: int | None) -> None:
    """D45: all ranks load the shortest common prefix, and never another shard's bytes."""
    store = toy_store()
    rng = random.Random(7)
    with Toy(tmp_path, store, ranks=4, shards=4, window=window).start() as engine:
        tokens = prompt(161)
        engine.run("cold", tokens, 4)
        engine.forget()
        cut = [rng.randrange(3, 10) for _ in range(4)]
        for names, first in zip(engine.connector._scheduler.names, cut, strict=True):
            chain = names.chain("cold", hashes_of(engine, tokens), NOBODY)
            drop_blocks(store, chain, range(first, 10))
        assert engine.cached(engine.run("warm", tokens, 4)) == min(cut) * 16
        engine.settled()


def hashes_of(engine: ToyEngine, tokens: list[int]) -> bytes:
    request = engine.add("probe", tokens)
    hashes = b"".join(request.block_hashes)
    engine.abort("probe")
    return hashes


@pytest.mark.parametrize("window", [None, 40])
def test_ranks_of_different_speed_and_luck(tmp_path: Path, window: int | None) -> None:
    """D20: one rank is slow, one loses blocks: all see the same decisions, all requests end."""
    inner = toy_store(slots=600)

    class Slow(Meddled):
        def acquire(self, chain: Any, deadline_s: float = 10.0, start: int = 0) -> Any:
            time.sleep(rng.random() * 0.01)
            return super().acquire(chain, deadline_s, start)

        def begin_store(self, *args: Any, **options: Any) -> Any:
            time.sleep(rng.random() * 0.01)
            return self.inner.begin_store(*args, **options)

    rng = random.Random(11)
    stores = [Slow(inner) for _ in range(4)]
    stores[2].before_load = lambda chain: drop_blocks(inner, chain, [rng.randrange(len(chain.keys))])
    toy = Toy(tmp_path, inner, ranks=4, shards=4, stores=stores, blocks=65, window=window)
    with toy.start() as engine:
        for round_ in range(4):
            for number in range(12):
                name = f"{round_}-{number}"
                engine.add(name, prompt(30 + 20 * number, number, shared=number * 5), 10)
                engine.step()
                if rng.random() < 0.2 and name not in engine.finished:
                    engine.abort(name)
            engine.drain()
            for name, how in engine.finished.items():
                if how != "aborted":
                    engine.check(name)
            engine.forget()
        assert engine.stats["loads_failed"] > 0
        assert engine.stats["loads"] > engine.stats["loads_failed"]
        engine.settled()
