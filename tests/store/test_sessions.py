"""The names of sessions: bounded by number, blocks and age, and each tenant's own."""

from __future__ import annotations

from tests.store.support import chain

from tiercel.store.sessions import Sessions, tenant_of

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
