"""A request trace through the real store with tiny blocks: hit ratios against LRU, FIFO and the optimum.

python -m benchmarks.replay --trace FILE [--json FILE] [--dir DIR] [--plot FILE] [--page]

Each request looks its prompt up, reads what is there (the bytes are checked) and stores the rest, as an
engine does. `store` has RAM only; `tiers` a quarter of the room in RAM over a files tier with a cap. The
others are counted by the simulator, for the same number of blocks. `told` is RAM alone where the store is
told of a share of the conversations, after their last answer, that they are over: it drops what is their own.
In `demoted` RAM for the smallest share lies over a files tier for the largest, and it demotes them instead.
Without a trace it says so and ends.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.replay_page import write_replay, write_replay_plot
from tiercel.blocks import BlockKey, Chain, Identity, Scope, record_bytes
from tiercel.memory import Arena
from tiercel.plan.simulate import Trace, join_runs, policy_hits, read_trace
from tiercel.store import LaneOptions, TieredStore
from tiercel.tiers import FilesTier

SHARES = (0.05, 0.1, 0.2, 0.5)
POLICIES = ("tiercel", "lru", "fifo", "s3-fifo", "opt")
PAYLOAD_BYTES = 256
RECORD_BYTES = record_bytes(PAYLOAD_BYTES)
# Slots beyond the room measured, in which blocks are loaded that RAM has no room to keep.
STAGING = 128
RAM_SHARE = 0.25
AT_ONCE = 64
# The trace cut into tenants by the second block of a prompt (all begin with the same), RAM only, least room.
TENANTS: dict[str, Callable[[int], int]] = {
    "two, of which one has a tenth of the conversations": lambda number: int(number % 10 == 0),
    "eight": lambda number: number % 8,
    "hundred": lambda number: number % 100,
}
# Of how many conversations the store is told that they are over.
TOLD = (0.5, 0.75, 0.9, 1.0)
PATIENCE_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="JSON lines, see docs/simulate.md")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--page", action="store_true", help="write the table into docs/benchmarks.md")
    options = parser.parse_args()
    if options.trace is None or not options.trace.is_file():
        print(f"skipped: no trace ({options.trace or 'give one by --trace'}); no figure is changed")
        return
    results = replay_all(read_trace(options.trace), options.dir)
    print(json.dumps(results, indent=2))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    if options.plot:
        write_replay_plot(results, options.plot)
    if options.page:
        write_replay(results)


def replay_all(trace: Trace, folder: Path, shares: Sequence[float] = SHARES) -> dict[str, Any]:
    """Hits of the store and of policies with room for each share of the trace's different blocks."""
    runs = join_runs(trace)
    capacities = [max(1, int(trace.block_count * share)) for share in shares]
    hits = {name: [one.blocks for one in policy_hits(name, trace, runs, capacities)] for name in POLICIES}
    hits["store"] = [in_ram(trace, capacity) for capacity in capacities]
    hits["tiers"] = [sum(in_tiers(trace, capacity, folder)) for capacity in capacities]
    told = {f"{share:.0%}": told_prompts(trace, share) for share in TOLD}
    return {
        "when": datetime.now(UTC).strftime("%Y-%m-%d"),
        "requests": trace.request_count,
        "references": len(trace.blocks),
        "blocks": trace.block_count,
        "shares": list(shares),
        "capacities": capacities,
        "hits": hits,
        "told": {
            share: [in_ram(trace, capacity, over=over) for capacity in capacities]
            for share, over in told.items()
        },
        "demoted": {
            share: in_tiers(trace, capacities[-1], folder, capacities[0], over)
            for share, over in {"none": set[int](), **told}.items()
        },
        "tenants": {name: in_ram(trace, capacities[0], tenant) for name, tenant in TENANTS.items()},
    }


def last_prompts(trace: Trace) -> list[int]:
    """Each conversation's last request. One goes on with another if it begins with half of its blocks."""
    latest: dict[int, int] = {}
    conversations: list[int] = []
    last: dict[int, int] = {}
    lengths = [stop - start for start, stop in pairwise(trace.offsets.tolist())]
    for number, start in enumerate(trace.offsets.tolist()[:-1]):
        blocks = trace.blocks[start : start + lengths[number]].tolist()
        known = next((count for count in range(len(blocks), 0, -1) if blocks[count - 1] in latest), 0)
        before = latest[blocks[known - 1]] if known else number
        # What all prompts begin with says nothing.
        goes_on = known > 1 and 2 * known >= lengths[before]
        conversations.append(conversations[before] if goes_on else number)
        last[conversations[number]] = number
        latest.update(dict.fromkeys(blocks, number))
    return list(last.values())


