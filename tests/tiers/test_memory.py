"""The tier in memory: whole records or none, room that is kept to the page, nothing left when it closes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tiercel.blocks import PAGE_BYTES, BlockKey
from tiercel.config import TierConfig
from tiercel.errors import MemoryLimitError, TierError
from tiercel.memory import Pages, host_limit
from tiercel.testing.records import buffer, chain
from tiercel.tiers import Fate
from tiercel.tiers.memory import MemoryTier
from tiercel.tiers.registry import open_tier

KEYS = chain(6).keys
PAGES = 12


def filled(pages: int, fill: int) -> memoryview:
    made = buffer(pages * PAGE_BYTES)
    made[:] = bytes([fill]) * len(made)
    return made


def write(tier: MemoryTier, key: BlockKey, record: memoryview) -> Fate:
    return tier.write([key], [record])[0].fate


def read(tier: MemoryTier, key: BlockKey, pages: int = PAGES) -> tuple[Fate, bytes]:
    into = buffer(pages * PAGE_BYTES)
    (outcome,) = tier.read([key], [into])
    return outcome.fate, bytes(into)


class TierMachine(RuleBasedStateMachine):
    """Against a dict that knows how many pages there are."""

    @initialize()
    def open(self) -> None:
        self.tier = MemoryTier(PAGES * PAGE_BYTES + 100)
        self.model: dict[BlockKey, bytes] = {}

    def free(self) -> int:
        return PAGES - sum(map(len, self.model.values())) // PAGE_BYTES

    @rule(key=st.sampled_from(KEYS), pages=st.integers(1, PAGES + 1), fill=st.integers(0, 255))
    def write(self, key: BlockKey, pages: int, fill: int) -> None:
        record = filled(pages, fill)
        fate = write(self.tier, key, record)
        if pages > self.free():
            self.model.pop(key, None)
        if pages > self.free():
            assert fate is Fate.FULL
        else:
            assert fate is Fate.OK
            self.model[key] = bytes(record)

    @rule(key=st.sampled_from(KEYS), pages=st.integers(1, PAGES))
    def read(self, key: BlockKey, pages: int) -> None:
        fate, seen = read(self.tier, key, pages)
        expected = self.model.get(key)
        if expected is None:
            assert fate is Fate.MISSING
        elif len(expected) > pages * PAGE_BYTES:
            assert fate is Fate.CORRUPT
        else:
            assert fate is Fate.OK
            assert seen == expected + bytes(pages * PAGE_BYTES - len(expected))

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key: BlockKey) -> None:
        (outcome,) = self.tier.delete([key])
        assert outcome.fate is (Fate.OK if self.model.pop(key, None) else Fate.MISSING)

    @invariant()
    def room_and_list_are_the_models(self) -> None:
        assert self.tier.contains(KEYS) == [key in self.model for key in KEYS]
        assert {one.key: one.record_bytes for one in self.tier.scan()} == {
            key: len(held) for key, held in self.model.items()
        }
        usage = self.tier.usage()
        assert (usage.free_bytes, usage.total_bytes) == (self.free() * PAGE_BYTES, PAGES * PAGE_BYTES)

    def teardown(self) -> None:
        self.tier.close()


TierMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTierMachine = TierMachine.TestCase


def test_many_at_once_see_whole_records_and_no_page_is_lost() -> None:
    """A few pages that are handed on all the time: one that came too early would mix two records."""
    pages = 32
    tier = MemoryTier(6 * pages * PAGE_BYTES)
    wrong: list[str] = []
    seen: list[Fate] = []

    def work(number: int) -> None:
        into = buffer(pages * PAGE_BYTES)
        for turn in range(150):
            key = KEYS[(turn + number) % len(KEYS)]
            # Longer and shorter ones of another byte each, so that pages change hands.
            written = filled(pages - (turn + number) % 3, (turn * 7 + number) % 256)
            seen.append(write(tier, key, written))
            for other in (key, KEYS[turn % len(KEYS)]):
                (outcome,) = tier.read([other], [into])
                seen.append(outcome.fate)
                if outcome.fate is Fate.OK and len(set(bytes(into[: (pages - 2) * PAGE_BYTES]))) != 1:
                    wrong.append("a mixture")
            if turn % 5 == number % 5:
                tier.delete([key])

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, number) for number in range(4)]:
            done.result()
    assert wrong == []
    assert set(seen) <= {Fate.OK, Fate.MISSING, Fate.FULL}
    assert seen.count(Fate.OK) > len(seen) / 2
    tier.delete(KEYS)
    usage = tier.usage()
    assert usage.free_bytes == usage.total_bytes


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Reads stop before they copy: (set when one has, let them go on)."""
    stopped, go_on = threading.Event(), threading.Event()
    copy = Pages.read

    def read(self: Pages, *args: object) -> None:
        stopped.set()
        assert go_on.wait(10)
        copy(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Pages, "read", read)
    return stopped, go_on


