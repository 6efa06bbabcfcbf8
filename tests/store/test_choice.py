"""The store offers what is worth loading, prices out a tier that turned slow, and tries it again."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.store.support import (
    PAYLOAD,
    FaultyTier,
    assert_nothing_leaked,
    chain,
    disk,
    drop_ram,
    eventually,
    get,
    make_store,
    payload_of_key,
    put,
)

from tiercel.blocks import BlockKey
from tiercel.config import Config
from tiercel.service import Daemon, connect
from tiercel.store import LaneOptions, PrefillCost, Prompt, TieredStore, choosing
from tiercel.tiers import Outcome

# A block of four tokens costs 40 ms to compute.
PROMPT = Prompt(33, 4, PrefillCost(0.0, 0.01, 0.0))


class Slowable(FaultyTier):
    delay_s = 0.0

    def read(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        time.sleep(self.delay_s)
        return super().read(keys, records)


def on_disk(tier: FaultyTier, blocks: int = 8, workers: int = 1) -> TieredStore:
    store = make_store((tier, LaneOptions(read_workers=workers)))
    put(store, chain(blocks))
    assert store.flush(10)
    drop_ram(store)
    return store


def test_a_fast_tier_is_offered_whole_and_ram_always(tmp_path: Path) -> None:
    store = on_disk(Slowable(disk(tmp_path / "d")))
    hit = store.lookup(chain(8), prompt=PROMPT)
    assert (hit.blocks, hit.worth) == (8, 8)
    assert hit.choice is not None
    assert hit.choice.recompute_s == pytest.approx(0.33)
    get(store, chain(8))
    assert store.lookup(chain(8), prompt=PROMPT).worth == 8
    assert store.lookup(chain(8)).worth == 8


@pytest.mark.parametrize(("load", "worth"), [("always", 8), ("when-faster", 0)])
@pytest.mark.parametrize("told", ["daemon", "engine"])
def test_a_store_and_an_engine_may_be_told_to_load_always(
    tmp_path: Path, load: str, worth: int, told: str
) -> None:
    """CONFIG: what one of them is told holds, whatever the other says."""
    asks = {"daemon.socket": str(tmp_path / "s"), "ram.size": "1MiB"}
    place = {"tiers.0.path": str(tmp_path / "d"), "tiers.0.size": "1GiB"}
    said = {"store.load": load}
    daemon = Daemon(Config.load(None, {}, asks | place | (said if told == "daemon" else {})), tmp_path / "s")
    serving = threading.Thread(target=daemon.run)
    serving.start()
    client = connect(Config.load(None, {}, asks | (said if told == "engine" else {})), PAYLOAD)
    try:
        put(client, chain(8))
        assert client.flush(10)
        assert client.demote(chain(8)) == 8
        free = Prompt(33, 4, PrefillCost(0.0, 1e-9, 0.0))
        assert client.lookup(chain(8), prompt=free).worth == worth
    finally:
        client.close()
        daemon.stop()
        serving.join(10)
        daemon.close()


def test_d36_a_tier_that_turns_slow_is_priced_out_after_three_requests_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "_TRY_AGAIN_S", 0.2)
    tier = Slowable(disk(tmp_path / "d"))
    store = on_disk(tier)
    for _ in range(3):
        get(store, chain(8))
        drop_ram(store)
    tier.delay_s = 0.1
    paid = 0
    while store.lookup(chain(8), prompt=PROMPT).worth:
        get(store, chain(1))
        drop_ram(store)
        paid += 1
    assert 1 <= paid <= 3
    assert store.stats().counters.priced_out >= 8
    tier.delay_s = 0.0

    def offered_again() -> bool:
        time.sleep(0.05)
        drop_ram(store)
        return store.lookup(chain(8), prompt=PROMPT).worth == 8

    assert eventually(offered_again)
    assert store.stats().counters.probes >= 1
    assert len(get(store, chain(8))) == 8
    assert_nothing_leaked(store)


def test_d36_a_slow_tier_that_holds_only_the_beginning_is_tried_again_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer blocks are there than would be tried, and the prompt goes on behind them."""
    monkeypatch.setattr(choosing, "_TRY_AGAIN_S", 0.2)
    tier = Slowable(disk(tmp_path / "d"))
    store = on_disk(tier, blocks=2)
    tier.delay_s = 0.1
    while store.lookup(chain(8), prompt=PROMPT).worth:
        get(store, chain(2))
        drop_ram(store)
    tier.delay_s = 0.0

    def offered_again() -> bool:
        time.sleep(0.05)
        drop_ram(store)
        return store.lookup(chain(8), prompt=PROMPT).worth == 2

    assert eventually(offered_again)
    assert store.stats().counters.probes >= 2
    assert_nothing_leaked(store)


