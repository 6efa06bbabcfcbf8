"""Store benchmarks without a model: arena copies, the files tier against bare direct I/O, lookups.

python -m benchmarks.core [--json FILE] [--dir DIR]
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from benchmarks.timing import interleaved, publish, ratio, shown
from tiercel.blocks import BlockKey, Chain, Identity, Scope, payload_of, record_bytes, seal
from tiercel.memory import Arena
from tiercel.store import LaneOptions, TieredStore, WriteMode
from tiercel.tiers import OK, FilesTier, Outcome, Stored, Usage

BLOCK_TOKENS = 256
# SmolLM2-135M in bf16: 30 layers x 2 x 3 heads x 64 x 2 bytes.
PAYLOAD_BYTES = 23040 * BLOCK_TOKENS
BLOCKS = 24
HALF = BLOCKS // 2
INDEX_BLOCKS = 1_000_000
PROMPT_TOKENS = 32_768
MIB = 1 << 20


def scope() -> Scope:
    return Scope(Identity("bench", "1", "bfloat16", b"bench", "bench/1", BLOCK_TOKENS))


def chain_of(blocks: int, first: int = 0) -> Chain:
    return scope().chain(range(first, first + blocks * BLOCK_TOKENS))


def arena_copies(repeats: int) -> dict[str, Any]:
    """Store and load a prompt's blocks through leases, against a plain copy of the same blocks."""
    total = BLOCKS * PAYLOAD_BYTES
    store = TieredStore(Arena(record_bytes(PAYLOAD_BYTES), BLOCKS + 8, reserved=4))
    blocks = [np.random.default_rng(i).integers(0, 255, PAYLOAD_BYTES, dtype=np.uint8) for i in range(BLOCKS)]
    out = [np.zeros(PAYLOAD_BYTES, np.uint8) for _ in range(BLOCKS)]
    chain = chain_of(BLOCKS)

    def plain() -> None:
        for source, target in zip(blocks, out, strict=True):
            np.copyto(target, source)

    def put() -> None:
        store.clear()
        with store.begin_store(chain, 0, BLOCKS, PAYLOAD_BYTES) as lease:
            for block in lease:
                np.copyto(np.frombuffer(block.payload, np.uint8), blocks[block.index])
            assert lease.commit() == BLOCKS

    def checksum() -> None:
        for block in blocks:
            xxhash.xxh3_128_digest(block)

    def get() -> None:
        with store.acquire(chain) as lease:
            for block in lease:
                np.copyto(out[block.index], np.frombuffer(block.payload, np.uint8))
        assert block.index == BLOCKS - 1

    times = interleaved(repeats, plain=plain, put=put, get=get, checksum=checksum)
    store.close()
    return {
        "bytes": total,
        "plain_copy": rates(times["plain"], total),
        "store_into_arena": rates(times["put"], total) | {"of_plain": ratio(times["plain"], times["put"])},
        "load_from_arena": rates(times["get"], total) | {"of_plain": ratio(times["plain"], times["get"])},
        "checksum": rates(times["checksum"], total),
        "store_copy_alone": {
            "of_plain": statistics.median(
                p / (s - c) for p, s, c in zip(times["plain"], times["put"], times["checksum"], strict=True)
            )
        },
        "note": "store_into_arena includes the checksum of every byte",
    }


def files_tier(directory: Path, repeats: int) -> dict[str, Any]:
    """The files tier alone and below a store, against bare direct I/O of the same sizes in the same place."""
    size = record_bytes(PAYLOAD_BYTES)
    total = BLOCKS * size
    chain = chain_of(BLOCKS)
    # All arms move the same memory: huge pages alone make direct reads about twice as fast.
    slab = Arena(size, BLOCKS)
    records = [slab.view(slot) for slot in range(BLOCKS)]
    for index, record in enumerate(records):
        payload_of(record, PAYLOAD_BYTES)[:] = os.urandom(PAYLOAD_BYTES)
        seal(record, chain, index, PAYLOAD_BYTES, time.time_ns())
    tier = FilesTier(directory / "tier")
    bare = directory / "bare"
    bare.mkdir()
    store = TieredStore(
        Arena(size, BLOCKS + 8, reserved=4),
        [(FilesTier(directory / "store"), LaneOptions(cap_bytes=1 << 40))],
    )

    def tier_write() -> None:
        assert all(outcome is OK for outcome in tier.write(chain.keys, records))

    def tier_read() -> None:
        assert all(outcome is OK for outcome in tier.read(chain.keys, records))

    def load() -> None:
        forget_ram(store)
        with store.acquire(chain) as lease:
            assert [block.source for block in lease] == ["disk"] * BLOCKS

    def bare_read_on_two_threads() -> None:
        list(pool.map(lambda half: bare_read(bare, *half), [(records[:HALF], 0), (records[HALF:], HALF)]))

    with store.begin_store(chain, 0, BLOCKS, PAYLOAD_BYTES) as lease:
        for block in lease:
            block.payload[:] = payload_of(records[block.index], PAYLOAD_BYTES)
        lease.commit()
    assert store.flush()
    writes = interleaved(repeats, bare=lambda: bare_write(bare, records), tier=tier_write)
    with ThreadPoolExecutor(2) as pool:
        reads = interleaved(
            repeats,
            bare=lambda: bare_read(bare, records),
            tier=tier_read,
            bare2=bare_read_on_two_threads,
            store=load,
        )
    cpu = cpu_seconds(tier_read) / (total / (1 << 30))
    direct = tier.direct
    store.close()
    return {
        "bytes": total,
        "direct_io": direct,
        "bare_write": rates(writes["bare"], total),
        "tier_write": rates(writes["tier"], total) | {"of_bare": ratio(writes["bare"], writes["tier"])},
        "bare_read": rates(reads["bare"], total),
        "tier_read": rates(reads["tier"], total) | {"of_bare": ratio(reads["bare"], reads["tier"])},
        "bare_read_two_threads": rates(reads["bare2"], total),
        "load_through_store": rates(reads["store"], total)
        | {"of_bare": ratio(reads["bare2"], reads["store"])},
        "tier_read_cpu_s_per_gib": cpu,
        "note": "load_through_store: two threads, every byte verified; its ratio is to two bare ones",
    }


