"""Hints are understood, or refused by name in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.store.policy import HintError, Hints, Sight, parse_hints, sift_hints


def test_hints_are_understood() -> None:
    told = {
        "no_store": True, "no_load": True, "pin": "10m", "session": "agent 7", "explain": True,
        "priority": "low", "prefetch": True,
    }  # fmt: skip
    assert parse_hints(told) == Hints(
        store=False, load=False, pin_s=600.0, session="agent 7", explain=True, low=True, prefetch=True
    )
    assert parse_hints({"priority": "normal"}) == Hints()
    assert parse_hints(None) == parse_hints({}) == parse_hints(dict.fromkeys(told)) == Hints()
    assert parse_hints({"no_store": False}) == Hints()


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ("no_store", "tiercel", "is 'no_store'; accepted is an object of no_store, no_load"),
        ([1], "tiercel", "is a list"),
        ({"nostore": True}, "tiercel.'nostore'", "is not a known hint; did you mean no_store?"),
        ({"priority": 3}, "tiercel.priority", "is 3; accepted are low and normal"),
        ({"priority": "high"}, "tiercel.priority", "(to keep a prompt: pin)"),
        ({"weight": 3}, "tiercel.'weight'", "accepted are no_store"),
        ({"prefetch": 1}, "tiercel.prefetch", "accepted is true or false"),
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


def test_where_nothing_can_be_refused_what_is_right_is_taken_and_the_rest_is_told_of() -> None:
    told = {"no_store": True, "pin": 5, "prioty": "low", "session": "s", 7: None}
    hints, refused = sift_hints(told, "kv_transfer_params.tiercel")
    assert hints == Hints(store=False, session="s")
    assert [error.param for error in refused] == [
        "kv_transfer_params.tiercel.pin",
        "kv_transfer_params.tiercel.'prioty'",
    ]
    assert str(refused[1]).endswith("is not a known hint")
    assert sift_hints({"explain": True}) == (Hints(explain=True), [])
    assert sift_hints(None) == (Hints(), [])
    assert sift_hints({str(at): at for at in range(10_000)})[0] == Hints()


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda one: st.lists(one) | st.dictionaries(st.text() | st.integers(), one),
    )
)
def test_whatever_is_given_sifting_raises_nothing(told: object) -> None:
    hints, refused = sift_hints(told)
    assert hints == Hints() or refused == [] or isinstance(told, dict)
    for error in refused:
        assert len(str(error)) < 300


def test_what_hints_say_of_blocks_to_store() -> None:
    assert Hints().sight() is Sight.NEW
    assert Hints().sight(Sight.AGAIN) is Sight.AGAIN
    assert Hints(low=True).sight(Sight.AGAIN) is Sight.LOW
    assert Hints(low=True, pin_s=1.0).sight() is Sight.SURE
    assert Hints(sure=True).sight() is Sight.SURE


class _Counted(str):
    """A text that tells how much of it is looked at."""

    looked = 0

    def __getitem__(self, part: object) -> str:
        text = super().__getitem__(part)  # type: ignore[index]
        _Counted.looked += len(text)
        return text

    def __repr__(self) -> str:
        raise AssertionError("all of it is looked at")


class _Many(Mapping[str, int]):
    """A hundred thousand fields, none of which may be looked at."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, name: str) -> int:
        raise AssertionError("looked at")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("looked at")


def test_a_hint_of_any_size_is_refused_without_reading_it() -> None:
    long = _Counted("\u00e9" * 10_000_000)
    for told in ({long: 1}, {"pin": long}, {"session": long}, {"priority": long}, {"no_store": long}, long):
        _Counted.looked = 0
        hints, refused = sift_hints(told)
        assert hints == Hints()
        assert len(refused) == 1
        assert len(str(refused[0])) < 300
        assert 0 < _Counted.looked < 1000, "shown in part"
    hints, refused = sift_hints(_Many())
    assert hints == Hints()
    assert [str(one)[:27] for one in refused] == ["tiercel has 100000 fields; "]
    with pytest.raises(HintError, match="has 100000 fields"):
        parse_hints(_Many())


def test_an_integer_too_long_to_be_written_is_refused_like_any() -> None:
    huge = 10**5000
    for told in ({name: huge} for name in ("no_store", "pin", "priority", "session", huge)):
        hints, refused = sift_hints(told)
        assert hints == Hints()
        assert len(refused) == 1
        with pytest.raises(HintError, match=r"an integer of 16610 bits|is not a known hint"):
            parse_hints(told)
    assert "an integer of 16610 bits" in str(sift_hints(huge)[1][0])
