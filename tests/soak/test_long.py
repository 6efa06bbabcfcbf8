"""What only time shows: an hour of mixed load and faults, and minutes of noise at every parser.

`TIERCEL_SOAK_S` sets the seconds of the load (3600) and, a sixth of it, of each fuzzing (600). Left out of
`make test`; `make soak` runs it.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.service.test_hostile import framed, raw
from tests.store.support import (
    HOW,
    RECORD,
    FaultyTier,
    Served,
    assert_nothing_leaked,
    chain,
    disk,
    eventually,
    file_bytes,
    get,
    make_store,
    put,
    raising,
    scope,
)

from tiercel.blocks import verify
from tiercel.blocks.record import parse, record_bytes
from tiercel.service import wire
from tiercel.store import LaneOptions, TieredStore, WriteMode
from tiercel.testing import records as samples

SOAK_S = float(os.environ.get("TIERCEL_SOAK_S", "3600"))
FUZZ_S = SOAK_S / 6
CAPS = (60 * RECORD, 150 * RECORD)
FAULTS = ("read", "write", "contains", "delete")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(SOAK_S * 2 + 600)]


class Load:
    """Six clients that store, load, pin, clear, demote and drop, checking every byte they get."""

    def __init__(self, store: TieredStore, until_s: float) -> None:
        self.store, self.until_s = store, until_s
        self.done: Counter[str] = Counter()
        self.wrong: list[BaseException] = []
        self.slowest_s = 0.0
        self._lock = threading.Lock()

    def run(self, number: int) -> None:
        pick = random.Random(number)
        try:
            while time.monotonic() < self.until_s and not self.wrong:
                began_s = time.monotonic()
                name, loaded = self.one(pick)
                with self._lock:
                    self.done[name] += 1
                    self.done["blocks loaded"] += loaded
                    self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
        except BaseException as fault:  # noqa: BLE001 (shown by the main thread)
            self.wrong.append(fault)

    def one(self, pick: random.Random) -> tuple[str, int]:
        of = chain(pick.randint(1, 16), pick.randint(0, 9), scope(pick.choice("abc")))
        action = pick.choices(("put", "get", "lookup", "pin", "prefetch", "clear"), (40, 45, 8, 3, 3, 1))[0]
        if action == "put":
            put(self.store, of, start=pick.randint(0, 2), deadline_s=pick.choice([0, 0.05]))
        elif action == "get":
            return action, len(get(self.store, of, 2.0))
        elif action == "lookup":
            self.store.lookup(of, pick.choice([0.0, 0.05]))
        elif action == "pin":
            self.store.pin(of, 0.05)
        elif action == "prefetch":
            self.store.prefetch(of, 1.0)
        else:
            self.store.clear(of.keys[0][:8], 2.0)
        return action, 0


def trouble(tiers: list[FaultyTier], until_s: float) -> int:
    """Break and mend tiers in turn: errors, hangs shorter than the deadline, wrong answers."""
    pick = random.Random(99)

    def late(*_: object) -> object:
        time.sleep(0.3)
        return raising()

    def nonsense(*_: object) -> object:
        return ["?"]

    times = 0
    while time.monotonic() < until_s:
        tier = pick.choice(tiers)
        tier.faults[pick.choice(FAULTS)] = pick.choice([raising, late, nonsense])
        times += 1
        time.sleep(pick.uniform(0.05, 0.5))
        tier.faults.clear()
        time.sleep(pick.uniform(0.5, 3.0))
    return times


@pytest.mark.parametrize("how", ["embedded", "daemon"])
def test_mixed_load_and_faults_for_long(tmp_path: Path, how: str) -> None:
    HOW[0] = how
    try:
        tiers = [FaultyTier(disk(tmp_path / name, name)) for name in ("near", "far")]
        modes = (WriteMode.THROUGH, WriteMode.ON_EVICT)
        lanes = [
            (tier, LaneOptions(cap_bytes=cap, write=mode, write_workers=2, deadline_s=5.0))
            for tier, cap, mode in zip(tiers, CAPS, modes, strict=True)
        ]
        store = make_store(*lanes, slots=32, reserved=6)
    finally:
        HOW[0] = "embedded"
    until_s = time.monotonic() + SOAK_S / 2
    load = Load(store, until_s)
    threads = [threading.Thread(target=load.run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(min(30.0, SOAK_S / 10))
    early = rss_bytes()
    broken = trouble(tiers, until_s)
    for thread in threads:
        thread.join(60)
    assert not load.wrong, load.wrong
    assert not any(thread.is_alive() for thread in threads)
    assert load.slowest_s < 30
    assert broken > 0
    assert all(tier.fired for tier in tiers), "the faults fired"
    assert load.done["blocks loaded"] > 1000
    settle(store)
    inner = store.inner if isinstance(store, Served) else store
    assert_nothing_leaked(inner)
    for tier, cap, name in zip(store.stats().tiers, CAPS, ("near", "far"), strict=True):
        assert tier.used_bytes == file_bytes(tmp_path / name) <= cap, tier
    gc.collect()
    assert rss_bytes() < early * 1.5 + (64 << 20), "memory grew"
    assert store.close(30)


def settle(store: TieredStore) -> None:
    """Wait until breakers are closed and everything is written or given up."""
    assert eventually(lambda: store.flush(5.0) or not store.flush(0.0), 120)
    assert eventually(lambda: all(tier.pending_writes == 0 for tier in store.stats().tiers), 120)
    assert eventually(lambda: not store.stats().leases, 60)


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_noise_at_the_record_parser() -> None:
    """Any change to a record is noticed; parsing never raises."""
    pick = random.Random(5)
    one = samples.chain(3)
    record = bytearray(samples.record(one, 1))
    key = one.keys[1]
    assert not isinstance(verify(memoryview(record), key), str), "the control"
    until_s = time.monotonic() + FUZZ_S
    tried = 0
    while time.monotonic() < until_s:
        tried += 1
        spoilt = bytearray(record)
        for _ in range(pick.randint(1, 4)):
            at = pick.choice([pick.randrange(len(spoilt)), pick.randrange(min(200, len(spoilt)))])
            spoilt[at] = pick.randrange(256)
        spoilt = spoilt[: pick.choice([len(spoilt), pick.randrange(len(spoilt) + 1)])]
        parse(memoryview(spoilt))
        found = verify(memoryview(spoilt), key)
        # A record longer than its payload says may lose nothing but what lies behind its last page.
        whole = spoilt[: len(record)] == record
        assert isinstance(found, str) or whole, (tried, found)
    assert tried > 100
    assert record_bytes(1) > 0


def test_noise_at_the_daemon(tmp_path: Path) -> None:
    """Whatever bytes come, the daemon serves the next client, and holds nothing for the last."""
    HOW[0] = "daemon"
    try:
        served = make_store(slots=16, reserved=4)
    finally:
        HOW[0] = "embedded"
    assert isinstance(served, Served)
    put(served, chain(6))
    pick = random.Random(7)
    until_s = time.monotonic() + FUZZ_S
    tried = 0
    while time.monotonic() < until_s:
        tried += 1
        if tried % 20 == 0:
            time.sleep(0.05)  # the queue of those who want to be let in is bounded
        with raw(served.daemon.path) as sock:
            hello = framed(wire._encode(wire.Hello(wire.VERSION, 1, 100)))
            question = framed(wire._encode(wire.Acquire(wire.named(chain(6)), 0.1, 0, 4)))
            said = bytearray(pick.choice([b"", hello]) + question * pick.randint(0, 2))
            for _ in range(pick.randint(0, 6)):
                if said:
                    said[pick.randrange(len(said))] = pick.randrange(256)
            said += bytes(pick.randrange(256) for _ in range(pick.randint(0, 40)))
            try:
                sock.sendall(said)
            except OSError:
                continue
        if tried % 50 == 0:
            assert get(served, chain(6)) == ["ram"] * 6
    assert eventually(lambda: served.stats().leases == 0)
    assert_nothing_leaked(served.inner)
    assert tried > 20
    assert served.close()
