"""Small blocks with bytes that follow from their keys, stores over a directory, a tier that misbehaves."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tiercel.blocks import BlockKey, Chain, Identity, Scope, record_bytes
from tiercel.config import Config
from tiercel.memory import Arena, ArenaKind
from tiercel.service import Daemon, connect
from tiercel.store import LaneOptions, SecondSight, Sight, TieredStore
from tiercel.tiers import FilesTier, Outcome, Stored, Tier, Usage

PAYLOAD = 4096
RECORD = record_bytes(PAYLOAD)
TOKENS = 4


def scope(name: str = "a", salt: str | None = None, revision: str = "1") -> Scope:
    return Scope(Identity(f"model-{name}", revision, "bf16", b"g", "layout/1", TOKENS), salt=salt)


def chain(blocks: int, seed: int = 0, of: Scope | None = None) -> Chain:
    tokens = [token + 1000 * seed for token in range(blocks * TOKENS)]
    return (of or scope()).chain(tokens)


def branch(shared: int, own: int, seed: int) -> Chain:
    """A chain of `shared` blocks that all branches begin with, then `own` blocks of its own."""
    tokens = [*range(shared * TOKENS), *(10_000 * seed + at for at in range(own * TOKENS))]
    return scope().chain(tokens)


def payload_of_key(key: BlockKey) -> bytes:
    return (key * (PAYLOAD // len(key) + 1))[:PAYLOAD]


class Served:
    """A store behind a daemon in this process: an engine's calls go through a client, the rest is direct."""

    CALLS = frozenset(
        (
            "lookup acquire begin_store pin unpin prefetch demote drop sessions clear stats events flush "
            "report decisions overview chain_of"
        ).split()
    )

    def __init__(self, inner: TieredStore) -> None:
        self.inner = inner
        self.folder = tempfile.TemporaryDirectory(prefix="tiercel-served-")
        path = Path(self.folder.name) / "s"
        config = Config.load(None, {}, {"daemon.socket": str(path), "ram.size": "1MiB"})
        self.daemon = Daemon(config, path)
        self.daemon._store = inner
        self.thread = threading.Thread(target=self.daemon.run, daemon=True)
        self.thread.start()
        self.client = connect(config, PAYLOAD)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client if name in self.CALLS else self.inner, name)

    def close(self, deadline_s: float = 30.0) -> bool:
        self.client.close()
        flushed = self.inner.close(deadline_s)
        self.daemon.stop()
        self.thread.join(10)
        self.daemon.close()
        self.folder.cleanup()
        return flushed

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# How `make_store` makes a store: `embedded`, or `daemon` for one behind a daemon. Set by a fixture.
HOW = ["embedded"]


def make_store(
    *tiers: tuple[Tier, LaneOptions],
    slots: int = 16,
    reserved: int = 4,
    scanned: bool = True,
    admission: SecondSight | None = None,
) -> TieredStore:
    kind = ArenaKind.SHARED if HOW[0] == "daemon" else ArenaKind.PRIVATE
    store = TieredStore(Arena(RECORD, slots, reserved=reserved, kind=kind), tiers, admission)
    assert not scanned or store.scanned(10)
    return Served(store) if HOW[0] == "daemon" else store  # type: ignore[return-value]


def disk(root: Path, name: str = "disk") -> FilesTier:
    return FilesTier(root, name=name)


def put(
    store: TieredStore, of: Chain, start: int = 0, deadline_s: float = 5.0, sight: Sight = Sight.NEW
) -> int:
    with store.begin_store(of, start, len(of), PAYLOAD, deadline_s, sight) as lease:
        for block in lease:
            block.payload[:] = payload_of_key(of.keys[block.index])
        return lease.commit()


def get(store: TieredStore, of: Chain, deadline_s: float = 5.0) -> list[str]:
    """The sources of the blocks that came back; their bytes are checked."""
    sources: list[str] = []
    with store.acquire(of, deadline_s) as lease:
        for block in lease:
            assert bytes(block.payload) == payload_of_key(of.keys[block.index]), "wrong bytes"
            assert block.index == len(sources)
            sources.append(block.source)
    return sources


def drop_ram(store: TieredStore) -> None:
    """Evict all that nobody holds, as if other blocks had come."""
    with store.lock:
        for entry in store.ram.entries():
            if entry.holds == 0:
                store.ram.remove(entry)


def eventually(condition: Callable[[], bool], within_s: float = 20.0) -> bool:
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        if condition():
            return True
        time.sleep(0.005)
    return condition()


def file_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.kv"))


def assert_nothing_leaked(store: TieredStore) -> None:
    def settled() -> bool:
        with store.lock:
            # A staged entry is nobody's to evict: it must leave with its last hold.
            held = [entry for entry in store.ram.entries() if entry.holds or entry.staged]
            return (
                not held
                and store.arena.free_slots + len(store.ram) == store.arena.slots
                and not store.leases
                and not store.wanted
            )

    assert eventually(settled), store.stats()


@contextmanager
def mounted(where: Path, size: str) -> Iterator[Path]:
    """A real file system of that size; skips the test where none can be had."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    where.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", where], capture_output=True)
    if done.returncode:
        pytest.skip(f"this host lets nobody mount a tmpfs: {done.stderr.decode().strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "--lazy", where], check=True)


class FaultyTier:
    """Wraps a tier; `faults` maps a call's name to what to do instead. Counts calls and faults that fired."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.faults: dict[str, Callable[..., object]] = {}
        self.calls: list[str] = []
        self.fired = 0
        self.reads: list[BlockKey] = []
        self.deny_nth: int | None = None
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self.inner.name

    def _through(self, what: str, call: Callable[..., object], *args: object) -> object:
        with self._lock:
            self.calls.append(what)
            nth = len(self.calls)
            fault = self.faults.get(what)
            if self.deny_nth == nth:
                fault = raising
            if fault is not None:
                self.fired += 1
        return fault(*args) if fault else call(*args)

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._through("contains", self.inner.contains, keys)  # type: ignore[return-value]

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        self.reads += keys
        return self._through("read", self.inner.read, keys, records)  # type: ignore[return-value]

    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        return self._through("write", self.inner.write, keys, records)  # type: ignore[return-value]

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self._through("delete", self.inner.delete, keys)  # type: ignore[return-value]

    def scan(self) -> Iterator[Stored]:
        return self._through("scan", self.inner.scan)  # type: ignore[return-value]

    def usage(self) -> Usage:
        return self.inner.usage()

    def close(self) -> None:
        self._through("close", self.inner.close)


class Denied(RuntimeError):
    """No exception the store could know."""


def raising(*_: object) -> object:
    raise Denied("denied")
