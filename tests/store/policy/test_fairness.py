"""Who holds more than an equal share, and whose blocks are compared."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercel.store.policy.fairness import Shares

A, B, C = b"a" * 8, b"b" * 8, b"c" * 8


def shares_of(**amounts: int) -> Shares:
    shares = Shares()
    for name, amount in amounts.items():
        shares.add(name.encode() * 8, amount)
    return shares


def test_a_share_is_equal_and_what_is_asked_for_counts() -> None:
    shares = shares_of(a=5, b=5)
    assert not shares.above(A, 10, {})
    assert shares.above(A, 10, {A: 1})
    assert not shares.above(A, 10, {A: 1}, lost=1)
    assert shares_of(a=6, b=4).above(A, 10, {})
    assert shares_of(a=6, b=4).above(B, 8, {}) is False


def test_one_that_is_new_counts_from_when_it_asks() -> None:
    assert not shares_of(a=10).above(A, 10, {A: 0})
    assert shares_of(a=10).above(A, 10, {C: 1})
    shares = shares_of(a=6, b=4)
    assert not shares.above(C, 10, {C: 3})
    assert shares.above(C, 10, {C: 4})


@given(st.lists(st.integers(1, 50), min_size=1, max_size=64))
def test_in_a_full_place_somebody_is_above_when_anything_more_is_asked_for(amounts: list[int]) -> None:
    shares = Shares()
    tags = [at.to_bytes(8, "big") for at in range(len(amounts))]
    for tag, amount in zip(tags, amounts, strict=True):
        shares.add(tag, amount)
    room = sum(amounts)
    for asking in tags:
        assert any(shares.above(tag, room, {asking: 1}) for tag in tags)


def test_of_very_many_the_least_recently_used_are_compared_and_none_has_a_share() -> None:
    shares = Shares()
    tags = [at.to_bytes(8, "big") for at in range(100)]
    for tag in tags:
        shares.add(tag, 1)
    shares.touch(tags[0])
    assert shares.compared({tags[90]: 1}) == [*tags[1:65], tags[90]]
    assert all(shares.above(tag, 1000, {}) for tag in tags)


def test_what_left_has_no_share() -> None:
    shares = shares_of(a=5, b=5)
    shares.forget(B)
    assert shares.held(B) == 0
    assert not shares.above(A, 10, {A: 5})
    assert len(shares) == 1
