"""KV events as llm-d's router reads them off the wire: what it expects is what a load gives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm.router import Router, Subscriber, engine_key
from tests.engines.vllm.toy import Toy, ToyEngine, prompt, toy_store
from tests.store.support import disk, drop_ram
from vllm.distributed.kv_events import ZmqEventPublisher

from tiercel.engines.vllm import events
from tiercel.engines.vllm.jobs import NOBODY
from tiercel.store import LaneOptions


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """News are looked for more often, and waited for less long."""
    monkeypatch.setattr(events, "_POLL_S", 0.02)
    monkeypatch.setattr(events, "_NEWS_S", 0.1)


class Wire:
    """An engine whose events go over vLLM's own publisher, and a router at the other end."""

    def __init__(self, engine: ToyEngine, router: Router, folder: Path, steps: int) -> None:
        self.engine, self.router = engine, router
        self._at = f"ipc://{folder}/e", f"ipc://{folder}/r"
        self.publisher = ZmqEventPublisher(
            0, self._at[0], self._at[1], buffer_steps=steps, topic="kv@10.0.0.7:8000@toy"
        )
        engine.scheduler.kv_event_publisher = self.publisher
        self.subscriber = Subscriber(router, *self._at)
        self.polls = 0
        self._poll = engine.connector._scheduler.events._poll
        engine.connector._scheduler.events._poll = self._counted
        time.sleep(0.1)

    def _counted(self, *arguments: Any) -> int:
        """A look for news; what happened before it began is told of by it."""
        found = self._poll(*arguments)
        self.polls += 1
        return int(found)

    def news(self) -> None:
        """Let the engine publish what happened, as its next steps would, and read it."""
        self.engine.step()
        until, deadline_s = self.polls + 2, time.monotonic() + 20
        while self.polls < until:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        self.engine.step()
        self.engine.drain()
        while not self.publisher._event_queue.empty():
            time.sleep(0.01)
        self.subscriber.read()

    def another(self, router: Router) -> Subscriber:
        """A router that starts now."""
        subscriber = Subscriber(router, *self._at)
        subscriber.ask(0)
        return subscriber

    def loads(self, name: str, tokens: list[int]) -> int:
        """What the engine can load of a prompt, its own cache empty."""
        self.engine.forget()
        return self.engine.cached(self.engine.run(name, [*tokens, 999]))


@contextmanager
def wired(toy: Toy, router: Router, steps: int = 10_000) -> Iterator[Wire]:
    folder = toy.folder / "z"
    folder.mkdir()
    with toy.start() as engine:
        wire = Wire(engine, router, folder, steps)
        try:
            yield wire
        finally:
            wire.subscriber.close()
            wire.publisher.shutdown()


def tiered(folder: Path, cap_bytes: int = 1 << 30, slots: int = 256) -> Any:
    (folder / "disk").mkdir()
    return toy_store((disk(folder / "disk"), LaneOptions(cap_bytes=cap_bytes)), slots=slots)


@pytest.mark.parametrize("units", [1, 4])
def test_after_stores_evictions_and_clears(tmp_path: Path, units: int) -> None:
    store, tokens, size = tiered(tmp_path), prompt(161), 16 * units
    router = Router(size)
    with wired(Toy(tmp_path, store, units=units, events=True), router) as wire:
        wire.engine.run("cold", tokens)
        assert store.flush(10)
        wire.news()
        whole = 160 // size * size
        assert router.expects(tokens) == router.expects(tokens, "disk") == whole
        assert router.media() >= {"cpu", "disk"}
        for length in (15, 47, 48, 63, 64, 65, 130):
            expected = router.expects(tokens[:length])
            assert expected == length // size * size
            assert wire.loads(f"of{length}", tokens[:length]) == expected
            wire.news()
        drop_ram(store)
        wire.news()
        assert router.expects(tokens, "cpu") == 0
        assert router.expects(tokens) == whole == wire.loads("from disk", tokens)
        wire.news()
        assert router.expects(tokens, "cpu") == whole
        for names in wire.engine.connector._scheduler.names:
            store.clear(names.scope(NOBODY).tag)
        wire.news()
        assert router.expects(tokens) == 0
        assert wire.loads("gone", tokens) == 0
        assert router.orphans == 0


