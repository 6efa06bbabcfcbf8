"""Copies are ordered against a device's compute queue, and hold their slots until they are done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines.vllm.toy import Toy, prompt, toy_store

from tiercel.engines.vllm.mover import CpuMover


class Stream:
    """A device's compute queue: work runs later, in order, on a thread of its own."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.works: list[Callable[[], None]] = []
        self.faults: list[AssertionError] = []
        self.condition = threading.Condition()
        self.queued = self.ran = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def queue(self, work: Callable[[], None]) -> None:
        with self.condition:
            self.works.append(work)
            self.queued += 1
            self.condition.notify_all()

    def wait(self, number: int) -> None:
        with self.condition:
            assert self.condition.wait_for(lambda: self.ran >= number, 20)

    def _run(self) -> None:
        while True:
            with self.condition:
                self.condition.wait_for(lambda: self.works)
                work = self.works.pop(0)
            time.sleep(self.delay_s)
            try:
                work()
            except AssertionError as fault:  # for the test to show
                self.faults.append(fault)
            with self.condition:
                self.ran += 1
                self.condition.notify_all()


def stream_mover(stream: Stream, *, ordered: bool) -> Any:

    class StreamMover(CpuMover):
        def mark(self) -> object:
            return stream.queued

        def load(self, mark: Any, blocks: Any) -> None:
            if ordered:
                stream.wait(mark)
            super().load(mark, blocks)

        def save(self, mark: Any, blocks: Any) -> None:
            if ordered:
                stream.wait(mark)
            super().save(mark, blocks)

    return StreamMover


def run_on_stream(tmp_path: Path, *, ordered: bool) -> Stream:
    stream = Stream(0.001)
    toy = Toy(
        tmp_path, toy_store(slots=600), blocks=33, mover=stream_mover(stream, ordered=ordered),
        queue=stream.queue,
    )  # fmt: skip
    with toy.start() as engine:
        for round_ in range(3):
            for number in range(6):
                engine.add(f"{round_}-{number}", prompt(60 + 9 * number, number), 20)
            engine.drain()
            stream.wait(stream.queued)
            engine.forget()
        assert engine.stats["loads"] > 0
        stream.wait(stream.queued)
    return stream


def test_copies_are_ordered_against_the_compute_stream(tmp_path: Path) -> None:
    """D12, D13: saves after the compute that writes, loads after the compute that still reads."""
    stream = run_on_stream(tmp_path, ordered=True)
    assert stream.faults == []


def test_the_stream_bites(tmp_path: Path) -> None:
    """The control of the test above: without waiting for marks the same run reads wrong KV."""
    assert run_on_stream(tmp_path, ordered=False).faults != []


def test_slots_are_given_back_only_after_their_copy(tmp_path: Path) -> None:
    """D14: while a copy runs, the lease it reads from or writes to is held."""

    store = toy_store()
    held: list[int] = []

    class Watching(CpuMover):
        def load(self, mark: Any, blocks: Any) -> None:
            held.append(store.stats().leases)
            super().load(mark, blocks)
            held.append(store.stats().leases)

    with Toy(tmp_path, store, mover=Watching).start() as engine:
        engine.run("cold", prompt(161))
        engine.forget()
        engine.run("warm", prompt(161))
        engine.settled()
    assert held
    assert all(held)
