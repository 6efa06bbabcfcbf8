"""RAM with a tier in memory below it, against as much RAM alone: blocks held, hits, what a hit costs.

python -m benchmarks.tier_memory [--json FILE] [--ram SIZE] [--quick]

Blocks are KV of SmolLM2-135M (bf16, 256 tokens each) over this repository's pages, some of them again under
other names. Every store has the same memory in all. Prompts of four blocks are asked for at random, each as
often as the others; what is not found is stored as it would be after computing it. Hits are counted once the
store is full. A hit's time is that of leasing a prompt and copying it out, from RAM and from the tier in
turn; computing is one thread's prefill, which is what the codecs have too.
"""

from __future__ import annotations

import argparse
import mmap
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.codecs import BLOCK_TOKENS, Bench
from benchmarks.timing import publish, seconds
from tiercel.blocks import PAGE_BYTES, Chain, Scope, record_bytes
from tiercel.codecs import marked
from tiercel.config import Config
from tiercel.config.units import parse_bytes
from tiercel.engines.transformers import TransformersEngine
from tiercel.engines.transformers.kv_cache import KVCache
from tiercel.memory import Pages
from tiercel.models import demo_model_dir
from tiercel.store import RAM, TieredStore, open_store

PROMPT_BLOCKS = 4
SETS = (1.3, 1.8, 2.5)
CODECS = ("none", "lossless", "int8", "int4")
# Slots of the arena beside a tier: the reserved ones, and four prompts.
ARENA_SLOTS = 4 + 4 * PROMPT_BLOCKS
ROUNDS_COUNTED = 2
FAR_OFF_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ram", default="1GiB", help="memory of each store in all [default: 1GiB]")
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench = Memory(parse_bytes(arguments.ram), quick=arguments.quick)
    results = bench.run()
    print(table(results))
    publish(results, arguments.json)


@dataclass(frozen=True)
class Setup:
    """One way to spend the memory: RAM of so many bytes, and the rest a tier with a codec, or no tier."""

    ram_bytes: int
    tier_bytes: int
    codec: str

    def config(self) -> Config:
        given: dict[str, object] = {"ram.size": f"{self.ram_bytes}B", "store.load": "always"}
        if self.tier_bytes:
            given |= {
                "tiers.0.kind": "memory",
                "tiers.0.size": f"{self.tier_bytes}B",
                "tiers.0.codec": self.codec,
                "store.accept_lossy": "yes",
            }
        return Config.load(environ={}, overrides=given)