def told_prompts(trace: Trace, share: float) -> set[int]:
    """The last requests of a share of the conversations, picked by chance."""
    pick = random.Random(1)
    return {number for number in last_prompts(trace) if pick.random() < share}


def in_ram(
    trace: Trace,
    capacity: int,
    tenant: Callable[[int], int] = lambda number: 0,
    over: Collection[int] = (),
) -> int:
    """Hits of a store that has only RAM, for `capacity` blocks."""
    with TieredStore(Arena(RECORD_BYTES, capacity + STAGING, reserved=STAGING)) as store:
        return replay(store, trace, tenant, over)


def in_tiers(
    trace: Trace, capacity: int, folder: Path, ram: int | None = None, over: Collection[int] = ()
) -> tuple[int, int]:
    """Hits in RAM (`ram` blocks, or a quarter of the tier) and in a files tier for `capacity` blocks."""
    longest = max(stop - start for start, stop in pairwise(trace.offsets.tolist()))
    slots = STAGING + max(int(capacity * RAM_SHARE) if ram is None else ram, longest)
    options = LaneOptions(cap_bytes=capacity * RECORD_BYTES)
    with tempfile.TemporaryDirectory(dir=folder, prefix="tiercel-replay-") as root:
        tier = FilesTier(Path(root), name="disk")
        with TieredStore(Arena(RECORD_BYTES, slots, reserved=STAGING), [(tier, options)]) as store:
            assert store.scanned(PATIENCE_S)
            hits = replay(store, trace, over=over)
            loaded = store.stats().counters.loaded.get(tier.name, 0)
            return hits - loaded, loaded


def replay(
    store: TieredStore,
    trace: Trace,
    tenant: Callable[[int], int] = lambda number: 0,
    over: Collection[int] = (),
) -> int:
    """Put every request of a trace through a store. Returns how many blocks it had.

    Requests in `over` are a conversation's last, and the store is told so when they are answered.
    """
    put_away = store.demote if store.stats().tiers else store.drop
    hits = 0
    for number, chain in enumerate(chains(trace, tenant)):
        store.lookup(chain, 0)
        found = read(store, chain)
        write(store, chain, found)
        settle(store)
        if number in over:
            put_away(chain, PATIENCE_S)
        hits += found
    return hits


def chains(trace: Trace, tenant: Callable[[int], int]) -> Iterator[Chain]:
    """The prompt of each request, in order, in the scope of its tenant: `tenant(its second block)`."""
    identity = Identity("replay", "1", "none", b"replay", "replay/1", trace.block_tokens)
    numbers = [number.to_bytes(8, "little") for number in range(trace.block_count)]
    for start, end in pairwise(trace.offsets.tolist()):
        blocks = trace.blocks[start:end].tolist()
        scope = Scope(identity, salt=str(tenant(blocks[1] if len(blocks) > 1 else 0)))
        yield scope.rechain([numbers[block] for block in blocks])


def content(key: BlockKey) -> bytes:
    return key * (PAYLOAD_BYTES // len(key))


def read(store: TieredStore, chain: Chain) -> int:
    """Read the cached beginning of a prompt and check its bytes. Returns its length in blocks."""
    found = 0
    with store.acquire(chain, PATIENCE_S) as lease:
        while blocks := lease.ready(AT_ONCE):
            for block in blocks:
                assert block.payload == content(chain.keys[block.index]), "wrong bytes"
            lease.advance(len(blocks))
            found += len(blocks)
    return found


def write(store: TieredStore, chain: Chain, start: int) -> None:
    with store.begin_store(chain, start, len(chain), PAYLOAD_BYTES, PATIENCE_S) as lease:
        while blocks := lease.take(AT_ONCE):
            for block in blocks:
                block.payload[:] = content(chain.keys[block.index])
        lease.commit()


def settle(store: TieredStore) -> None:
    """Wait until tiers have what was stored: the trace gives them seconds for it, the replay none."""
    until_s = time.monotonic() + PATIENCE_S
    while any(tier.pending_writes for tier in store.stats().tiers):
        assert time.monotonic() < until_s, "a tier does not write"
        time.sleep(0.0005)


if __name__ == "__main__":
    main()
