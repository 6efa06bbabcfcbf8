"""Hints are understood, or refused by name in one line."""

from __future__ import annotations

import pytest

from tiercel.store.policy import HintError, Hints, parse_hints


def test_hints_are_understood() -> None:
    told = {"no_store": True, "no_load": True, "pin": "10m", "session": "agent 7", "explain": True}
    assert parse_hints(told) == Hints(store=False, load=False, pin_s=600.0, session="agent 7", explain=True)
    assert parse_hints(None) == parse_hints({}) == parse_hints(dict.fromkeys(told)) == Hints()
    assert parse_hints({"no_store": False}) == Hints()


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ("no_store", "tiercel", "is 'no_store'; accepted is an object of no_store, no_load"),
        ([1], "tiercel", "is a list"),
        ({"nostore": True}, "tiercel.'nostore'", "is not a known hint; did you mean no_store?"),
        ({"priority": 3}, "tiercel.'priority'", "accepted are no_store"),
        ({1: 3}, "tiercel.1", "is not a known hint"),
        ({"no_store": "yes"}, "tiercel.no_store", "is 'yes'; accepted is true or false"),
        ({"no_load": 1}, "tiercel.no_load", "is 1; accepted is true or false"),
        ({"pin": 600}, "tiercel.pin", "is 600; accepted is a time with a unit, such as 10m, up to 24h"),
        ({"pin": "600"}, "tiercel.pin", "is '600'"),
        ({"pin": "0s"}, "tiercel.pin", "is '0s'"),
        ({"pin": "25h"}, "tiercel.pin", "up to 24h"),
        ({"session": ""}, "tiercel.session", "accepted are 1 to 256 printable characters"),
        ({"session": "a\nb"}, "tiercel.session", "is 'a\\nb'"),
        ({"session": "x" * 257}, "tiercel.session", "..."),
        ({"session": 7}, "tiercel.session", "is 7"),
    ],
)
def test_what_is_no_hint_is_refused_in_one_line(given: object, param: str, words: str) -> None:
    with pytest.raises(HintError) as refused:
        parse_hints(given)
    assert refused.value.param == param
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_the_field_is_called_as_the_caller_calls_it() -> None:
    with pytest.raises(HintError, match=r"^kv_transfer_params\.pin is 5"):
        parse_hints({"pin": 5}, "kv_transfer_params")
