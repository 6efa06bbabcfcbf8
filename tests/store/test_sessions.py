"""The names of sessions: bounded by number, blocks and age, and each tenant's own."""

from __future__ import annotations

from tests.store.support import chain, make_store, put, scope

from tiercel.store.sessions import Sessions, tenant_of
from tiercel.store.steering import Steered, steer_session

NOBODY = tenant_of(None)


def test_sessions_are_bounded_by_number_blocks_and_age() -> None:
    now = [0.0]
    table = Sessions(sessions_max=3, blocks_max=10, clock=lambda: now[0])
    for name in "abcd":
        table.note(NOBODY, name, [chain(1)])
    assert [bool(table.chains(NOBODY, name)) for name in "abcd"] == [False, True, True, True]
    table.chains(NOBODY, "b")
    table.note(NOBODY, "e", [chain(1)])
    assert [bool(table.chains(NOBODY, name)) for name in "bcde"] == [True, False, True, True]
    table.note(NOBODY, "big", [chain(5), chain(4)])
    assert len(table) == 2, "the blocks of both parts count"
    table.note(NOBODY, "big", [chain(2)])
    assert table.chains(NOBODY, "big") == (chain(2),)
    now[0] = 86_401.0
    assert table.chains(NOBODY, "big") == ()
    table.note(NOBODY, "new", [chain(1)])
    assert len(table) == 1
    table.note(NOBODY, "too big", [chain(11)])
    assert len(table) == 0


def test_a_tenant_is_a_digest_of_its_salt_and_none_finds_anothers_session() -> None:
    table = Sessions()
    table.note(tenant_of("t1"), "s", [chain(1)])
    assert table.chains(tenant_of("t1"), "s") == (chain(1),)
    for other in (None, "", "t2", "t1\x00"):
        assert table.chains(tenant_of(other), "s") == ()
        table.note(tenant_of(other), "s", [])
    assert b"t1" not in tenant_of("t1")
    table.note(tenant_of("t1"), "s", [])
    assert table.chains(tenant_of("t1"), "s") == ()


def test_what_a_session_left_with_another_model_stays() -> None:
    table = Sessions(blocks_max=10)
    one, other = chain(3), chain(4, of=scope(salt="another root"))
    assert one.root != other.root
    table.note(NOBODY, "agent-7", [one])
    table.note(NOBODY, "agent-7", [other])
    assert set(table.chains(NOBODY, "agent-7")) == {one, other}
    table.note(NOBODY, "agent-7", [chain(2)])
    assert set(table.chains(NOBODY, "agent-7")) == {chain(2), other}, "the model's earlier chain is replaced"
    table.note(NOBODY, "agent-7", [chain(9)])
    assert table.chains(NOBODY, "agent-7") == (chain(9),), "the latest goes before what others left"
    table.note(NOBODY, "agent-7", [])
    assert table.chains(NOBODY, "agent-7") == ()


def test_the_chains_of_a_session_are_bounded() -> None:
    table = Sessions()
    for at in range(200):
        table.note(NOBODY, "s", [chain(1, of=scope(salt=str(at)))])
    kept = table.chains(NOBODY, "s")
    assert len(kept) == 64
    assert kept[0] == chain(1, of=scope(salt="199"))
    assert kept[-1] == chain(1, of=scope(salt="136"))


def test_dropping_a_session_drops_what_it_left_with_both_models() -> None:
    one, other = chain(3), chain(4, of=scope(salt="another root"))
    with make_store(slots=20) as store:
        for left in (one, other):
            put(store, left)
            store.sessions.note(NOBODY, "agent-7", [left])
        assert steer_session(store, "drop", NOBODY, "agent-7") == Steered(7, 7)
        assert store.lookup(one).blocks == store.lookup(other).blocks == 0
