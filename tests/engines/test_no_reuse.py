"""Prompts that never come back: no more is written than admission lets through, and repeats are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tiercel.blocks import record_bytes
from tiercel.engines.transformers import Request, Result, TransformersEngine
from tiercel.memory import Arena
from tiercel.store import LaneOptions, SecondSight, TieredStore
from tiercel.tiers import FilesTier

BLOCK, BLOCKS, SLOTS = 16, 2, 24
PROMPTS = 100
# 3 layers, K and V, 2 heads, 16 elements, fp32.
PAYLOAD = 3 * 2 * 2 * BLOCK * 16 * 4
RECORD = record_bytes(PAYLOAD)
CAP = 60 * RECORD

Prompt = Callable[..., list[int]]
Open = Callable[[SecondSight | None], tuple[TransformersEngine, TieredStore]]


@pytest.fixture
def open_engine(tiny_model: Callable[..., Path], tmp_path: Path) -> Iterator[Open]:
    with ExitStack() as opened:

        def make(admission: SecondSight | None) -> tuple[TransformersEngine, TieredStore]:
            tier = (FilesTier(tmp_path / "disk"), LaneOptions(cap_bytes=CAP))
            store = TieredStore(Arena(RECORD, SLOTS, reserved=4), [tier], admission)
            opened.callback(store.close)
            assert store.scanned(10)
            how = {"dtype": "float32", "device": "cpu", "block_tokens": BLOCK, "load_always": True}
            return TransformersEngine(tiny_model(), store, **how), store  # type: ignore[arg-type]

        yield make


def answer(engine: TransformersEngine, tokens: list[int]) -> Result:
    *_, last = engine.generate(Request(tokens, max_new_tokens=1))
    assert isinstance(last, Result)
    return last


def unique(prompt: Prompt, count: int) -> list[list[int]]:
    made = [prompt(BLOCKS * BLOCK + 3, seed) for seed in range(count)]
    assert len({tuple(one[:BLOCK]) for one in made}) == count
    return made


def test_d37_at_once_writes_each_block_once_within_the_cap(open_engine: Open, prompt: Prompt) -> None:
    engine, store = open_engine(None)
    texts = unique(prompt, PROMPTS)
    for number, text in enumerate(texts):
        assert answer(engine, text).reused_tokens == 0
        if number % 10 == 9:
            assert store.flush(10)
            assert store.stats().tiers[0].used_bytes <= CAP
    written = store.stats().tiers[0].counters.written_bytes
    assert written == PROMPTS * BLOCKS * RECORD
    assert [answer(engine, text).reused_tokens for text in texts[-20:]] == [BLOCKS * BLOCK] * 20
    assert store.flush(10)
    assert store.stats().tiers[0].counters.written_bytes == written, "what is found is not written again"


def test_d37_second_sight_writes_nothing_until_a_prompt_comes_back(open_engine: Open, prompt: Prompt) -> None:
    engine, store = open_engine(SecondSight())
    texts = unique(prompt, PROMPTS)
    for text in texts:
        assert answer(engine, text).stored_blocks == 0
    assert store.flush(10)
    assert store.stats().tiers[0].counters.written_bytes == 0
    assert store.stats().ram_blocks == 0
    again = texts[:8]
    assert [answer(engine, text).stored_blocks for text in again] == [BLOCKS] * 8
    assert [answer(engine, text).reused_tokens for text in again] == [BLOCKS * BLOCK] * 8
    assert store.flush(10)
    assert store.stats().tiers[0].counters.written_bytes == 8 * BLOCKS * RECORD