def forget_ram(store: TieredStore) -> None:
    """Drop RAM's copies and keep the tiers': what an eviction does, all at once."""
    with store.lock:
        for entry in store.ram.entries():
            store.ram.remove(entry)


def bare_write(folder: Path, records: Sequence[memoryview]) -> None:
    """What a careful script would do: direct I/O, one call a block, a new file each time."""
    for index, record in enumerate(records):
        path = folder / str(index)
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | direct_flag(), 0o600)
        assert os.pwritev(fd, [record], 0) == len(record)
        os.close(fd)


def bare_read(folder: Path, records: Sequence[memoryview], first: int = 0) -> None:
    for index, record in enumerate(records, first):
        fd = os.open(folder / str(index), os.O_RDONLY | direct_flag())
        assert os.preadv(fd, [record], 0) == len(record)
        os.close(fd)


def direct_flag() -> int:
    return getattr(os, "O_DIRECT", 0)


class BigTier:
    """A tier that only lists `blocks` records: what an index of that size costs does not depend on bytes."""

    name = "big"

    def __init__(self, keys: Sequence[BlockKey]) -> None:
        self._keys = keys

    def scan(self) -> Iterator[Stored]:
        size = record_bytes(PAYLOAD_BYTES)
        # Fresh key objects, as a directory listing would give: the index pays for its own.
        return (Stored(BlockKey(bytes(bytearray(key))), size, 0.0) for key in self._keys)

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [False] * len(keys)

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        raise AssertionError("not part of this benchmark")

    write = read

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return [OK] * len(keys)

    def usage(self) -> Usage:
        return Usage()

    def close(self) -> None:
        return None


def lookups(repeats: int) -> dict[str, Any]:
    """Name and find a 32k-token prompt in an index of a million blocks."""
    prompt = list(range(PROMPT_TOKENS))
    wanted = scope().chain(prompt)
    filler = [BlockKey(wanted.root[:8] + number.to_bytes(24, "little")) for number in range(INDEX_BLOCKS)]
    keys = [*filler[: INDEX_BLOCKS // 2], *wanted.keys, *filler[INDEX_BLOCKS // 2 : -len(wanted)]]
    gc.collect()
    before = resident_bytes()
    store = TieredStore(
        Arena(record_bytes(4096), 8, reserved=1), [(BigTier(keys), LaneOptions(write=WriteMode.OFF))]
    )
    assert store.scanned(600)
    gc.collect()
    after = resident_bytes()
    named = scope().chain(prompt)

    def find() -> None:
        assert store.lookup(named, 0).blocks == len(named)

    def name_and_find() -> None:
        assert store.lookup(scope().chain(prompt), 0).blocks == len(named)

    unknown = scope().chain(range(7, PROMPT_TOKENS + 7))

    def miss() -> None:
        assert store.lookup(unknown, 0).blocks == 0

    times = interleaved(repeats * 20, find=find, name_and_find=name_and_find, miss=miss)
    store.close()
    return {
        "index_blocks": INDEX_BLOCKS,
        "prompt_tokens": PROMPT_TOKENS,
        "lookup": shown(times["find"]),
        "name_and_lookup": shown(times["name_and_find"]),
        "miss": shown(times["miss"]),
        "index_bytes_per_block": (after - before) / INDEX_BLOCKS,
    }


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(call: Callable[[], object]) -> float:
    before = time.process_time()
    call()
    return time.process_time() - before


def rates(times: list[float], total_bytes: int) -> dict[str, float]:
    return shown(times) | {"gb_per_s": total_bytes / shown(times)["median_s"] / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dir", type=Path, default=None, help="a directory on the disk to measure")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tiercel-bench-", dir=options.dir))
    try:
        results = {
            "arena": arena_copies(options.repeats),
            "files": files_tier(folder, options.repeats),
            "lookup": lookups(options.repeats),
        }
    finally:
        shutil.rmtree(folder)
    publish(results, options.json)


if __name__ == "__main__":
    main()
