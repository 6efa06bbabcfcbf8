"""Two engines with a daemon each share one tier and nothing else: the second one's first request hits.

The first engine stores everywhere and ends with its daemon before the second begins. The second's daemon is
replaced for every place, on the same socket and with empty RAM; the engine connects again by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.engines.vllm.driver import Answer, Engine
from tests.engines.vllm.test_engine import assert_equal, whole_blocks
from tests.servers.places import KINDS, Places, why_not
from tests.service.running import Running
from tests.store.support import eventually

from tiercel.service import RemoteStore
from tiercel.service.connecting import reach
from tiercel.store.figures import TierStats

pytestmark = pytest.mark.model
BLOCK = 32
# Room for one block of the demo model in fp32. With it the store opens before its first engine comes.
SLOT = "1500KiB"
WAIT_S = 60.0
PLACES = [
    pytest.param(kind, id=kind.replace(" ", "-"), marks=pytest.mark.skipif(bool(reason), reason=reason or ""))
    for kind, reason in ((kind, why_not(kind)) for kind in KINDS)
]


def prompts() -> list[list[int]]:
    """A long one, one that begins like it, and lengths around the edges of blocks."""
    rng = np.random.default_rng(4)
    long = rng.integers(100, 40000, 2000).tolist()
    forked = long[:333] + rng.integers(100, 40000, 300).tolist()
    return [long, forked, *(rng.integers(100, 40000, length).tolist() for length in (31, 33, 64, 129, 513))]


def blocks_of(asked: Sequence[list[int]]) -> int:
    """How many different blocks a second engine loads for these prompts."""
    return len({tuple(one[:end]) for one in asked for end in range(BLOCK, len(one), BLOCK)})


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> list[Answer]:
    """What vLLM without a connector answers."""
    engine = Engine(model_dir, None, block_size=BLOCK)
    answers = engine.ask(prompts())
    engine.close()
    return answers


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    folder = tmp_path_factory.mktemp("places")
    with Places(folder, [kind for kind in KINDS if why_not(kind) is None]) as running:
        yield running


@pytest.fixture(scope="module")
def filled(
    places: Places, model_dir: Path, reference: list[Answer], tmp_path_factory: pytest.TempPathFactory
) -> Places:
    """Every place holds the prompts' blocks; the engine that computed them and its daemon are gone."""
    socket = tmp_path_factory.mktemp("first") / "s"
    with daemon_on(places, socket, *places.kinds) as (daemon, store):
        engine = Engine(model_dir, {"daemon.socket": str(socket)}, block_size=BLOCK)
        answers = engine.ask(prompts())
        engine.forget()
        engine.close()
        assert_equal(answers, reference)
        # What they share is found in vLLM's own cache at best.
        assert sum(one.cached for one in answers) < 400
        assert eventually(lambda: not any(tier.pending_writes for tier in store.stats().tiers), WAIT_S)
        for tier in store.stats().tiers:
            assert tier.counters.written_blocks >= blocks_of(prompts()), tier
        assert daemon.end() == 0
    return places


class Second:
    """The second engine, and its daemon: always on the same socket, of which the engine keeps the name."""

    def __init__(self, folder: Path, model_dir: Path, places: Places) -> None:
        self.socket = folder / "s"
        self.places = places
        self._model_dir = model_dir
        self._engine: Engine | None = None
        self._rng = np.random.default_rng(5)

    @contextmanager
    def on(self, *kinds: str, **more: str) -> Iterator[RemoteStore]:
        """A new daemon that reads these places and writes to none; its RAM is empty."""
        with daemon_on(self.places, self.socket, *kinds, write="off", **more) as (_, store):
            if self._engine is None:
                extra = {"daemon.socket": str(self.socket)}
                self._engine = Engine(self._model_dir, extra, block_size=BLOCK)
            else:
                assert eventually(lambda: self._connected(store), WAIT_S)
                self._engine.forget()
            assert not store.stats().counters.loaded
            yield store

    def _connected(self, store: RemoteStore) -> bool:
        """Whether both sides of the connector have found the new daemon: one looks up, one stores."""
        self.ask([self._rng.integers(100, 40000, 2 * BLOCK).tolist()], 1)
        counters = store.stats().counters
        return bool(counters.lookups and counters.stored)

    def ask(self, asked: Sequence[list[int]], generate: int = 12) -> list[Answer]:
        assert self._engine is not None
        return self._engine.ask(asked, generate)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


@contextmanager
def daemon_on(
    places: Places, socket: Path, *kinds: str, **more: str
) -> Iterator[tuple[Running, RemoteStore]]:
    """A daemon with these tiers below its RAM, and a way to look at it."""
    settings = ["ram.size=600MiB", f"ram.slot={SLOT}", "store.load=always", "store.flush_deadline=1m"]
    tiers = places.settings(*kinds, deadline="20s", **more)
    with (
        Running(socket, *settings, *tiers, before=places.before, env=places.environ) as daemon,
        reach(socket) as store,
    ):
        yield daemon, store


@pytest.fixture(scope="module")
def second(filled: Places, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Second]:
    one = Second(tmp_path_factory.mktemp("second"), model_dir, filled)
    yield one
    one.close()


def only_tier(store: RemoteStore) -> TierStats:
    (tier,) = store.stats().tiers
    return tier


@pytest.mark.parametrize("kind", PLACES)
def test_the_second_engine_s_first_request_hits(second: Second, reference: list[Answer], kind: str) -> None:
    first, *others = prompts()
    with second.on(kind) as store:
        assert eventually(lambda: only_tier(store).blocks >= blocks_of(prompts()), WAIT_S)
        found = second.ask([first])
        assert_equal(found, reference[:1])
        assert found[0].cached == whole_blocks([first])
        assert only_tier(store).counters.read_blocks == blocks_of([first])
        found = second.ask(others)
        assert_equal(found, reference[1:])
        assert [one.cached for one in found] == [whole_blocks([one]) for one in others]
        tier = only_tier(store)
        assert store.stats().counters.loaded[tier.name] == tier.counters.read_blocks == blocks_of(prompts())
        assert tier.counters.read_bytes >= blocks_of(prompts()) * (1 << 20)


def test_without_a_place_in_common_there_is_nothing(second: Second, reference: list[Answer]) -> None:
    """The control: what the tests above find lies in the place, not in the second engine or its daemon."""
    with second.on() as store:
        found = second.ask(prompts()[:1])
        assert_equal(found, reference[:1])
        assert found[0].cached == 0
        assert store.stats().counters.lookups


@pytest.mark.skipif(bool(why_not("encrypted valkey")), reason=why_not("encrypted valkey") or "")
def test_without_the_key_there_is_nothing(second: Second, reference: list[Answer], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("1:" + "5a" * 32 + "\n")
    with second.on("encrypted valkey", encrypt=f"file:{key}") as store:
        assert eventually(lambda: only_tier(store).blocks >= blocks_of(prompts()), WAIT_S)
        found = second.ask(prompts()[:1])
        assert_equal(found, reference[:1])
        assert found[0].cached == 0
        assert only_tier(store).blocks