def test_what_is_being_read_is_not_written_over(slow: tuple[threading.Event, threading.Event]) -> None:
    stopped, go_on = slow
    tier = MemoryTier(4 * PAGE_BYTES)
    assert write(tier, KEYS[0], filled(3, 1)) is Fate.OK
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(read, tier, KEYS[0], 3)
        assert stopped.wait(10)
        assert tier.delete(KEYS[:1])[0].fate is Fate.OK
        assert tier.contains(KEYS[:1]) == [False]
        assert write(tier, KEYS[1], filled(1, 2)) is Fate.OK, "what is free may be written meanwhile"
        waiting = pool.submit(write, tier, KEYS[2], filled(3, 3))
        assert not waiting.done()
        go_on.set()
        assert reading.result(10) == (Fate.OK, bytes(filled(3, 1)))
        assert waiting.result(10) is Fate.OK, "with the pages of the one that was read"
    assert read(tier, KEYS[2], 3) == (Fate.OK, bytes(filled(3, 3)))


def test_a_writer_does_not_wait_for_a_reader_that_stays(
    slow: tuple[threading.Event, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercel.tiers.memory._READERS_S", 0.05)
    stopped, go_on = slow
    tier = MemoryTier(4 * PAGE_BYTES)
    write(tier, KEYS[0], filled(4, 1))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, tier, KEYS[0], 4)
        assert stopped.wait(10)
        tier.delete(KEYS[:1])
        assert write(tier, KEYS[1], filled(1, 2)) is Fate.FULL
        go_on.set()
        assert reading.result(10)[1] == bytes(filled(4, 1))
    assert write(tier, KEYS[1], filled(1, 2)) is Fate.OK


def test_memory_goes_back_with_the_last_reader_of_a_tier_that_closes(
    slow: tuple[threading.Event, threading.Event],
) -> None:
    stopped, go_on = slow
    tier = MemoryTier(4 * PAGE_BYTES)
    write(tier, KEYS[0], filled(4, 1))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, tier, KEYS[0], 4)
        assert stopped.wait(10)
        tier.close()
        assert not tier._pages._map.closed
        go_on.set()
        assert reading.result(10) == (Fate.OK, bytes(filled(4, 1)))
    assert tier._pages._map.closed
    at_rest = MemoryTier(4 * PAGE_BYTES)
    at_rest.close()
    assert at_rest._pages._map.closed


def test_what_is_no_whole_pages_is_not_taken() -> None:
    tier = MemoryTier(4 * PAGE_BYTES)
    (outcome,) = tier.write(KEYS[:1], [buffer(PAGE_BYTES)[:100]])
    assert (outcome.fate, outcome.reason) == (Fate.FAILED, "100 bytes are no whole pages")
    assert tier.write(KEYS[:1], [buffer(PAGE_BYTES)[:0]])[0].fate is Fate.FAILED
    assert tier.contains(KEYS[:1]) == [False]


@pytest.mark.parametrize(
    ("size", "error", "says"),
    [
        (None, TierError, "tier memory: no size is given; accepted: size = SIZE"),
        (4 << 20, MemoryLimitError, r"size = 4\.0 MiB holds no block of 8\.0 MiB; accepted is 8MiB or more"),
        (1 << 50, MemoryLimitError, "tier memory of 1125899906842624 bytes does not fit"),
    ],
)
def test_a_size_that_cannot_be_is_one_line(size: int | None, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as refused:
        open_tier(TierConfig(kind="memory", size_bytes=size), "memory", 8 << 20)
    assert "\n" not in str(refused.value)


def test_nothing_is_touched_before_it_is_written() -> None:
    wanted = min(host_limit().available_bytes // 2, 4 << 30)
    before = resident_bytes()
    tier = MemoryTier(wanted)
    write(tier, KEYS[0], filled(1, 1))
    assert resident_bytes() - before < 32 << 20
    tier.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
