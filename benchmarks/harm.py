"""Do no harm: TTFT with a throttled tier, against always computing and always loading, in one run.

    python -m benchmarks.harm [--json FILE] [--dir DIR] [--tokens 256,1024,...] [--rounds N]

One engine, one store whose RAM is emptied before every request, so that all comes from one tier whose reads
are slowed down to a link's latency and bandwidth. The arms take turns on the same prompts; before each link
the tier's earlier speed is forgotten by three requests, whose times are shown too: they are what learning
costs. `turning slow` and `turning fast` change the link in the middle, without telling.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.core import forget_ram
from benchmarks.timing import publish
from benchmarks.ttft import first_token, prompts
from tiercel.blocks import BlockKey, record_bytes
from tiercel.engines.transformers import TransformersEngine
from tiercel.memory import Arena
from tiercel.models import demo_model_dir
from tiercel.store import LaneOptions, TieredStore
from tiercel.tiers import FilesTier, Outcome, Stored, Usage

ROUNDS, PROMPTS, LEARNING = 5, 3, 3
TOKENS = (256, 1024, 4096, 8000)


@dataclass
class Link:
    """A one-way link: each read waits its latency, then for its share of the bandwidth, in turn."""

    latency_s: float
    bytes_per_s: float


LINKS = {
    "10 MB/s, 200 ms": Link(0.2, 10e6),
    "50 MB/s, 20 ms": Link(0.02, 50e6),
    "1 GB/s, 1 ms": Link(0.001, 1e9),
    "disk as it is": Link(0.0, 1e12),
}


class Throttled:
    """A files tier behind a link."""

    def __init__(self, inner: FilesTier) -> None:
        self.inner, self.name, self.link = inner, inner.name, LINKS["disk as it is"]
        self._turn = threading.Lock()
        self._free_s = 0.0

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        size = sum(record.nbytes for record in records)
        with self._turn:
            begin_s = max(time.monotonic(), self._free_s)
            self._free_s = begin_s + size / self.link.bytes_per_s
            until_s = self._free_s + self.link.latency_s
        outcomes = self.inner.read(keys, records)
        time.sleep(max(0.0, until_s - time.monotonic()))
        return outcomes

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self.inner.contains(keys)

    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        return self.inner.write(keys, records)

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self.inner.delete(keys)

    def scan(self) -> Iterator[Stored]:
        return self.inner.scan()

    def usage(self) -> Usage:
        return self.inner.usage()

    def close(self) -> None:
        self.inner.close()


class Arms:
    """The three ways to answer a prompt, by one engine over one store."""

    def __init__(self, folder: Path) -> None:
        self.engine = TransformersEngine(demo_model_dir(os.environ), block_tokens=256)
        self.tier = Throttled(FilesTier(folder))
        arena = Arena(record_bytes(self.engine.layout.payload_bytes), 160, reserved=8)
        self.store = TieredStore(arena, [(self.tier, LaneOptions(cap_bytes=8 << 30, deadline_s=60.0))])
        self.engine.attach(self.store)

    def ttft(self, arm: str, tokens: list[int]) -> float:
        forget_ram(self.store)
        self.engine._load_always = arm == "always load"
        result = first_token(self.engine, tokens, use_cache=arm != "always compute")
        return result.timing.ttft_s


def measure(folder: Path, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    arms = Arms(folder)
    texts = {size: prompts(arms.engine, size)[:PROMPTS] for size in sizes}
    for size in sizes:
        for text in texts[size]:
            first_token(arms.engine, text)
    assert arms.store.flush(120)
    rows = []
    for name, link in LINKS.items():
        arms.tier.link = link
        learning = [arms.ttft("tiercel", texts[max(sizes)][0]) for _ in range(LEARNING)]
        rows += [row(arms, name, size, texts[size], rounds) | {"learning_s": learning} for size in sizes]
    rows += [turning(arms, texts[max(sizes)], *which) for which in (("fast", "slow"), ("slow", "fast"))]
    assert arms.store.close(60)
    return {"prompts": PROMPTS, "rounds": rounds, "rows": rows}


def row(arms: Arms, link: str, size: int, texts: list[list[int]], rounds: int) -> dict[str, Any]:
    names = ["always compute", "tiercel"]
    if arms.tier.link.bytes_per_s > 20e6 or size <= 1024:
        names.append("always load")  # else minutes for what is plain to see
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for text in texts[: 1 + (rounds > 2)]:
            for name in names[number % len(names) :] + names[: number % len(names)]:
                times[name].append(arms.ttft(name, text))
    medians = {name: statistics.median(seen) for name, seen in times.items()}
    best = min(medians[name] for name in names if name != "tiercel")
    return {
        "link": link,
        "tokens": size,
        "median_s": medians,
        "of_the_better": medians["tiercel"] / best,
        "of_compute": medians["tiercel"] / medians["always compute"],
        "worst_of_compute": max(times["tiercel"]) / medians["always compute"],
    }


def turning(arms: Arms, texts: list[list[int]], before: str, after: str) -> dict[str, Any]:
    links = {"fast": LINKS["1 GB/s, 1 ms"], "slow": LINKS["10 MB/s, 200 ms"]}
    compute = statistics.median(arms.ttft("always compute", texts[0]) for _ in range(3))
    arms.tier.link = links[before]
    for _ in range(6):
        arms.ttft("tiercel", texts[0])
    arms.tier.link = links[after]
    seen = []
    for number in range(10):
        if after == "fast" and number == 2:
            time.sleep(6.0)  # a tier that was priced out is tried again every few seconds
        seen.append(arms.ttft("tiercel", texts[number % len(texts)]) / compute)
    return {"link": f"turning {after}", "tokens": len(texts[0]), "of_compute_one_by_one": seen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="harm-") as folder:
        result = measure(Path(folder), [int(one) for one in options.tokens.split(",")], options.rounds)
    publish(result, options.json)


if __name__ == "__main__":
    main()
