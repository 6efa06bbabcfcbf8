"""When a cache is told that its prompt is complete, and what is not asked of one that keeps nothing exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engines.test_engine import BLOCK, Prompt, answer, build

from tiercel.engines.transformers import Request
from tiercel.engines.transformers.kv_cache import KVCache


class Told(KVCache):
    """Notes at which length it was told, and how many blocks the store held by then."""

    told: list[tuple[int, int]]
    store: Any

    def prompt_done(self) -> None:
        self.told.append((self.length, len(self.store.blocks)))


@pytest.fixture
def told(fake_store: Any) -> type[Told]:
    return type("Told", (Told,), {"told": [], "store": fake_store})


def test_a_cache_is_told_once_after_the_prompt_is_saved_and_before_the_first_step(
    tiny_model: Callable[..., Path], fake_store: Any, prompt: Prompt, told: type[Told]
) -> None:
    engine = build(tiny_model(), fake_store)
    engine._make_cache = told
    tokens = prompt(3 * BLOCK + 1)

    answer(engine, tokens, max_new_tokens=5)
    answer(engine, tokens, max_new_tokens=5)

    assert told.told == [(3 * BLOCK + 1, 3)] * 2


def test_a_cache_is_not_told_where_no_step_follows(
    tiny_model: Callable[..., Path], fake_store: Any, prompt: Prompt, told: type[Told]
) -> None:
    engine = build(tiny_model(), fake_store)
    engine._make_cache = told
    tokens = prompt(3 * BLOCK + 1)

    answer(engine, tokens, max_new_tokens=1)
    left = engine.generate(Request(tokens, max_new_tokens=5))
    next(left)
    left.close()

    assert told.told == []


@pytest.mark.parametrize(("settles", "stored"), [(True, 5), (False, 0)])
def test_what_is_no_longer_exact_is_neither_settled_nor_stored(
    tiny_model: Callable[..., Path], fake_store: Any, prompt: Prompt, settles: bool, stored: int
) -> None:
    engine = build(tiny_model(), fake_store)
    engine._make_cache = type("Cache", (KVCache,), {"settles": settles})
    fake_store.crowded = True  # no room before the answer is out

    got = answer(engine, prompt(3 * BLOCK), max_new_tokens=2 * BLOCK)

    assert fake_store.faults_fired == 1
    assert (got.stored_blocks, len(fake_store.blocks)) == (stored, stored)
