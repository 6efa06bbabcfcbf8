"""One client's conversation: what breaks the rules ends it, what it held comes back, a liar is a miss."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.store.support import (
    PAYLOAD,
    RECORD,
    FaultyTier,
    Served,
    assert_nothing_leaked,
    chain,
    disk,
    drop_ram,
    eventually,
    get,
    payload_of_key,
    put,
    scope,
)

from tiercel.blocks import payload_of
from tiercel.config import Config
from tiercel.memory import Arena, ArenaKind
from tiercel.service import Daemon, wire
from tiercel.service.client import RemoteStore
from tiercel.service.link import Connection, Link
from tiercel.store import LaneOptions, TieredStore, WriteMode


@pytest.fixture
def served() -> Iterator[Served]:
    with Served(TieredStore(Arena(RECORD, 16, reserved=4, kind=ArenaKind.SHARED))) as one:
        yield one


@pytest.fixture
def connect_to(served: Served) -> Iterator[Callable[[], Connection]]:
    links: list[Link] = []
    made: list[Connection] = []

    def connect() -> Connection:
        links.append(Link(served.daemon.path, PAYLOAD))
        made.append(links[-1].connect(2.0))
        return made[-1]

    yield connect
    for one in made:
        one.sock.close()
    for link in links:
        link.close()


def test_a_lease_ends_when_its_connection_does(served: Served, connect_to: Callable[[], Connection]) -> None:
    put(served, chain(4))
    reading, writing = connect_to(), connect_to()
    assert isinstance(reading.ask(wire.Acquire(wire.named(chain(4)), 1.0, 0, 2), 2), wire.Blocks)
    begun = writing.ask(wire.BeginStore(wire.named(chain(8, 1)), 0, 8, PAYLOAD, 1.0, 3), 2)
    assert isinstance(begun, wire.Blocks)
    assert served.stats().leases == 2
    reading.sock.close()
    writing.sock.close()
    assert eventually(lambda: served.stats().leases == 0)
    assert served.stats().counters.stores_aborted == 3
    assert_nothing_leaked(served.inner)


def test_a_second_lease_on_a_connection_ends_the_first(
    served: Served, connect_to: Callable[[], Connection]
) -> None:
    put(served, chain(4))
    one = connect_to()
    one.ask(wire.BeginStore(wire.named(chain(8, 1)), 0, 8, PAYLOAD, 1.0, 3), 2)
    one.ask(wire.Acquire(wire.named(chain(4)), 1.0, 0, 2), 2)
    assert served.stats().leases == 1
    assert served.stats().counters.stores_aborted == 3


@pytest.mark.parametrize(
    "question",
    [
        wire.Next(0, 1),
        wire.Next(-1, 1),
        wire.Take(1),
        wire.Commit(),
        wire.BeginStore(wire.named(chain(2)), 0, 2, RECORD + 1, 1.0, 1),
        wire.BeginStore(wire.named(chain(2)), 0, 2, 0, 1.0, 1),
        wire.BeginStore(wire.named(chain(2)), -1, 2, 1, 1.0, 1),
        wire.Lookup(wire.Named(b"", b"", b"half"), 0.0, 0),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_breaks_the_rules_ends_the_session_and_no_other(
    served: Served, connect_to: Callable[[], Connection], question: wire.Question
) -> None:
    bad, good = connect_to(), connect_to()
    with pytest.raises(wire.WireError, match=r"closed|reset"):
        bad.ask(question, 2)
    assert isinstance(good.ask(wire.AskStats(), 2), wire.Figures)
    assert_nothing_leaked(served.inner)


def test_without_a_hello_nothing_is_answered(served: Served) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(os.fspath(served.daemon.path))
        with pytest.raises(wire.WireError):
            Connection(sock, None).ask(wire.AskStats(), 2)


def test_more_given_back_than_was_had_is_no_way_to_get_others_blocks(
    served: Served, connect_to: Callable[[], Connection]
) -> None:
    put(served, chain(4))
    one = connect_to()
    one.ask(wire.Acquire(wire.named(chain(4)), 1.0, 0, 2), 2)
    with pytest.raises(wire.WireError):
        one.ask(wire.Next(3, 2), 2)
    assert_nothing_leaked(served.inner)
    assert len(get(served, chain(4))) == 4


@pytest.mark.parametrize("deadline_s", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_deadline_that_is_none_is_bounded(
    served: Served, connect_to: Callable[[], Connection], deadline_s: float
) -> None:
    put(served, chain(4))
    one = connect_to()
    assert one.ask(wire.Lookup(wire.named(chain(4)), deadline_s, 0), 5) == wire.Found(("ram",) * 4)


def test_a_store_is_opened_by_the_first_engine_only(tmp_path: Path) -> None:
    from tiercel.config import Config
    from tiercel.errors import DaemonError
    from tiercel.service import Daemon, connect
    from tiercel.service.connecting import reach

    path = tmp_path / "s"
    config = Config.load(None, {}, {"daemon.socket": str(path), "ram.size": "1MiB"})
    daemon = Daemon(config, path)
    thread = threading.Thread(target=daemon.run)
    thread.start()
    try:
        with reach(path) as looking:
            figures = looking.figures()
            assert figures is not None
            assert figures.stats is None
            assert looking.lookup(chain(2)).blocks == 0
            assert looking.up
        with connect(config, PAYLOAD) as first, connect(config, 100) as smaller:
            assert first.slot_payload_bytes == smaller.slot_payload_bytes == PAYLOAD
            with pytest.raises(
                DaemonError, match=r"does not fit this daemon's slots of 4.0 KiB; set ram.slot"
            ):
                connect(config, PAYLOAD + 1)
    finally:
        daemon.stop()
        thread.join()
        assert daemon.close()
    assert not path.exists()


def test_events_come_through_and_a_restarted_daemon_says_they_are_lost(served: Served) -> None:
    at = served.events(0, scope().tag).next
    put(served, chain(3))
    told = served.events(at, scope().tag)
    assert [(one.stored, one.key, one.place) for one in told.events] == [
        (True, key, "ram") for key in chain(3).keys
    ]
    assert not told.lost
    assert served.events(told.next + 1000, scope().tag).lost


def test_an_engine_out_of_descriptors_goes_without_until_it_has_some(served: Served) -> None:
    link = Link(served.daemon.path, PAYLOAD)
    link.hold(link.connect(2.0))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with RemoteStore(link) as store:
        put(served, chain(2))
        idle = link.get(1.0)
        assert idle is not None
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            assert store.lookup(chain(2)).blocks == 0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert link.failures == 1
        link.put(idle)
        assert eventually(lambda: store.lookup(chain(2)).blocks == 2)
        assert link._open == 0, "a connection that was never made does not count as open"


@contextmanager
def lazy_daemon(folder: Path, slots: int) -> Iterator[tuple[Daemon, TieredStore, FaultyTier, Link]]:
    """A daemon whose disk gets blocks when RAM needs the room, or at the end."""
    tier = FaultyTier(disk(folder))
    lazily = LaneOptions(cap_bytes=1 << 30, deadline_s=60.0, write=WriteMode.ON_EVICT)
    store = TieredStore(Arena(RECORD, slots, reserved=2, kind=ArenaKind.SHARED), [(tier, lazily)])
    path = folder / "s"
    daemon = Daemon(Config.load(None, {}, {"daemon.socket": str(path), "store.flush_deadline": "2s"}), path)
    daemon._store = store
    serving = threading.Thread(target=daemon.run, daemon=True)
    serving.start()
    link = Link(path, PAYLOAD)
    try:
        yield daemon, store, tier, link
    finally:
        link.close()
        daemon.stop()
        serving.join(10)
        daemon.close()


def slowed(call: Callable[..., Any], wait_s: float, release: threading.Event) -> Callable[..., Any]:
    def slow(*args: object) -> object:
        release.wait(wait_s)
        return call(*args)

    return slow


def test_clients_that_wait_for_a_tier_do_not_eat_the_time_to_write_down(tmp_path: Path) -> None:
    release = threading.Event()
    with lazy_daemon(tmp_path, slots=64) as (daemon, store, tier, link):
        put(store, chain(1))
        assert store.flush(10)
        drop_ram(store)
        tier.faults["read"] = slowed(tier.inner.read, 30, release)
        put(store, chain(20, seed=1))
        waiting = [link.connect(2.0).sock for _ in range(6)]
        for one in waiting:
            wire.send(one, wire.Acquire(wire.named(chain(1)), 20.0, 0, 1))
        assert eventually(lambda: store.stats().leases == 6)
        assert store.stats().tiers[0].blocks == 1, "the control: not all is there yet"
        daemon.stop()
        assert daemon.close()
        assert store.stats().tiers[0].blocks == 21
        release.set()
        for one in waiting:
            one.close()


@pytest.mark.parametrize("ends", [True, False])
def test_who_copies_while_the_daemon_ends_copies_what_he_was_told(tmp_path: Path, ends: bool) -> None:
    """The daemon hangs up, writes down for a while and goes on loading for a prefetch meanwhile."""
    far, near = chain(30, seed=1), chain(9)
    with lazy_daemon(tmp_path, slots=12) as (daemon, store, tier, link):
        for blocks in range(1, 31):
            put(store, chain(blocks, seed=1))
            assert store.flush(10)
        drop_ram(store)
        put(store, near)
        assert store.flush(10)
        put(store, chain(1, seed=2))
        for name, wait_s in (("read", 0.02), ("write", 1.0)):
            tier.faults[name] = slowed(getattr(tier.inner, name), wait_s, threading.Event())
        reader, other = link.connect(2.0), link.connect(2.0)
        answer = reader.ask(wire.Acquire(wire.named(near), 20.0, 0, 9), 5.0)
        assert isinstance(answer, wire.Blocks)
        assert len(answer.blocks) == 9
        slab = reader.slab
        assert slab is not None

        def right() -> list[bool]:
            slots = [slab.slot(one.slot) for one in answer.blocks]
            wanted = [payload_of_key(key) for key in near.keys]
            return [bytes(payload_of(slot, PAYLOAD)) == one for slot, one in zip(slots, wanted, strict=True)]

        assert right() == [True] * 9
        wire.send(other.sock, wire.Prefetch(wire.named(far), 20.0))
        assert eventually(lambda: "read" in tier.calls)
        if ends:
            daemon.stop()
            assert daemon.close()
            assert right() == [True] * 9
        else:
            reader.sock.close()
            assert eventually(lambda: right() != [True] * 9), "the control: slots given back are used anew"
        for one in (reader, other):
            one.sock.close()


# A daemon that lies.


class Liar:
    """Welcomes properly, then answers what the test says."""

    def __init__(self, path: Path, answer: Callable[[wire.Question], wire.Answer]) -> None:
        self.answer, self.asked = answer, 0
        self.arena = Arena(RECORD, 4, kind=ArenaKind.SHARED)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(os.fspath(path))
        self.listener.listen()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.talk, args=(sock,), daemon=True).start()

    def talk(self, sock: socket.socket) -> None:
        with sock, suppress(wire.WireError):
            while (question := wire.receive_question(sock, 5.0)) is not None:
                if isinstance(question, wire.Hello):
                    welcome = wire.Welcome(wire.VERSION, 1, b"a", self.arena.slot_bytes, 4)
                    wire.send(sock, welcome, [self.arena.fileno()])
                    continue
                self.asked += 1
                wire.send(sock, self.answer(question))


@pytest.mark.parametrize(
    "answer",
    [
        wire.Blocks((wire.Block(0, 99, PAYLOAD),)),
        wire.Blocks((wire.Block(0, -1, PAYLOAD),)),
        wire.Blocks((wire.Block(0, 0, RECORD),)),
        wire.Blocks((wire.Block(0, 0, 0),)),
        wire.Number(4),
        wire.Refused("no"),
        wire.Found(("ram",)),
    ],
)
def test_a_lying_daemon_is_a_miss(tmp_path: Path, answer: wire.Answer) -> None:
    liar = Liar(tmp_path / "s", lambda question: answer)
    with RemoteStore(Link(tmp_path / "s", PAYLOAD)) as store:
        with store.acquire(chain(2), 1.0) as lease:
            assert lease.ready(4) == []
        with store.begin_store(chain(2), 0, 2, PAYLOAD, 1.0) as writing:
            assert writing.take(4) == []
    assert liar.asked >= 2
    liar.listener.close()


def test_the_control_of_the_liar_hits(tmp_path: Path) -> None:
    liar = Liar(tmp_path / "s", lambda question: wire.Blocks((wire.Block(0, 1, PAYLOAD, "ram"),)))
    liar.arena.view(1)[4096 : 4096 + PAYLOAD] = payload_of_key(chain(1).keys[0])
    with RemoteStore(Link(tmp_path / "s", PAYLOAD)) as store, store.acquire(chain(1), 1.0) as lease:
        (block,) = lease.ready(4)
        assert bytes(block.payload) == payload_of_key(chain(1).keys[0])
        del block
    liar.listener.close()
