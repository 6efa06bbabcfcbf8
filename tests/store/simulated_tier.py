"""A place in a simulated world that does all a place can do wrong, in times of trouble drawn by seed."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.store.simulation import Simulation

from tiercel.blocks import BlockKey
from tiercel.tiers import MISSING, OK, Fate, Outcome, Stored, Usage

FAILING = ("down", "dies", "hangs", "denied", "nonsense")
ROTTING = ("flipped", "another")
KINDS = (*FAILING, *ROTTING, "late", "short", "torn", "phantom", "full", "removed")
_CALL_S = 0.004


@dataclass(frozen=True, slots=True)
class Trouble:
    """One kind of fault between two times, hitting this share of the calls."""

    kind: str
    start_s: float
    end_s: float
    share: float


@dataclass(slots=True)
class SimulatedTier:
    """Records in a dict. `fired` counts each fault when its answer has been given."""

    world: Simulation
    name: str
    deadline_s: float
    troubles: list[Trouble] = field(default_factory=list)
    records: dict[BlockKey, bytes] = field(default_factory=dict)
    fired: Counter[str] = field(default_factory=Counter)
    running: int = 0
    closed: bool = False
    peak_bytes: int = 0
    lies: int = 0

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        kind = self._begin()
        there = [key in self.records for key in keys]
        if kind == "phantom":
            self.lies += there.count(False)
            there = [True] * len(keys)
        return self._end(kind, there)

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        kind = self._begin()
        return self._end(kind, [self._read(kind, key, one) for key, one in zip(keys, records, strict=True)])

    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        kind = self._begin()
        return self._end(kind, [self._write(kind, key, one) for key, one in zip(keys, records, strict=True)])

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        kind = self._begin()
        return self._end(kind, [OK if self.records.pop(key, None) else MISSING for key in keys])

    def scan(self) -> Iterator[Stored]:
        kind = self._begin()
        for key, held in list(self.records.items()):
            if self.world.pick.random() < 0.1:
                self.world.sleep(self._latency_s())
            yield Stored(key, len(held), self.world.now_s)
        yield from self._end(kind, [])

    def usage(self) -> Usage:
        self.world.sleep(self._latency_s())
        return Usage()

    def close(self) -> None:
        self.world.sleep(self._latency_s())

    def _latency_s(self) -> float:
        return self.world.pick.expovariate(1 / _CALL_S)

    def _kind(self) -> str:
        now_s, chance = self.world.now_s, self.world.pick.random()
        active = [one for one in self.troubles if one.start_s <= now_s < one.end_s and chance < one.share]
        return self.world.pick.choice(active).kind if active else ""

    def _begin(self) -> str:
        """Take some time; what is wrong with this call, if anything. Raises where nothing is begun."""
        self.running += 1
        kind = self._kind()
        self.world.sleep(self._latency_s())
        if kind == "removed":
            self.records.clear()
            self.fired[kind] += 1
        elif kind == "hangs":
            self.world.sleep(self.world.pick.uniform(0.5, 6.0) * self.deadline_s)
        elif kind == "late":
            self.world.sleep(self.world.pick.uniform(1.0, 3.0) * self.deadline_s)
        if kind in ("down", "denied"):
            self._failed(kind)
        return kind

    def _end(self, kind: str, answer: list) -> list:
        self.world.sleep(self._latency_s())
        if kind in ("dies", "hangs"):
            self._failed(kind)
        self.running -= 1
        if kind == "nonsense":
            self.fired[kind] += 1
            return [None, *answer, "?"]
        if kind == "late":
            self.fired[kind] += 1
        return answer

    def _failed(self, kind: str) -> None:
        self.running -= 1
        self.fired[kind] += 1
        if kind == "denied":
            raise PermissionError(errno.EACCES, "denied")
        raise OSError(errno.EIO, kind) if self.world.pick.random() < 0.5 else RuntimeError(kind)

    def _read(self, kind: str, key: BlockKey, record: memoryview) -> Outcome:
        held = self.records.get(key)
        if kind == "another" and self.records:
            other = self.world.pick.choice(sorted(self.records))
            if held is not None and other != key:
                held = self.records[other]
                self.fired[kind] += 1
        if held is None:
            if kind == "phantom":
                self.fired[kind] += 1
            return MISSING
        if len(held) > len(record):
            return Outcome(Fate.CORRUPT, "too long")
        half = len(held) // 2
        record[:half] = held[:half]
        self.world.sleep(self._latency_s())
        if kind == "dies":
            return Outcome(Fate.FAILED, "died")
        if kind == "short":
            self.fired[kind] += 1
            return OK
        record[half : len(held)] = held[half:]
        if kind == "flipped":
            at = self.world.pick.randrange(len(held))
            record[at] ^= 1 << self.world.pick.randrange(8)
            self.fired[kind] += 1
        return OK

    def _write(self, kind: str, key: BlockKey, record: memoryview) -> Outcome:
        if kind == "full":
            self.fired[kind] += 1
            return Outcome(Fate.FULL, "full")
        half = len(record) // 2
        first = bytes(record[:half])
        self.world.sleep(self._latency_s())
        if kind in ("dies", "torn"):
            # A careless place: half of it is there under its final name.
            self.records[key] = first
            self.fired["torn"] += 1
            return OK if kind == "torn" else Outcome(Fate.FAILED, "died")
        self.records[key] = first + bytes(record[half:])
        self.peak_bytes = max(self.peak_bytes, sum(map(len, self.records.values())))
        return OK