class Memory:
    """The model's blocks, and stores for them."""

    def __init__(self, total_bytes: int, *, quick: bool) -> None:
        self.bench = Bench(TransformersEngine(demo_model_dir(), device="cpu", block_tokens=BLOCK_TOKENS))
        self.engine = self.bench.engine
        self.blocks = [np.frombuffer(one, np.uint8) for one in self.bench.blocks(6 if quick else 12)]
        self.payload_bytes = len(self.blocks[0])
        self.out = np.empty((PROMPT_BLOCKS, self.payload_bytes), np.uint8)
        self.total_bytes = total_bytes
        self.quick = quick

    def run(self) -> dict[str, Any]:
        slot_bytes = record_bytes(self.payload_bytes)
        arena_bytes = ARENA_SLOTS * slot_bytes
        rest_bytes = self.total_bytes - arena_bytes
        setups = {"RAM alone": Setup(self.total_bytes, 0, "none")} | {
            f"RAM and memory, `{codec}`": Setup(arena_bytes, rest_bytes, codec) for codec in CODECS
        }
        rows: dict[str, Any] = {name: self.replayed(setup) for name, setup in setups.items()}
        compute_s = self.compute_s()
        for name, setup in setups.items():
            if setup.tier_bytes:
                rows[name] |= self.hits(setup)
        return {
            "total_bytes": self.total_bytes,
            "arena_bytes": arena_bytes,
            "block_bytes": self.payload_bytes,
            "block_tokens": BLOCK_TOKENS,
            "compute_s": compute_s,
            "sets": list(SETS),
            "pages": self.copies(),
            "rows": rows,
        }

    @contextmanager
    def store(self, setup: Setup) -> Iterator[tuple[TieredStore, Scope]]:
        with open_store(setup.config(), self.payload_bytes) as store:
            exact = self.engine.identity
            identity = marked(exact, store.lossy, self.bench.shape, self.payload_bytes)
            yield store, Scope(replace(identity, model="benchmark"))

    def replayed(self, setup: Setup) -> dict[str, Any]:
        """Blocks held, and the share of blocks found for each size of the working set."""
        hit: list[float] = []
        held = 0
        for times in SETS:
            count = round(times * self.total_bytes / self.payload_bytes / PROMPT_BLOCKS)
            with self.store(setup) as (store, scope):
                chains = [prompt(scope, number) for number in range(count)]
                chance = random.Random(1)
                rounds = ROUNDS_COUNTED if not self.quick else 1
                self._ask(store, [*chains, *chance.choices(chains, k=count)])
                hit.append(self._ask(store, chance.choices(chains, k=rounds * count)))
                held = max(held, sum(store.lookup(one, 0.0).blocks for one in chains))
        return {"held_blocks": held, "hit_ratio": hit}

    def _ask(self, store: TieredStore, chains: Sequence[Chain]) -> float:
        found = 0
        for chain in chains:
            blocks = self._read(store, chain)[0]
            found += blocks
            with store.begin_store(chain, blocks, PROMPT_BLOCKS, self.payload_bytes, FAR_OFF_S) as lease:
                for new in lease:
                    np.copyto(np.frombuffer(new.payload, np.uint8), self._payload(chain, new.index))
                lease.commit()
        return found / (len(chains) * PROMPT_BLOCKS)

    def _read(self, store: TieredStore, chain: Chain) -> tuple[int, set[str]]:
        """Copy out what is found of a prompt: how many blocks, and where they lay."""
        sources: list[str] = []
        with store.acquire(chain, FAR_OFF_S) as lease:
            for block in lease:
                np.copyto(self.out[block.index], np.frombuffer(block.payload, np.uint8))
                sources.append(block.source)
        return len(sources), set(sources)

    def _payload(self, chain: Chain, index: int) -> NDArray[np.uint8]:
        return self.blocks[(chain.keys[0][-1] + index) % len(self.blocks)]

    def hits(self, setup: Setup) -> dict[str, float]:
        """Seconds a block takes from RAM and from the tier, alternately, and what there is of a record."""
        with self.store(setup) as (store, scope):
            chain = prompt(scope, 0)
            self._ask(store, [chain])
            assert store.demote(chain, FAR_OFF_S) == PROMPT_BLOCKS
            (tier,) = store.stats().tiers
            ratio = PROMPT_BLOCKS * record_bytes(self.payload_bytes) / tier.used_bytes

            def read(place: str) -> float:
                sources: set[str] = set()
                took_s = seconds(lambda: sources.update(self._read(store, chain)[1]))
                assert sources == {place}
                return took_s

            took_s: list[tuple[float, float]] = []
            for _ in range(5 if self.quick else 15):
                took_s.append((read("memory"), read(RAM)))
                # Out of RAM again, for the next turn; the tier still has it.
                assert store.demote(chain, FAR_OFF_S) == PROMPT_BLOCKS
        return {
            "ratio": ratio,
            "tier_s": statistics.median(tier_s for tier_s, _ in took_s) / PROMPT_BLOCKS,
            "ram_s": statistics.median(ram_s for _, ram_s in took_s) / PROMPT_BLOCKS,
        }

    def copies(self) -> dict[str, float]:
        """Bytes per second of copying a block out of pages, in a row and each elsewhere; best of some."""
        count = record_bytes(self.payload_bytes) // PAGE_BYTES
        pages = Pages(32 * count * PAGE_BYTES, "pages")
        record = memoryview(mmap.mmap(-1, count * PAGE_BYTES))
        numbers = pages.take(pages.total)
        assert numbers is not None
        for start in range(0, pages.total, count):
            pages.write(numbers[start : start + count], record)
        chance = np.random.default_rng(1)
        found = {}
        for name, chosen in (("row", numbers), ("scattered", chance.permutation(numbers))):
            each = [chosen[at : at + count] for at in range(0, pages.total, count)]
            times = [seconds(partial(pages.read, some, record)) for some in each]
            found[f"{name}_bytes_per_s"] = len(record) / min(times)
        pages.close()
        return found

    def compute_s(self) -> float:
        """Seconds of prefill for a block, over prompts of eight."""
        tokens = self.bench.text[: 2 * PROMPT_BLOCKS * BLOCK_TOKENS]

        def prefill() -> None:
            with torch.inference_mode():
                self.engine.run_blocks(tokens, KVCache(self.engine.layout, self.engine.model.device))

        return statistics.median(seconds(prefill) for _ in range(1 if self.quick else 3)) / 2 / PROMPT_BLOCKS


def prompt(scope: Scope, number: int) -> Chain:
    """Names for a prompt's blocks."""
    size = PROMPT_BLOCKS * BLOCK_TOKENS
    return scope.chain(range(number * size, (number + 1) * size))


def table(results: dict[str, Any]) -> str:
    """The figures as rows of Markdown."""
    block_bytes, compute_s = results["block_bytes"], results["compute_s"]
    alone = results["rows"]["RAM alone"]["held_blocks"]
    least, *sets = results["sets"]
    gib = results["total_bytes"] / (1 << 30)
    others = "".join(f" | of {one * gib:g} GiB" for one in sets)
    head = f"found, of a working set of {least * gib:g} GiB{others}"
    lines = [
        f"| {gib:g} GiB as | blocks held | {head} | a hit takes | computing takes |",
        "|---|---|" + "---|" * (len(results["sets"]) + 2),
    ]
    ram_s = statistics.median(row["ram_s"] for row in results["rows"].values() if "ram_s" in row)
    for name, row in results["rows"].items():
        hit_s = row.get("tier_s", ram_s)
        found = " | ".join(f"{100 * share:.0f} %" for share in row["hit_ratio"])
        held = f"{row['held_blocks']} ({row['held_blocks'] / alone:.2f}×)"
        times = f"{hit_s * 1e3:.1f} ms | {compute_s / hit_s:,.0f} times as long"
        lines.append(f"| {name} | {held} | {found} | {times} |")
    lines.append(f"\nBlocks of {block_bytes:,} bytes; computing one takes {compute_s * 1e3:.0f} ms.")
    row_bytes_per_s, scattered_bytes_per_s = results["pages"].values()
    lines.append(
        f"Pages are copied at {row_bytes_per_s / 1e9:.1f} GB/s in a row, at "
        f"{scattered_bytes_per_s / 1e9:.1f} GB/s each elsewhere."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
