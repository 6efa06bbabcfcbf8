"""Loading from the end while computing from the beginning: same answers, no waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.store.support import FaultyTier, drop_ram, eventually

from tiercel.blocks import BlockKey, record_bytes
from tiercel.engines.transformers import TransformersEngine, meeting
from tiercel.memory import Arena
from tiercel.store import LaneOptions, TieredStore
from tiercel.tiers import Fate, FilesTier, Outcome

BLOCK, BLOCKS = 16, 12
Prompt = Callable[..., list[int]]


class Slow(FaultyTier):
    """A tier whose reads take `delay_s`, as many at a time as there are readers."""

    delay_s = 0.0

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        time.sleep(self.delay_s)
        return super().read(keys, records)


@pytest.fixture
def parts(tiny_model: Callable[..., Path], tmp_path: Path) -> Iterator[tuple[TransformersEngine, Slow]]:
    """An engine whose steps take 10 ms, over a slow tier."""
    tier = Slow(FilesTier(tmp_path / "disk"))
    arena = Arena(record_bytes(3 * 2 * 2 * BLOCK * 16 * 4), 64, reserved=8)
    with ExitStack() as opened:
        store = TieredStore(arena, [(tier, LaneOptions(read_workers=1))])
        opened.callback(store.close)
        assert store.scanned(10)
        engine = TransformersEngine(tiny_model(), store, dtype="float32", device="cpu", block_tokens=BLOCK)
        forward = engine._forward

        def slowly(*args: Any) -> torch.Tensor:
            time.sleep(0.01)
            return forward(*args)

        engine._forward = slowly  # type: ignore[method-assign]
        yield engine, tier


def store_of(engine: TransformersEngine) -> TieredStore:
    assert engine.prefix is not None
    assert isinstance(engine.prefix._store, TieredStore)
    return engine.prefix._store


def stored(engine: TransformersEngine, tokens: list[int]) -> torch.Tensor:
    """The logits of a cold run, after which everything lies in the tier alone, whose speed is known."""
    cold = engine.prefill_logits(tokens)
    store = store_of(engine)
    assert store.flush(10)
    drop_ram(store)
    return cold.logits


def learn_speed(engine: TransformersEngine, tokens: list[int], reads: int = 4) -> None:
    chain = engine.prefix.chain(tokens, None)  # type: ignore[union-attr]
    for _ in range(reads):
        store_of(engine).prefetch(chain[:1]).result(10)
        drop_ram(store_of(engine))


@pytest.mark.parametrize("delay_s", [0.012, 0.025, 0.05])
def test_a_slow_tier_helps_as_far_as_it_can_and_changes_no_bit(
    parts: tuple[TransformersEngine, Slow], prompt: Prompt, delay_s: float
) -> None:
    engine, tier = parts
    tokens = prompt(BLOCKS * BLOCK + 3)
    cold = stored(engine, tokens)
    tier.delay_s = delay_s
    learn_speed(engine, tokens)
    warm = engine.prefill_logits(tokens)
    assert torch.equal(warm.logits, cold)
    assert warm.choice is not None
    assert warm.choice.meet_s < min(warm.choice.expected_s, warm.choice.recompute_s)
    assert 0 < warm.reused_tokens < BLOCKS * BLOCK
    assert warm.reused_tokens == warm.restored.sources["disk"] * BLOCK
    assert eventually(lambda: store_of(engine).stats().leases == 0)


def test_a_hopeless_tier_is_left_alone(parts: tuple[TransformersEngine, Slow], prompt: Prompt) -> None:
    engine, tier = parts
    tokens = prompt(BLOCKS * BLOCK + 3)
    cold = stored(engine, tokens)
    tier.delay_s = 0.5
    learn_speed(engine, tokens, reads=3)
    tier.reads.clear()
    warm = engine.prefill_logits(tokens)
    assert torch.equal(warm.logits, cold)
    assert warm.reused_tokens == 0
    assert len(tier.reads) <= 1, "no more than a try whether it is better by now"


def test_a_tier_that_hangs_in_the_middle_costs_no_waiting(
    parts: tuple[TransformersEngine, Slow], prompt: Prompt
) -> None:
    engine, tier = parts
    tokens = prompt(BLOCKS * BLOCK + 3)
    cold = stored(engine, tokens)
    tier.delay_s = 0.02
    learn_speed(engine, tokens)
    released = threading.Event()

    def hang(*_: object) -> object:
        released.wait(20)
        return [Outcome(Fate.FAILED, "late")]

    tier.faults["read"] = hang
    began = time.monotonic()
    warm = engine.prefill_logits(tokens)
    assert time.monotonic() - began < 5, "it waited for the tier"
    assert tier.fired >= 1
    assert torch.equal(warm.logits, cold)
    assert warm.reused_tokens == 0
    # The next request gets the same cache: what hangs must not write into it any more.
    tier.faults.clear()
    other = prompt(BLOCKS * BLOCK + 3, seed=9)
    alone = engine.prefill_logits(other, use_cache=False)
    released.set()
    assert torch.equal(engine.prefill_logits(other, use_cache=False).logits, alone.logits)


@pytest.mark.parametrize("lost", range(0, BLOCKS, 3))
def test_a_block_lost_on_the_way_ends_the_loading_there(
    parts: tuple[TransformersEngine, Slow], prompt: Prompt, tmp_path: Path, lost: int
) -> None:
    engine, tier = parts
    tokens = prompt(BLOCKS * BLOCK + 3)
    cold = stored(engine, tokens)
    tier.delay_s = 0.012
    learn_speed(engine, tokens)
    key = engine.prefix.chain(tokens, None).keys[lost]  # type: ignore[union-attr]
    tier.inner.delete([key])
    warm = engine.prefill_logits(tokens)
    assert torch.equal(warm.logits, cold)
    assert warm.reused_tokens <= (BLOCKS - 1 - lost) * BLOCK


def test_too_many_stalled_loads_and_nothing_is_begun(
    parts: tuple[TransformersEngine, Slow], prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tier = parts
    tokens = prompt(BLOCKS * BLOCK + 3)
    cold = stored(engine, tokens)
    tier.delay_s = 0.02
    learn_speed(engine, tokens)
    monkeypatch.setattr(meeting, "_threads", threading.BoundedSemaphore(1))
    with meeting._threads:
        warm = engine.prefill_logits(tokens)
    assert torch.equal(warm.logits, cold)
    assert warm.reused_tokens == 0
    drop_ram(store_of(engine))
    assert engine.prefill_logits(tokens).reused_tokens > 0, "the control"
