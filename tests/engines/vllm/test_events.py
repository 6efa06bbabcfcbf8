"""KV events: what a router that believes them expects is what a load gives."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.vllm.toy import Toy, ToyEngine, prompt, toy_store
from tests.store.support import disk, drop_ram
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from tiercel.blocks import BlockKey
from tiercel.engines.vllm.jobs import NOBODY
from tiercel.engines.vllm.ledger import Change, Described, Ledger
from tiercel.store import Event, Events, LaneOptions


class Router:
    """Replays events as a router would: blocks by their parent and tokens, per medium."""

    def __init__(self) -> None:
        self.children: dict[tuple[Any, tuple[int, ...]], Any] = {}
        self.media: dict[Any, set[str]] = {}

    def replay(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, BlockStored) and event.medium != "GPU":
                assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                (block,) = event.block_hashes
                self.children[event.parent_block_hash, tuple(event.token_ids)] = block
                self.media.setdefault(block, set()).add(event.medium)
            elif isinstance(event, BlockRemoved) and event.medium != "GPU":
                for block in event.block_hashes:
                    self.media.get(block, set()).discard(event.medium)

    def expects(self, tokens: list[int], block_tokens: int) -> int:
        parent = None
        for first in range(0, len(tokens) - block_tokens + 1, block_tokens):
            block = self.children.get((parent, tuple(tokens[first : first + block_tokens])))
            if block is None or not self.media.get(block):
                return first
            parent = block
        return len(tokens) // block_tokens * block_tokens


def listen(engine: ToyEngine, router: Router) -> None:
    """Publish into the router instead of a socket."""
    engine.scheduler.kv_event_publisher.publish = lambda batch: router.replay(batch.events)


def news(engine: ToyEngine) -> None:
    """Let the engine publish what happened, as its next steps would."""
    time.sleep(0.3)
    engine.step()
    engine.drain()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("units", [1, 4])
def test_a_router_that_replays_the_events_is_right(tmp_path: Path, units: int, ranks: int) -> None:
    """D40: stored, evicted, found again after a restart; whole blocks of ours only."""
    (tmp_path / "disk").mkdir()
    store = toy_store((disk(tmp_path / "disk"), LaneOptions(cap_bytes=1 << 30)))
    toy = Toy(tmp_path, store, units=units, ranks=ranks, shards=ranks, events=True)
    tokens, size = prompt(161), 16 * units
    router = Router()
    with toy.start() as engine:
        listen(engine, router)
        engine.run("listens", prompt(20, 7))
        news(engine)
        engine.run("cold", tokens)
        news(engine)
        assert store.flush(10)
        news(engine)
        assert router.expects(tokens, size) == 160 // size * size
        assert {medium for media in router.media.values() for medium in media} == {"CPU", "disk"}
        for length in (15, 47, 48, 63, 64, 65, 130):
            engine.forget()
            loaded = engine.cached(engine.run(f"of{length}", [*tokens[:length], 999]))
            assert loaded == router.expects(tokens[:length], size), length
        drop_ram(store)
        news(engine)
        assert router.expects(tokens, size) == 160 // size * size
        scopes = [names.scope(NOBODY).tag for names in engine.connector._scheduler.names]
        for tag in scopes:
            store.clear(tag)
        news(engine)
        assert router.expects(tokens, size) == 0


def test_blocks_found_are_told_of_too(tmp_path: Path) -> None:
    """After a restart a router learns of old blocks when the first request hits them."""
    store, tokens = toy_store(), prompt(161)
    with Toy(tmp_path, store).start() as engine:
        engine.run("cold", tokens)
        engine.settled()
    router = Router()
    with Toy(tmp_path, store, events=True).start() as engine:
        listen(engine, router)
        assert router.expects(tokens, 16) == 0
        engine.run("warm", tokens)
        news(engine)
        assert router.expects(tokens, 16) == 160


def test_what_happens_while_an_answer_is_on_its_way_is_told(tmp_path: Path) -> None:
    """Blocks of two shards are stored after the question was answered and before the answer is there."""
    store, tokens, router = toy_store(), prompt(161), Router()
    with Toy(tmp_path, store, ranks=2, shards=2, events=True).start() as engine:
        listen(engine, router)
        asked, go_on = threading.Event(), threading.Event()
        answer = store.events

        def slowly(after: int, tag: bytes) -> Events:
            told = answer(after, tag)
            if not go_on.is_set():
                asked.set()
                go_on.wait(10)
            return told

        store.events = slowly  # type: ignore[method-assign]
        assert asked.wait(10)
        engine.add("cold", tokens)
        while not engine.finished or engine.connector._scheduler.side._held:
            engine.step()
        go_on.set()
        news(engine)
        assert router.expects(tokens, 16) == 160


def described(number: int) -> Described:
    return Described(bytes([number]), None, [number])


def key(number: int, shard: int) -> BlockKey:
    return BlockKey(bytes([number, shard]) * 16)


@given(
    st.integers(1, 3),
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 2), st.sampled_from(["ram", "disk"]))
    ),
)
def test_a_block_is_told_of_while_every_shard_has_it(
    shards: int, happened: list[tuple[bool, int, int, str]]
) -> None:
    ledger, told, truth = Ledger(shards), set(), set()
    for number in range(6):
        assert (
            list(ledger.note(tuple(key(number, shard) for shard in range(shards)), described(number))) == []
        )
    for stored, number, shard, place in happened:
        if shard >= shards:
            continue
        (truth.add if stored else truth.discard)((number, shard, place))
        for change in ledger.happened([Event(stored, key(number, shard), place)]):
            at = (change.block.block_hash[0], change.place)
            assert (at in told) is not change.stored
            (told.add if change.stored else told.discard)(at)
        assert told == {
            (number, place)
            for number in range(6)
            for place in ("ram", "disk")
            if all((number, shard, place) in truth for shard in range(shards))
        }


def test_what_is_forgotten_or_lost_is_taken_back() -> None:
    ledger = Ledger(1, blocks_max=2)
    for number in (1, 2):
        list(ledger.note((key(number, 0),), described(number)))
        list(ledger.happened([Event(True, key(number, 0), "ram")]))
    assert list(ledger.note((key(3, 0),), described(3))) == [Change(False, described(1), "ram")]
    assert list(ledger.happened([Event(False, key(1, 0), "ram")])) == []
    assert list(ledger.lost()) == [Change(False, described(2), "ram")]
    assert list(ledger.lost()) == []


def test_told_again_a_block_comes_after_the_one_before_it() -> None:
    """Two prompts that begin alike: the one asked for last has moved their beginning to the end."""
    ledger = Ledger(1)
    chain = {1: None, 2: 1, 3: 2, 4: 1}
    blocks = {
        number: Described(bytes([number]), None if parent is None else bytes([parent]), [number])
        for number, parent in chain.items()
    }
    for number in (1, 2, 3, 1, 4):
        list(ledger.note((key(number, 0),), blocks[number]))
    for number in (3, 1, 4):
        list(ledger.happened([Event(True, key(number, 0), "ram")]))
    list(ledger.happened([Event(True, key(1, 0), "disk")]))
    told = list(ledger.again())
    seen = [change.block.block_hash[0] for change in told if change.stored]
    assert sorted(seen) == [1, 1, 3, 4]
    assert seen.index(1) == 0
    # Taken back before it is told, each time.
    assert [(c.stored, c.block, c.place) for c in told[1::2]] == [(True, c.block, c.place) for c in told[::2]]
    assert not any(c.stored for c in told[::2])
    assert list(ledger.happened([Event(False, key(3, 0), "ram")])) == [Change(False, blocks[3], "ram")]
