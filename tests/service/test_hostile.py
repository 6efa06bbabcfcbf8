"""What comes over the socket is believed as far as it holds: garbage, crowds, strangers, little room."""

from __future__ import annotations

import os
import pickle
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.service.running import Running, environ
from tests.service.test_faults import get_any, settled
from tests.store.support import PAYLOAD, RECORD, Served, assert_nothing_leaked, chain, eventually, get, put

from tiercel.errors import DaemonError
from tiercel.memory import Arena, ArenaKind
from tiercel.service import session, wire
from tiercel.service.client import RemoteStore
from tiercel.service.daemon import CLIENTS_MAX
from tiercel.service.link import Connection, Link, Slab
from tiercel.store import TieredStore

NOBODY = 65534
SLOTS = 16
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    arena = Arena(RECORD, SLOTS, reserved=4, kind=ArenaKind.SHARED)
    with Served(TieredStore(arena)) as one:
        yield one


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("d") / "s"


def raw(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(10.0)
    sock.connect(os.fspath(path))
    return sock


def talk(path: Path, packets: list[bytes], *, hello: bool = True) -> None:
    """Say it all and hear the answers until the other side has enough, or we have."""
    with raw(path) as sock, suppress(OSError):
        if hello:
            wire.send(sock, wire.Hello(wire.VERSION, os.getpid(), PAYLOAD))
        for packet in packets:
            sock.sendall(packet)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass


def still_right(served: Served) -> None:
    """The control: others are served as before, and nothing is held for the one who talked nonsense."""
    assert put(served, chain(4)) in (0, 4)  # type: ignore[arg-type]
    assert get(served, chain(4)) == ["ram"] * 4  # type: ignore[arg-type]
    assert_nothing_leaked(served.inner)


def framed(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


numbers = st.integers(-(2**63), 2**64 - 1) | st.integers(-3, 40)
seconds = st.floats(max_value=0.05) | st.just(float("nan"))
keys = st.integers(0, 8).map(lambda blocks: wire.named(chain(blocks, seed=3)).keys) | st.binary(max_size=96)
infos = st.binary(max_size=64) | st.just(b"i" * 9000)
named = st.builds(wire.Named, root=st.binary(max_size=64), info=infos, keys=keys)
questions = st.one_of(
    st.builds(wire.Hello, version=numbers, pid=numbers, payload_bytes=numbers),
    st.builds(wire.Lookup, chain=named, deadline_s=seconds, start=numbers),
    st.builds(wire.Acquire, chain=named, deadline_s=seconds, start=numbers, limit=numbers),
    st.builds(wire.Next, advance=numbers, limit=numbers),
    st.builds(wire.BeginStore, chain=named, start=numbers, stop=numbers, payload_bytes=numbers,
              deadline_s=seconds, limit=numbers),
    st.builds(wire.Take, limit=numbers),
    st.just(wire.Commit()),
    st.just(wire.Release()),
    st.builds(wire.Pin, chain=named, ttl_s=seconds),
    st.builds(wire.Prefetch, chain=named, deadline_s=seconds),
    st.builds(wire.Demote, chain=named, deadline_s=seconds),
    st.builds(wire.Drop, chain=named, deadline_s=seconds),
    st.builds(wire.EventsSince, after=numbers, tag=st.binary(max_size=16)),
    st.builds(wire.Clear, tag=st.binary(min_size=1, max_size=16), deadline_s=seconds),
    st.builds(wire.Flush, deadline_s=seconds),
    st.just(wire.AskStats()),
)  # fmt: skip
SMALL = st.builds(
    wire.BeginStore, chain=st.integers(1, 8).map(lambda blocks: wire.named(chain(blocks, seed=3))),
    start=st.integers(0, 9), stop=st.integers(-1, 20), payload_bytes=st.integers(1, PAYLOAD),
    deadline_s=st.just(0.0), limit=st.integers(1, 9),
)  # fmt: skip
packets = (
    st.builds(lambda one: framed(msgspec.msgpack.encode(one)), questions | SMALL)
    | st.binary(max_size=60).map(framed)
    | st.binary(max_size=60)
)
relaxed = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


@given(said=st.lists(packets, max_size=12), hello=st.booleans())
@settings(relaxed, max_examples=150)
def test_whatever_is_said_others_are_served(served: Served, said: list[bytes], hello: bool) -> None:
    talk(served.daemon.path, said, hello=hello)
    still_right(served)


@pytest.mark.soak
@given(said=st.lists(packets, max_size=40), hello=st.booleans())
@settings(relaxed, max_examples=5000)
def test_whatever_is_said_others_are_served_for_long(served: Served, said: list[bytes], hello: bool) -> None:
    talk(served.daemon.path, said, hello=hello)
    still_right(served)


@given(st.lists(questions | SMALL, min_size=1, max_size=8), st.data())
@settings(relaxed, max_examples=60)
def test_a_message_that_breaks_off_anywhere(served: Served, said: list[Any], data: st.DataObject) -> None:
    whole = b"".join(framed(msgspec.msgpack.encode(one)) for one in said)
    talk(served.daemon.path, [whole[: data.draw(st.integers(0, len(whole)))]])
    still_right(served)


@pytest.mark.parametrize("length", [wire.PACKET_BYTES_MAX + 1, 2**31, 2**32 - 1])
def test_a_length_beyond_the_bound_ends_the_session_before_anything_is_read(
    served: Served, length: int
) -> None:
    with raw(served.daemon.path) as sock:
        sock.sendall(struct.pack("<I", length))
        assert sock.recv(1) == b""
    still_right(served)


class Trap:
    """Unpickled, it makes the file it was told."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def test_d10_a_planted_pickle_is_only_bytes(served: Served, tmp_path: Path) -> None:
    mark = tmp_path / "sprung"
    pickles = [pickle.dumps(Trap(mark), protocol) for protocol in range(2, 6)]
    pickle.loads(pickles[0])  # noqa: S301
    assert mark.exists(), "the control: it does spring"
    mark.unlink()
    for one in pickles:
        talk(served.daemon.path, [one])
        talk(served.daemon.path, [framed(one)])
        talk(served.daemon.path, [framed(msgspec.msgpack.encode({"type": "lookup", "chain": one}))])
        hidden = wire.Named(one, one, b"")
        talk(served.daemon.path, [framed(msgspec.msgpack.encode(wire.Lookup(hidden, 0.0, 0)))])
    assert not mark.exists()
    still_right(served)


def test_who_sends_a_byte_now_and_then_is_not_waited_for(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_PATIENCE_S", 0.5)
    with raw(served.daemon.path) as slow:
        started_s = time.monotonic()
        with pytest.raises(OSError, match=r"[Bb]roken pipe|reset"):  # noqa: PT012
            for byte in struct.pack("<I", 10_000) + bytes(10_000):
                slow.sendall(bytes([byte]))
                time.sleep(0.05)
        assert time.monotonic() - started_s < 20
    still_right(served)


def test_one_who_never_reads_answers_holds_nobody_up(served: Served) -> None:
    with raw(served.daemon.path) as deaf:
        wire.send(deaf, wire.Hello(wire.VERSION, os.getpid(), PAYLOAD))
        deaf.settimeout(0.2)
        with pytest.raises(OSError):  # noqa: PT012
            for _ in range(100_000):
                deaf.sendall(framed(msgspec.msgpack.encode(wire.AskStats())))
        still_right(served)


# Crowds and limits.


def test_of_600_clients_512_are_served_and_the_others_told_why(path: Path) -> None:
    assert CLIENTS_MAX == 512
    with Running(path), ExitStack() as stack:
        link = Link(path, PAYLOAD)
        stack.callback(link.close)
        made: list[Connection] = []
        refused: list[str] = []
        for _ in range(600):
            try:
                made.append(link.connect(10.0))
                stack.callback(made[-1].sock.close)
            except DaemonError as fault:
                refused.append(str(fault))
        assert (len(made), len(refused)) == (512, 88)
        assert set(refused) == {f"daemon at {path}: 512 connections are open, no more are accepted"}
        assert all(isinstance(one.ask(wire.AskStats(), 10), wire.Figures) for one in made[:: len(made) // 8])
        made[0].sock.close()

        def accepted() -> bool:
            with suppress(DaemonError):
                link.connect(10.0).sock.close()
                return True
            return False

        assert eventually(accepted), "who leaves makes room"


def test_many_clients_at_once_are_all_served(path: Path) -> None:
    with Running(path, "ram.size=4MiB") as daemon, daemon.connect() as first:
        put(first, chain(4))  # type: ignore[arg-type]
        right: list[int] = []

        def one() -> None:
            with daemon.connect() as store:
                right.append(len(get_any(store, chain(4))))

        threads = [threading.Thread(target=one) for _ in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert right == [4] * 200
        assert eventually(settled(daemon))


def test_out_of_descriptors_those_who_are_there_are_served_on(path: Path, tmp_path: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))

    with Running(path, disk=tmp_path / "kv", preexec=few) as daemon, daemon.connect() as store:
        put(store, chain(4))  # type: ignore[arg-type]
        with ExitStack() as crowd:
            for _ in range(60):
                crowd.enter_context(raw(path))
            assert eventually(lambda: "could not be accepted" in daemon.log.read_text()), "the fault fired"
            assert get_any(store, chain(4)) == ["ram"] * 4
            assert put(store, chain(4, seed=1)) == 4  # type: ignore[arg-type]
            assert get_any(store, chain(4, seed=1)) == ["ram"] * 4
        with daemon.connect() as late:
            assert get_any(late, chain(4)) == ["ram"] * 4
        assert eventually(lambda: store.flush(5.0))
        assert daemon.end() == 0


# Strangers.


@needs_root
def test_another_user_is_refused_by_the_file_and_by_the_daemon(path: Path) -> None:
    with Running(path) as daemon:
        assert path.stat().st_mode & 0o777 == 0o600
        for folder in [path.parent, *path.parent.parents]:
            if folder.stat().st_uid == 0 and len(folder.parts) > 2:
                folder.chmod(folder.stat().st_mode | 0o011)
        assert as_nobody(path) == "PermissionError"
        path.chmod(0o666)
        why = "it serves user 0, this process belongs to user 65534"
        assert as_nobody(path) == f"daemon at {path}: {why}"
        assert why in daemon.log.read_text()
        with daemon.connect() as store:
            assert put(store, chain(2)) == 2  # type: ignore[arg-type]


STRANGER = """
import os, sys
from pathlib import Path
from tiercel.errors import DaemonError
from tiercel.service import wire
from tiercel.service.link import Link
os.setgroups([]); os.setgid({0}); os.setuid({0})
try:
    Link(Path(sys.argv[1]), 4096).connect(5.0)
    print("served")
except DaemonError as fault:
    print(fault)
except wire.WireError as fault:
    print("PermissionError" if "Permission denied" in str(fault) else fault)
"""


def as_nobody(path: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", STRANGER.format(NOBODY), str(path)],
        capture_output=True, text=True, timeout=30, check=True, env=environ(),
    )  # fmt: skip
    return done.stdout.strip()


@needs_root
def test_a_client_takes_no_bytes_from_a_daemon_of_another_user(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Running(path):
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setattr(wire, "peer", lambda sock: (1, 1001))
        with pytest.raises(DaemonError, match="belongs to user 1001; accepted are this user's and root's"):
            Link(path, PAYLOAD).connect(5.0)
        monkeypatch.setattr(wire, "peer", lambda sock: (1, 1000))
        link = Link(path, PAYLOAD)
        link.connect(5.0).sock.close()
        link.close()


def test_another_version_is_refused_in_a_line_that_says_what_to_do(path: Path) -> None:
    with Running(path), raw(path) as sock:
        wire.send(sock, wire.Hello(wire.VERSION + 1, 17, PAYLOAD))
        answer, _ = wire.receive_answer(sock, 5.0)
        assert answer == wire.Refused(
            f"protocol version {wire.VERSION + 1} of process 17 is not accepted; this daemon speaks version "
            f"{wire.VERSION}: use one release of tiercel for both"
        )


# Memory.


def test_d28_the_arena_does_not_live_in_dev_shm(path: Path) -> None:
    """/dev/shm of 64 MB, a RAM tier of 192 MiB: every page of it is written and read."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("this machine gives no mount namespace of our own")
    inside = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && df -k --output=size /dev/shm >&2 && exec "$@"'
    before = ["unshare", "-m", "sh", "-c", inside, "sh"]
    payload = 1 << 20
    with Running(path, "ram.size=192MiB", before=before) as daemon, daemon.connect(payload) as store:
        assert "65536" in daemon.log.read_text(), "the control: it is that small"
        prompt = chain(150)
        with store.begin_store(prompt, 0, 150, payload, 30.0) as writing:
            for block in writing:
                block.payload[:] = bytes([block.index]) * payload
            assert writing.commit() == 150
        with store.acquire(prompt) as reading:
            seen = [(one.payload[0], one.payload[payload - 1]) for one in reading]
        assert seen == [(index, index) for index in range(150)]


def test_an_arena_larger_than_the_host_is_one_line(path: Path) -> None:
    with Running(path, "ram.size=900TiB") as daemon:
        with pytest.raises(DaemonError, match=r"RAM tier of \d+ bytes does not fit: \d+ bytes are left"):
            daemon.connect()
        assert daemon.status()["stats"] is None


def test_a_client_that_cannot_map_the_arena_goes_without(path: Path) -> None:
    with Running(path) as daemon, daemon.connect() as store:
        put(store, chain(4))  # type: ignore[arg-type]

    with Served(TieredStore(Arena(RECORD, 4, reserved=1, kind=ArenaKind.SHARED))) as one:
        welcome = one.daemon.welcome

        def enlarged(hello: wire.Hello) -> tuple[wire.Welcome, list[int]]:
            told, fds = welcome(hello)
            return msgspec.structs.replace(told, arena=b"other", slots=2**40), fds

        one.daemon.welcome = enlarged  # type: ignore[method-assign]
        with RemoteStore(Link(one.daemon.path, PAYLOAD)) as store:
            assert store.lookup(chain(4)).blocks == 0
            assert get_any(store, chain(4)) == []
            assert store.failures > 0


def smaps() -> str:
    return Path("/proc/self/smaps").read_text()


def test_an_engine_s_memory_is_not_charged_for_what_the_daemon_has_not_touched() -> None:
    """It maps ahead of its copies, but only pages that are there: the first to touch one pays for it."""
    slots, slot_bytes = 64, 1 << 20
    arena = Arena(slot_bytes, slots, reserved=1, kind=ArenaKind.SHARED)
    slab = Slab(arena.fileno(), wire.Welcome(wire.VERSION, 1, b"a", slot_bytes, slots))
    arena.view(0)[:] = bytes(slot_bytes)
    thread = threading.Thread(target=slab.populate, args=(os.dup(arena.fileno()),))
    thread.start()
    time.sleep(0.3)
    assert os.fstat(arena.fileno()).st_blocks * 512 == slot_bytes
    assert thread.is_alive(), "it waits for the daemon"
    arena.prefault()
    thread.join(20)
    assert not thread.is_alive()
    maps = re.findall(
        r"memfd:tiercel-arena[^\n]*\nSize: +65536 kB\n(.*?)\nRss: +(\d+) kB", smaps(), re.DOTALL
    )
    assert [rss for _, rss in maps] == ["65536"] * 2, "now it is mapped, here and there"
    arena.close()
    fd = os.memfd_create("x")
    os.ftruncate(fd, 1 << 20)
    waiting = Slab(fd, wire.Welcome(1, 1, b"b", 1 << 20, 1))
    thread = threading.Thread(target=waiting.populate, args=(fd,))
    thread.start()
    waiting.drop()
    thread.join(5)
    assert not thread.is_alive(), "nobody needs it any more"
