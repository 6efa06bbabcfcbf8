"""The calls that change something: each does what it says with the prefix or scope it was given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.store.support import branch, chain, drop_ram, get, put, scope

from tiercel.web.api.faults import ApiError
from tiercel.web.watch.steering import ACTIONS, Call, parse_call

from .running import Site


def test_prefetch_brings_a_prefix_up(emptied: Site) -> None:
    of = chain(6)
    put(emptied.store, of)
    assert emptied.store.flush(10)
    prefix = emptied.prefix_of(of)
    drop_ram(emptied.store)
    assert emptied.store.stats().ram_blocks == 0
    answer = emptied.act("prefetch", {"prefix": prefix})
    assert answer.json() == {"object": "cache", "action": "prefetch", "blocks": 6, "done": 6}
    assert emptied.store.stats().ram_blocks == 6


def test_pin_and_unpin(emptied: Site) -> None:
    of = chain(5)
    put(emptied.store, of)
    prefix = emptied.prefix_of(of)
    assert emptied.act("pin", {"prefix": prefix, "ttl": "1m"}).json()["done"] == 5
    assert emptied.store.stats().pins == 5
    assert emptied.act("pin", {"prefix": prefix}).json()["done"] == 5
    assert emptied.act("unpin", {"prefix": prefix}).json()["done"] == 5
    assert emptied.store.stats().pins == 0


def test_demote_frees_ram_and_spares_what_is_shared(emptied: Site) -> None:
    one, other = branch(3, 4, 1), branch(3, 2, 2)
    put(emptied.store, one)
    put(emptied.store, other, 3)
    assert emptied.store.flush(10)
    prefix = emptied.prefix_of(one)
    assert emptied.act("demote", {"prefix": prefix}).json() == {
        "object": "cache", "action": "demote", "blocks": 7, "done": 4,
    }  # fmt: skip
    assert emptied.store.stats().ram_blocks == 5
    assert get(emptied.store, one) == ["ram"] * 3 + ["disk"] * 4


def test_drop_forgets_a_prefix_everywhere(emptied: Site) -> None:
    one, other = branch(3, 4, 1), branch(3, 2, 2)
    put(emptied.store, one)
    put(emptied.store, other, 3)
    assert emptied.store.flush(10)
    assert emptied.act("drop", {"prefix": emptied.prefix_of(one)}).json()["done"] == 4
    assert len(get(emptied.store, one)) == 3
    assert len(get(emptied.store, other)) == 5


def test_clear_forgets_a_scope_or_all(emptied: Site) -> None:
    ours, theirs = chain(4), chain(3, of=scope(salt="theirs"))
    put(emptied.store, ours)
    put(emptied.store, theirs)
    tag = theirs.root[:8].hex()
    assert emptied.act("clear", {"scope": tag}).json()["done"] == 3
    assert get(emptied.store, theirs) == []
    assert len(get(emptied.store, ours)) == 4
    assert emptied.act("clear", {"all": True}).json()["done"] == 4
    assert get(emptied.store, ours) == []


def test_a_prefix_nobody_was_shown_is_told_so(emptied: Site) -> None:
    put(emptied.store, chain(4))
    emptied.overview()
    for action in ACTIONS[:-1]:
        answer = emptied.act(action, {"prefix": "f" * 12})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "prefix_not_found"
    assert emptied.store.stats().ram_blocks == 4


@pytest.mark.parametrize(
    ("action", "body", "param"),
    [
        ("pin", {}, "prefix"),
        ("pin", {"prefix": 7}, "prefix"),
        ("pin", {"prefix": "xyz"}, "prefix"),
        ("pin", {"prefix": "F" * 12}, "prefix"),
        ("pin", {"prefix": "f" * 12, "ttl": 5}, "ttl"),
        ("pin", {"prefix": "f" * 12, "ttl": "25h"}, "ttl"),
        ("demote", {"prefix": "f" * 12, "ttl": "1m"}, "ttl"),
        ("drop", {"scope": "f" * 16}, "scope"),
        ("clear", {}, "scope"),
        ("clear", {"all": False}, "scope"),
        ("clear", {"all": True, "scope": "f" * 16}, "scope"),
        ("clear", {"all": "yes"}, "all"),
        ("clear", {"scope": "f" * 15}, "scope"),
        ("clear", {"prefix": "f" * 12}, "prefix"),
        ("clear", [], None),
        ("clear", 7, None),
    ],
)
def test_wrong_bodies_are_refused_by_name(
    emptied: Site, action: str, body: object, param: str | None
) -> None:
    put(emptied.store, chain(4))
    answer = emptied.act(action, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert "\n" not in error["message"]
    assert emptied.store.stats().ram_blocks == 4


@given(action=st.sampled_from(ACTIONS), raw=st.binary(max_size=200))
def test_any_bytes_are_a_call_or_a_refusal(action: str, raw: bytes) -> None:
    try:
        told: Call | ApiError = parse_call(action, raw)
    except ApiError as refusal:
        told = refusal
    assert isinstance(told, Call) or told.status == 400
