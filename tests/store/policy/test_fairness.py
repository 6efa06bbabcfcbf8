"""Who loses when a place is full: the idle, then whoever holds most, never one with less than the asker."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from tiercel.store.policy.fairness import Shares

A, B, C = b"a" * 8, b"b" * 8, b"c" * 8


def held(**amounts: int) -> Shares:
    shares = Shares()
    for at, (name, amount) in enumerate(amounts.items()):
        shares.add(name.encode() * 8, amount, at)
    return shares


def order(shares: Shares, asking: dict[bytes, int], idle_before: int = 0) -> list[bytes]:
    return [tag for tag, _ in shares.losers(asking, idle_before)]


def test_one_alone_loses_its_own() -> None:
    assert order(held(a=5), {A: 1}) == [A]


def test_who_holds_most_loses_and_nobody_to_one_who_has_more() -> None:
    assert order(held(a=5, b=9, c=7), {A: 1}) == [B, C, A]
    assert order(held(a=5, b=9, c=7), {B: 1}) == [B]
    assert order(held(a=5, b=9, c=7), {C: 1}) == [B, C]
    assert order(held(a=5, b=5), {A: 1}) == [A], "equal: the one that asks replaces its own"


def test_one_who_holds_nothing_yet_may_take_from_all() -> None:
    assert order(held(b=9, c=7), {A: 1}) == [B, C]


def test_the_idle_lose_first_the_longest_idle_before_others() -> None:
    shares = held(a=1, b=2, c=90)
    assert shares.losers({C: 1}, 2) == [(A, inf), (B, inf), (C, 91)]
    shares.touch(A, 7)
    assert order(shares, {C: 1}, 2) == [B, C], "used again, so it has its share again"


def test_what_left_is_not_asked() -> None:
    shares = held(a=5, b=9)
    shares.forget(B)
    assert order(shares, {A: 1}) == [A]


@given(
    st.integers(2, 6),
    st.integers(12, 40),
    st.lists(st.integers(0, 5), max_size=300),
)
def test_nobody_is_pushed_below_an_equal_share_once_it_has_one(
    scopes: int, room: int, stores: list[int]
) -> None:
    """Blocks come in any order; who holds an equal share keeps it as long as it is not idle."""
    shares, amounts = Shares(), dict.fromkeys(range(scopes), 0)
    for now, scope in enumerate(stores):
        scope %= scopes
        tag = bytes([scope]) * 8
        shares.touch(tag, now)
        if sum(amounts.values()) == room:
            before = dict(amounts)
            loser = order(shares, {tag: 1})[0][0]
            amounts[loser] -= 1
            shares.add(bytes([loser]) * 8, -1, now)
            assert loser == scope or before[loser] > before[scope]
            assert amounts[loser] + (loser == scope) >= room // scopes
        amounts[scope] += 1
        shares.add(tag, 1, now)


@given(st.lists(st.integers(1, 50), min_size=65, max_size=200), st.integers(0, 199))
def test_with_many_scopes_too_nobody_loses_to_one_who_has_more(amounts: list[int], asker: int) -> None:
    shares = Shares()
    tags = [at.to_bytes(8, "big") for at in range(len(amounts))]
    for at, amount in enumerate(amounts):
        shares.add(tags[at], amount, at)
    asker %= len(amounts)
    losers = shares.losers({tags[asker]: 1}, 0)
    assert tags[asker] in dict(losers)
    assert all(held >= amounts[asker] + 1 for _, held in losers)
