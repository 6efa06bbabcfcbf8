"""Engine and store together: RAM too small, a restart, files lost or spoiled between lookup and load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tiercel.blocks import record_bytes
from tiercel.engines.transformers import Request, Result, TransformersEngine
from tiercel.memory import Arena
from tiercel.store import LaneOptions, TieredStore
from tiercel.tiers import FilesTier

BLOCK = 16
BLOCKS = 5
Prompt = Callable[..., list[int]]


def answer(engine: TransformersEngine, tokens: list[int], **more: Any) -> Result:
    *_, last = engine.generate(Request(tokens, **{"max_new_tokens": 10} | more))
    assert isinstance(last, Result)
    return last


@pytest.fixture
def open_engine(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> Iterator[Callable[..., TransformersEngine]]:
    """A function (slots) -> an engine over a new store on the same directory; all are closed at the end."""
    with ExitStack() as opened:

        def make(slots: int = 64, **more: Any) -> TransformersEngine:
            # The payload's size is known once the model is loaded; 3 layers, 2 heads, 16 elements, fp32.
            arena = Arena(record_bytes(3 * 2 * 2 * BLOCK * 16 * 4), slots, reserved=2)
            store = TieredStore(arena, [(FilesTier(tmp_path / "disk"), LaneOptions())])
            opened.callback(store.close)
            assert store.scanned(10)
            how = {"dtype": "float32", "device": "cpu", "block_tokens": BLOCK, "load_always": True} | more
            engine = TransformersEngine(tiny_model(), store, **how)
            object.__setattr__(engine.model, "eos_ids", frozenset())
            return engine

        yield make


def store_of(engine: TransformersEngine) -> TieredStore:
    assert engine.prefix is not None
    store = engine.prefix._store
    assert isinstance(store, TieredStore)
    return store


def files(tmp_path: Path) -> list[Path]:
    """Record files in the order of their prefixes' lengths is not known: sorted by name only."""
    return sorted(
        path for path in (tmp_path / "disk").rglob("*") if path.is_file() and path.stat().st_size > 4096
    )


def test_resumed_from_ram(open_engine: Callable[..., TransformersEngine], prompt: Prompt) -> None:
    engine, tokens = open_engine(), prompt(BLOCKS * BLOCK + 3)
    cold, warm = answer(engine, tokens), answer(engine, tokens)
    assert warm.tokens == cold.tokens
    assert warm.sources == {"ram": BLOCKS}
    assert store_of(engine).stats().leases == 0


def test_resumed_from_disk_after_a_restart(
    open_engine: Callable[..., TransformersEngine], prompt: Prompt
) -> None:
    first, tokens = open_engine(), prompt(BLOCKS * BLOCK + 3)
    cold = answer(first, tokens, max_new_tokens=40)
    assert store_of(first).close(10)
    second = open_engine()
    warm = answer(second, tokens, max_new_tokens=40)
    assert warm.tokens == cold.tokens
    assert warm.sources == {"disk": BLOCKS}
    following = answer(second, [*tokens, *warm.tokens, 7])
    assert following.reused_tokens == (len(tokens) + 40) // BLOCK * BLOCK


def test_ram_smaller_than_one_prompt(open_engine: Callable[..., TransformersEngine], prompt: Prompt) -> None:
    engine, tokens = open_engine(slots=6), prompt(12 * BLOCK + 3)
    cold = answer(engine, tokens)
    assert store_of(engine).flush(10)
    warm = answer(engine, tokens)
    assert warm.tokens == cold.tokens
    assert warm.reused_tokens == 12 * BLOCK
    assert warm.sources["disk"] >= 12 - 6
    assert store_of(engine).stats().leases == 0


@pytest.mark.parametrize("spoil", ["lost", "cut", "flipped", "zeroed"])
def test_any_one_block_lost_or_spoiled_costs_a_recompute_d17_d18_d19(
    open_engine: Callable[..., TransformersEngine], prompt: Prompt, tmp_path: Path, spoil: str
) -> None:
    """Every block in turn is spoiled behind the index's back; what precedes it is reused."""
    tokens = prompt(BLOCKS * BLOCK + 3)
    first = open_engine()
    cold = answer(first, tokens, max_new_tokens=4)
    assert store_of(first).flush(10)
    reused = set()
    for number in range(BLOCKS):
        engine = open_engine()
        paths = files(tmp_path)
        assert len(paths) == BLOCKS
        damage(paths[number], spoil)
        got = answer(engine, tokens, max_new_tokens=4)
        assert got.tokens == cold.tokens
        assert got.reused_tokens < BLOCKS * BLOCK, "the fault did not fire"
        reused.add(got.reused_tokens)
        assert store_of(engine).stats().leases == 0
        # The block was stored again, and the next process finds all of them.
        assert store_of(engine).close(10)
        assert answer(open_engine(), tokens, max_new_tokens=4).reused_tokens == BLOCKS * BLOCK
    assert reused == {number * BLOCK for number in range(BLOCKS)}


def damage(path: Path, spoil: str) -> None:
    whole = bytearray(path.read_bytes())
    if spoil == "lost":
        path.unlink()
    elif spoil == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif spoil == "flipped":
        whole[len(whole) // 2] ^= 1
        path.write_bytes(whole)
    else:
        path.write_bytes(bytes(len(whole)))


def test_a_closed_store_costs_a_recompute(
    open_engine: Callable[..., TransformersEngine], prompt: Prompt
) -> None:
    engine, tokens = open_engine(), prompt(BLOCKS * BLOCK + 3)
    cold = answer(engine, tokens)
    store_of(engine).close(10)
    got = answer(engine, tokens)
    assert (got.tokens, got.reused_tokens, got.stored_blocks) == (cold.tokens, 0, 0)


def test_tenants_are_apart_at_every_tier_d04(
    open_engine: Callable[..., TransformersEngine], prompt: Prompt
) -> None:
    tokens = prompt(BLOCKS * BLOCK + 3)
    first = open_engine()
    answer(first, tokens, salt="a")
    for engine in (first, open_engine()):
        assert store_of(engine).flush(10)
        for salt in ("b", None, "A"):
            assert engine.prefill_logits(tokens, salt=salt, store_blocks=False).reused_tokens == 0
        assert engine.prefill_logits(tokens, salt="a", store_blocks=False).reused_tokens == BLOCKS * BLOCK


def test_client_that_leaves_early_leaves_no_lease_and_no_slot(
    open_engine: Callable[..., TransformersEngine], prompt: Prompt
) -> None:
    engine, tokens = open_engine(), prompt(BLOCKS * BLOCK + 3)
    for _ in range(20):
        running = engine.generate(Request(tokens, max_new_tokens=30))
        next(running)
        running.close()
    stats = store_of(engine).stats()
    assert stats.leases == 0
    assert stats.slots - stats.slots_free == BLOCKS
