"""Lossy tiers under vLLM itself: answers from what a codec gave back, and exact blocks that never meet them.

Two engines at a time, each with a daemon that is replaced for every step: its RAM is empty then, so that what
is found was read from the tier. The lossy engine's names bear the codecs that its first daemon had.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.engines.vllm.driver import Answer, Engine
from tests.engines.vllm.test_engine import assert_equal, whole_blocks
from tests.service.running import Running
from tests.store.support import eventually
from tokenizers import Tokenizer

from tiercel.codecs import LOSSY
from tiercel.eval.tasks import kv_list
from tiercel.service import RemoteStore
from tiercel.service.connecting import reach

pytestmark = [pytest.mark.model, pytest.mark.soak, pytest.mark.timeout(1800)]
BLOCK = 32
SLOT = "1500KiB"
WAIT_S = 60.0
# How far the log-probability of an answer's first token may be off, in nats.
NEAR = {"int8": 0.1, "fp8": 0.4, "int4": 1.0}


def prompts(model_dir: Path) -> list[list[int]]:
    """Lists of codes, each with the beginning of a line that it holds."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    samples = [kv_list(seed, lambda number, tokens: "") for seed in range(1, 5)]
    return [tokenizer.encode(one.context + one.turns[0].question).ids for one in samples]


@contextmanager
def daemon_on(socket: Path, *tiers: tuple[str, Path], write: bool) -> Iterator[RemoteStore]:
    """A daemon with these places and codecs below an empty RAM."""
    settings = ["ram.size=600MiB", f"ram.slot={SLOT}", "store.load=always", "store.accept_lossy=yes"]
    for number, (codec, place) in enumerate(tiers):
        chosen = {"path": place, "size": "1GiB", "codec": codec} | ({} if write else {"write": "off"})
        settings += [f"tiers.{number}.{name}={value}" for name, value in chosen.items()]
    with Running(socket, *settings) as running, reach(socket) as store:
        yield store
        assert eventually(lambda: not any(tier.pending_writes for tier in store.stats().tiers), WAIT_S)
        assert running.end() == 0


class Asked:
    """An engine that is kept while its daemons come and go."""

    def __init__(self, model_dir: Path, socket: Path) -> None:
        self.socket = socket
        self._model_dir = model_dir
        self._engine: Engine | None = None
        self._chance = np.random.default_rng(7)

    def with_(self, store: RemoteStore, asked: Sequence[list[int]], generate: int = 6) -> list[Answer]:
        """Answers, one prompt at a time, with nothing in vLLM's own cache."""
        if self._engine is None:
            extra = {"daemon.socket": str(self.socket)}
            self._engine = Engine(self._model_dir, extra, block_size=BLOCK)
        assert eventually(lambda: self._connected(store), WAIT_S)
        self._engine.forget()
        return [self._engine.ask([one], generate)[0] for one in asked]

    def _connected(self, store: RemoteStore) -> bool:
        assert self._engine is not None
        self._engine.ask([self._chance.integers(100, 40000, 2 * BLOCK).tolist()], 1)
        counters = store.stats().counters
        return bool(counters.lookups and counters.stored)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


@contextmanager
def engine_at(model_dir: Path, socket: Path) -> Iterator[Asked]:
    one = Asked(model_dir, socket)
    try:
        yield one
    finally:
        one.close()


def off(found: Sequence[Answer], exact: Sequence[Answer]) -> float:
    """How far first tokens' log-probabilities are off; of answers that begin with the same token."""
    pairs = list(zip(found, exact, strict=True))
    assert all(one.tokens[0] == other.tokens[0] for one, other in pairs)
    return max(abs(one.logprobs[0] - other.logprobs[0]) for one, other in pairs)


def test_lossy_tiers_give_near_answers_and_exact_engines_never_see_them(
    model_dir: Path, tmp_path: Path
) -> None:
    asked = prompts(model_dir)
    *first, only_exact = asked
    whole = [whole_blocks([one]) for one in first]
    places = {codec: tmp_path / codec for codec in LOSSY}
    shared = places["int8"]
    with engine_at(model_dir, tmp_path / "l") as lossy, engine_at(model_dir, tmp_path / "e") as exact:
        with daemon_on(lossy.socket, *places.items(), write=True) as store:
            assert set(store.stats().lossy) == set(LOSSY)
            computed = lossy.with_(store, first)
            assert [one.cached for one in computed] == [0] * len(first)
        for codec, place in places.items():
            with daemon_on(lossy.socket, (codec, place), write=False) as store:
                near = lossy.with_(store, first)
                assert [one.cached for one in near] == whole
                (tier,) = store.stats().tiers
                assert tier.counters.read_bytes < 0.6 * tier.counters.read_blocks * (1 << 20)
            assert 0 < off(near, computed) <= NEAR[codec], codec
        with daemon_on(exact.socket, ("lossless", shared), write=True) as store:
            answers = exact.with_(store, [*first, only_exact])
            assert [one.cached for one in answers] == [0] * len(asked), "lossy blocks are there"
            assert_equal(answers[:-1], computed)
        with daemon_on(exact.socket, ("none", shared), write=False) as store:
            again = exact.with_(store, first)
            assert [one.cached for one in again] == whole, "the control: exact ones are found"
            assert_equal(again, computed)
        with daemon_on(lossy.socket, ("int8", shared), write=False) as store:
            found = lossy.with_(store, [only_exact, first[0]])
            assert [one.cached for one in found] == [0, whole[0]], "and the other way round"
            assert_equal(found[:1], answers[-1:])
