"""What every tier must do: subclass `TierContract` with a `tier` fixture, and pytest runs all of it.

Says nothing about where records lie or how, nor how fast; what only one kind of place can get wrong is
tested there. The place is empty when a check begins; nothing else may use it meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiercel.blocks import BlockKey, Header, record_bytes, verify
from tiercel.testing.records import PAYLOAD_BYTES, RECORD_BYTES, buffer, chain, record, records
from tiercel.tiers import Fate, Outcome, Stored, Tier

CHAIN = chain(8)
OTHER = chain(8, salt="another tenant")
WRITERS = 4
ROUNDS = 25


def fates(outcomes: Sequence[Outcome]) -> list[Fate]:
    """The fates alone, without the reasons."""
    return [outcome.fate for outcome in outcomes]


def read_one(tier: Tier, key: BlockKey, size_bytes: int = RECORD_BYTES) -> tuple[Fate, bytes]:
    """Read into a fresh buffer: the fate and all of the buffer's bytes."""
    into = buffer(size_bytes)
    (outcome,) = tier.read([key], [into])
    return outcome.fate, bytes(into)


class TierContract:
    """The contract of `tiercel.tiers.base.Tier`. One that `shrinks` records lists what they take there."""

    shrinks = False

    @pytest.fixture
    def tier(self) -> Tier:
        """The tier to check, on an empty place. To be overridden; may `yield` it and tidy up."""
        raise NotImplementedError

    def takes(self, found: Stored, size: int) -> bool:
        """Whether a record of so many bytes is listed with what it takes."""
        return 0 < found.record_bytes <= size if self.shrinks else found.record_bytes == size

    def test_it_has_a_name_and_knows_its_room_or_says_it_does_not(self, tier: Tier) -> None:
        assert tier.name
        free_bytes = tier.usage().free_bytes
        assert free_bytes is None or free_bytes >= 0

    def test_what_was_written_is_read_back_byte_for_byte(self, tier: Tier) -> None:
        keys, wrote = records(CHAIN)
        assert fates(tier.write(keys, wrote)) == [Fate.OK] * 8
        into = [buffer() for _ in keys]
        assert fates(tier.read(keys, into)) == [Fate.OK] * 8
        assert [bytes(one) for one in into] == [bytes(one) for one in wrote]
        assert all(isinstance(verify(one, key), Header) for key, one in zip(keys, into, strict=True))

    def test_answers_come_one_per_key_in_the_order_of_the_keys(self, tier: Tier) -> None:
        tier.write([CHAIN.keys[2], CHAIN.keys[5]], [record(CHAIN, 2), record(CHAIN, 5)])
        order = [7, 5, 0, 2, 1]
        keys = [CHAIN.keys[index] for index in order]
        into = [buffer() for _ in keys]
        assert tier.contains(keys) == [False, True, False, True, False]
        there = [Fate.MISSING, Fate.OK, Fate.MISSING, Fate.OK, Fate.MISSING]
        assert fates(tier.read(keys, into)) == there
        assert bytes(into[1]) == bytes(record_like(5, into[1]))
        assert bytes(into[3]) == bytes(record_like(2, into[3]))
        assert fates(tier.delete(keys)) == there

    def test_an_empty_batch_has_an_empty_answer(self, tier: Tier) -> None:
        assert tier.contains([]) == []
        assert tier.read([], []) == tier.write([], []) == tier.delete([]) == []

    def test_a_record_that_is_not_there_is_missing_and_its_buffer_is_left_alone(self, tier: Tier) -> None:
        into = buffer()
        into[:4] = b"mine"
        (outcome,) = tier.read([CHAIN.keys[0]], [into])
        assert outcome.fate is Fate.MISSING
        assert bytes(into[:4]) == b"mine"
        assert fates(tier.delete([CHAIN.keys[0]])) == [Fate.MISSING]

    def test_a_second_write_replaces_the_first(self, tier: Tier) -> None:
        key = CHAIN.keys[0]
        tier.write([key], [record(CHAIN, fill=1)])
        longer = record(CHAIN, fill=2, payload_bytes=3 * PAYLOAD_BYTES)
        assert fates(tier.write([key], [longer])) == [Fate.OK]
        assert read_one(tier, key, len(longer)) == (Fate.OK, bytes(longer))
        (found,) = tier.scan()
        assert self.takes(found, len(longer))

    def test_one_key_twice_in_a_batch_ends_as_one_valid_record(self, tier: Tier) -> None:
        key = CHAIN.keys[0]
        wrote = [record(CHAIN, fill=1), record(CHAIN, fill=2)]
        assert fates(tier.write([key, key], wrote)) == [Fate.OK, Fate.OK]
        assert read_one(tier, key)[1] in [bytes(one) for one in wrote]
        assert len(list(tier.scan())) == 1

    def test_a_deleted_record_is_gone_and_its_neighbours_stay(self, tier: Tier) -> None:
        keys, wrote = records(CHAIN)
        tier.write(keys, wrote)
        assert fates(tier.delete(keys[3:5])) == [Fate.OK, Fate.OK]
        assert tier.contains(keys) == [True] * 3 + [False] * 2 + [True] * 3
        assert fates(tier.delete(keys[3:4])) == [Fate.MISSING]

    def test_a_record_larger_than_the_buffer_is_corrupt(self, tier: Tier) -> None:
        key = CHAIN.keys[0]
        tier.write([key], [record(CHAIN)])
        assert read_one(tier, key, RECORD_BYTES - 4096)[0] is Fate.CORRUPT
        assert read_one(tier, key)[0] is Fate.OK

    def test_a_buffer_may_be_larger_than_the_record(self, tier: Tier) -> None:
        key = CHAIN.keys[0]
        wrote = record(CHAIN)
        tier.write([key], [wrote])
        fate, read = read_one(tier, key, RECORD_BYTES + 3 * 4096)
        assert fate is Fate.OK
        assert read[:RECORD_BYTES] == bytes(wrote)

    def test_the_same_tokens_of_another_scope_are_another_record(self, tier: Tier) -> None:
        tier.write([CHAIN.keys[0]], [record(CHAIN)])
        assert tier.contains([OTHER.keys[0], CHAIN.keys[0]]) == [False, True]
        assert read_one(tier, OTHER.keys[0])[0] is Fate.MISSING

    def test_scan_lists_every_record_once_with_its_size_and_time(self, tier: Tier) -> None:
        before_s = time.time()
        keys, wrote = records(CHAIN)
        more_keys, more = records(OTHER)
        tier.write(keys, wrote)
        tier.write(more_keys, more)
        tier.delete(keys[:1])
        found = list(tier.scan())
        assert sorted(one.key for one in found) == sorted([*keys[1:], *more_keys])
        assert all(self.takes(one, RECORD_BYTES) for one in found)
        assert all(before_s - 60 < one.used_s < time.time() + 60 for one in found)

    def test_the_writer_may_reuse_its_buffer_at_once(self, tier: Tier) -> None:
        key = CHAIN.keys[0]
        wrote = record(CHAIN)
        expected = bytes(wrote)
        tier.write([key], [wrote])
        wrote[:] = b"\xff" * len(wrote)
        assert read_one(tier, key) == (Fate.OK, expected)

    def test_writers_of_one_key_leave_one_valid_record_and_readers_never_see_half(self, tier: Tier) -> None:
        key = CHAIN.keys[0]
        payload_bytes = 256 << 10
        size = record_bytes(payload_bytes)
        wrote = [record(CHAIN, fill=fill, payload_bytes=payload_bytes) for fill in range(WRITERS)]
        whole = {bytes(one) for one in wrote}
        stop = threading.Event()
        seen: list[Fate] = []
        wrong: list[str] = []

        def look() -> None:
            into = buffer(size)
            while not stop.is_set():
                (outcome,) = tier.read([key], [into])
                seen.append(outcome.fate)
                if outcome.fate is Fate.OK and bytes(into) not in whole:
                    wrong.append("a mixture of two records")
                elif outcome.fate not in (Fate.OK, Fate.MISSING):
                    wrong.append(f"{outcome}")

        def put(one: memoryview) -> list[Fate]:
            return [tier.write([key], [one])[0].fate for _ in range(ROUNDS)]

        with ThreadPoolExecutor(WRITERS + 2) as pool:
            readers = [pool.submit(look) for _ in range(2)]
            writers = [pool.submit(put, one) for one in wrote]
            try:
                outcomes = [fate for writer in writers for fate in writer.result()]
            finally:
                stop.set()
            for reader in readers:
                reader.result()
        assert set(outcomes) == {Fate.OK}, outcomes
        assert wrong == []
        assert Fate.OK in seen
        assert read_one(tier, key, size)[1] in whole
        (found,) = tier.scan()
        assert self.takes(found, size)

    def test_after_close_everything_fails_and_nothing_raises(self, tier: Tier) -> None:
        key = CHAIN.keys[0]
        tier.write([key], [record(CHAIN)])
        assert tier.contains([key]) == [True]
        tier.close()
        tier.close()
        assert tier.contains([key, key]) == [False, False]
        assert read_one(tier, key)[0] is Fate.FAILED
        assert fates(tier.write([key], [record(CHAIN)])) == [Fate.FAILED]
        assert fates(tier.delete([key])) == [Fate.FAILED]
        tier.usage()
        with pytest.raises(OSError, match="closed"):
            list(tier.scan())

    # Run by several classes, each with a tier of its own that the test empties before every example.
    @settings(
        max_examples=25,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(
        steps=st.lists(
            st.tuples(st.sampled_from("wrdc"), st.integers(0, 3), st.integers(0, 255)), max_size=30
        )
    )
    def test_it_behaves_like_a_dict(self, tier: Tier, steps: list[tuple[str, int, int]]) -> None:
        tier.delete(CHAIN.keys)
        model: dict[BlockKey, bytes] = {}
        # One seal per content: a tier need not replace a record by the same one sealed later.
        sealed: dict[tuple[int, int], memoryview] = {}
        for what, index, fill in steps:
            key = CHAIN.keys[index]
            if what == "w":
                made = sealed.setdefault((index, fill), record(CHAIN, index, fill=fill))
                assert fates(tier.write([key], [made])) == [Fate.OK]
                model[key] = bytes(made)
            elif what == "d":
                expected = Fate.OK if model.pop(key, None) else Fate.MISSING
                assert fates(tier.delete([key])) == [expected]
            elif what == "c":
                assert tier.contains([key]) == [key in model]
            else:
                fate, read = read_one(tier, key)
                assert fate is (Fate.OK if key in model else Fate.MISSING)
                assert fate is Fate.MISSING or read == model[key]
        assert sorted(one.key for one in tier.scan()) == sorted(model)


def record_like(index: int, read: memoryview) -> memoryview:
    """The record `index` as sealed at the time that `read` says, for comparing whole records."""
    made = record(CHAIN, index)
    made[104:112] = read[104:112]
    made[128:144] = read[128:144]
    return made
