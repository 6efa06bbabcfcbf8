"""A files tier behind a link of chosen latency and bandwidth, which may change while it is used."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tiercel.blocks import BlockKey
from tiercel.tiers import FilesTier, Outcome
from tiercel.tiers.around import Around


@dataclass(frozen=True, slots=True)
class Link:
    """A one-way link: each read waits its latency, then for its share of the bandwidth, in turn."""

    latency_s: float
    bytes_per_s: float


LINKS = {
    "10 MB/s, 200 ms": Link(0.2, 10e6),
    "50 MB/s, 20 ms": Link(0.02, 50e6),
    "1 GB/s, 1 ms": Link(0.001, 1e9),
}
SLOW, FAST = LINKS["10 MB/s, 200 ms"], LINKS["1 GB/s, 1 ms"]


class Throttled(Around):
    """Reads are slowed down, writes and listings are not."""

    def __init__(self, inner: FilesTier) -> None:
        super().__init__(inner)
        self.link = FAST
        self._turn = threading.Lock()
        self._free_s = 0.0
        self.read_keys: list[BlockKey] = []

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        size = sum(record.nbytes for record in records)
        with self._turn:
            self.read_keys += keys
            begin_s = max(time.monotonic(), self._free_s)
            self._free_s = begin_s + size / self.link.bytes_per_s
            until_s = self._free_s + self.link.latency_s
        outcomes = self.inner.read(keys, records)
        time.sleep(max(0.0, until_s - time.monotonic()))
        return outcomes

    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        return self.inner.write(keys, records)