def test_d36_what_reads_in_company_tell_is_believed_of_the_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request reads many blocks at once: one that pays is enough, and a few tries to come back."""
    monkeypatch.setattr(choosing, "_TRY_AGAIN_S", 0.2)
    tier = Slowable(disk(tmp_path / "d"))
    store = on_disk(tier, workers=2)
    prompt = Prompt(33, 4, PrefillCost(0.0, 0.05, 0.0))
    get(store, chain(1))
    for _ in range(3):
        drop_ram(store)
        assert len(get(store, chain(8))) == 8
    drop_ram(store)
    tier.delay_s = 0.5
    assert store.lookup(chain(8), prompt=prompt).worth == 8
    get(store, chain(8))
    drop_ram(store)
    assert store.lookup(chain(8), prompt=prompt).worth == 0
    tier.delay_s = 0.0
    time.sleep(0.3)
    worth = []
    while len(worth) < 20 and 8 not in worth:
        worth.append(store.lookup(chain(8), prompt=prompt).worth)
        assert eventually(lambda: store.stats().tiers[0].pending_reads == 0)
        drop_ram(store)
    assert worth[0] == 0
    assert worth[-1] == 8
    assert store.stats().counters.probes >= 1


def test_a_read_that_hangs_prices_its_tier_out_for_the_others(tmp_path: Path) -> None:
    tier = Slowable(disk(tmp_path / "d"))
    store = on_disk(tier)
    get(store, chain(8))
    drop_ram(store)
    assert store.lookup(chain(8), prompt=PROMPT).worth == 8
    tier.delay_s = 1.0
    waiting = store.prefetch(chain(1), 5.0)
    time.sleep(0.4)
    assert store.lookup(chain(8), prompt=PROMPT).worth == 0
    assert waiting.result(10) == 1


@pytest.mark.parametrize("limit", [1, 3, 100])
@pytest.mark.parametrize("start", [0, 3, 8])
def test_a_prefix_can_be_read_backward(tmp_path: Path, limit: int, start: int) -> None:
    store = on_disk(Slowable(disk(tmp_path / "d")))
    get(store, chain(4))
    one, seen = chain(8), []
    with store.acquire(one, 5.0, start, backward=True) as lease:
        while batch := lease.ready(limit):
            for block in batch:
                assert bytes(block.payload) == payload_of_key(one.keys[block.index])
                seen.append(block.index)
            lease.advance(len(batch))
    assert seen == list(range(7, start - 1, -1))
    assert_nothing_leaked(store)


def test_backward_it_ends_at_the_first_block_that_is_gone(tmp_path: Path) -> None:
    store = make_store()
    put(store, chain(8))
    with store.lock:
        entry = store.ram.get(chain(8).keys[4])
        assert entry is not None
        store.ram.remove(entry)
    with store.acquire(chain(8), 5.0, backward=True) as lease:
        assert [block.index for block in lease.ready(100)] == [7, 6, 5]


def test_d21_fifty_requests_for_one_prefix_on_a_slow_tier_cost_one_load(tmp_path: Path) -> None:
    """6,144 tokens in blocks of 256; nobody queues behind another one's load."""
    blocks, readers = 24, 50
    tier = Slowable(disk(tmp_path / "d"))
    store = make_store((tier, LaneOptions(read_workers=2)), slots=64)
    put(store, chain(blocks))
    assert store.flush(10)
    drop_ram(store)
    tier.delay_s = 0.02
    together = threading.Barrier(readers)

    def read(_: int) -> tuple[int, float]:
        together.wait(10)
        started_s = time.monotonic()
        return len(get(store, chain(blocks), 30.0)), time.monotonic() - started_s

    with ThreadPoolExecutor(readers) as threads:
        got = list(threads.map(read, range(readers)))
    assert {count for count, _ in got} == {blocks}
    assert len(tier.reads) == len(set(tier.reads)) == blocks
    # One after the other it would be fifty times the 24 reads of 20 ms, two at a time.
    assert max(took_s for _, took_s in got) < readers * blocks * tier.delay_s / 2 / 4
    assert_nothing_leaked(store)