def test_with_tiers_that_are_too_small(tmp_path: Path) -> None:
    """RAM and disk both push blocks out: never a token more is expected than can be loaded."""
    store = tiered(tmp_path, cap_bytes=300_000, slots=24)
    router = Router(16)
    prompts = [prompt(161, seed, shared=48) for seed in range(14)]
    with wired(Toy(tmp_path, store, events=True), router) as wire:
        for number, tokens in enumerate(prompts):
            wire.engine.run(f"cold{number}", tokens)
            assert store.flush(10)
        wire.news()
        expected = [router.expects(tokens) for tokens in prompts]
        assert 0 < sum(one < 160 for one in expected) < len(prompts), expected
        # Each load makes room for what it brings up, so one prompt is compared at a time.
        for number, tokens in reversed(list(enumerate(prompts))):
            believed = router.expects(tokens)
            assert wire.loads(f"again{number}", tokens) == believed, number
            assert store.flush(10)
            wire.news()


def test_a_reset_of_vllms_own_cache_is_not_one_of_ours(tmp_path: Path) -> None:
    """vLLM tells of it without a tier, so that a router forgets the pod; ours are told of again."""
    store, tokens, router = tiered(tmp_path), prompt(161), Router(16)
    with wired(Toy(tmp_path, store, events=True), router) as wire:
        wire.engine.run("cold", tokens)
        assert store.flush(10)
        wire.news()
        assert router.expects(tokens, "disk") == 160
        wire.engine.forget()
        wire.news()
        assert router.cleared == 1
        assert router.expects(tokens) == router.expects(tokens, "disk") == 160
        drop_ram(store)
        wire.news()
        assert router.expects(tokens, "cpu") == 0, "told of once, so taken back by one removal"


def test_messages_that_are_lost_are_asked_for_again(tmp_path: Path) -> None:
    store, tokens, router = tiered(tmp_path), prompt(161), Router(16)
    with wired(Toy(tmp_path, store, events=True), router) as wire:
        wire.subscriber.lose = {1, 2, 5}
        for number in range(4):
            wire.engine.run(f"cold{number}", prompt(161, number))
            assert store.flush(10)
            wire.news()
        assert wire.subscriber.replayed > 0, "the fault has fired"
        for number in range(4):
            assert router.expects(prompt(161, number)) == 160
        late = Router(16)
        wire.another(late).close()
        assert late.entries == router.entries
        assert tokens


def test_a_replay_that_is_too_short_expects_no_more_than_is_there(tmp_path: Path) -> None:
    store, router = tiered(tmp_path), Router(16)
    with wired(Toy(tmp_path, store, events=True), router, steps=2) as wire:
        for number in range(4):
            wire.engine.run(f"cold{number}", prompt(161, number))
            assert store.flush(10)
            wire.news()
        late = Router(16)
        wire.another(late).close()
        assert late.cleared == 1, "the fault has fired"
        for number in range(4):
            tokens = prompt(161, number)
            assert late.expects(tokens) <= router.expects(tokens) == 160


def test_events_that_the_store_lost_are_taken_back_and_told_again(tmp_path: Path) -> None:
    store, tokens, router = tiered(tmp_path), prompt(161), Router(16)
    with wired(Toy(tmp_path, store, events=True), router) as wire:
        wire.engine.run("cold", tokens)
        assert store.flush(10)
        wire.news()
        assert router.expects(tokens) == 160
        ask, lost = store.events, list[Any]()

        def losing(after: int, tag: bytes) -> Any:
            told = ask(after, tag)
            if not lost:
                lost.append(told)
                return replace(told, lost=True)
            return told

        store.events = losing
        wire.news()
        assert lost, "the fault has fired"
        assert router.expects(tokens) == 0
        assert wire.loads("again", tokens) == 160
        wire.news()
        assert router.expects(tokens) == 160


def test_a_salt_is_another_prompt(tmp_path: Path) -> None:
    store, tokens, router = tiered(tmp_path), prompt(161), Router(16)
    with wired(Toy(tmp_path, store, events=True), router) as wire:
        wire.engine.run("salted", tokens, salt="tenant")
        assert store.flush(10)
        wire.news()
        assert "disk" in router.media(), "the control: it was told of"
        assert router.expects(tokens) == 0 == wire.loads("plain", tokens)
        wire.news()
        assert router.expects(tokens) == 160


def test_hashes_are_cut_as_the_router_cuts_them() -> None:
    assert engine_key(bytes(range(32))) == int.from_bytes(bytes(range(24, 32)), "big")
    assert engine_key(-1) == (1 << 64) - 1
