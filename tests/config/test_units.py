"""Sizes and durations: exact, reversible, never guessed."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.config import format_bytes, format_seconds, human_bytes, parse_bytes, parse_seconds
from tiercel.errors import ConfigError

SIZES = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


@given(st.integers(0, 2**60))
def test_a_size_formatted_parses_back_to_itself(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == size_bytes


@given(st.integers(0, 10**6), st.sampled_from(sorted(SIZES)), st.sampled_from(["", " "]))
def test_a_size_is_its_number_times_its_unit(number: int, unit: str, space: str) -> None:
    assert parse_bytes(f"{number}{space}{unit}") == number * SIZES[unit]


@given(st.just(0.0) | st.floats(1e-9, 1e9))
def test_a_duration_formatted_parses_back_to_itself(duration_s: float) -> None:
    assert parse_seconds(format_seconds(duration_s)) == duration_s


@given(
    st.decimals(0, 10**6, places=3),
    st.sampled_from([("ms", "0.001"), ("s", "1"), ("m", "60"), ("h", "3600")]),
)
def test_a_duration_is_its_number_times_its_unit(number: Decimal, unit: tuple[str, str]) -> None:
    assert parse_seconds(f"{number:f}{unit[0]}") == float(number * Decimal(unit[1]))


@pytest.mark.parametrize(
    ("text", "value"),
    [("4GiB", 4 * 2**30), ("500MB", 500_000_000), ("1.5KiB", 1536), ("0B", 0), (" 7 KB ", 7000)],
)
def test_examples_of_sizes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0B"), (4 * 2**30, "4GiB"), (500_000_000, "500MB"), (1537, "1537B")]
)
def test_sizes_are_formatted_as_people_write_them(value: int, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0s"), (0.25, "250ms"), (600, "10m"), (5, "5s"), (3600, "1h")]
)
def test_durations_are_formatted_as_people_write_them(value: float, text: str) -> None:
    assert format_seconds(value) == text


@pytest.mark.parametrize(
    ("text", "suggested"),
    [
        ("4", "'4GiB'"),
        ("4096", "'4096GiB'"),
        ("4gib", "'4GiB'"),
        ("4G", "'4GiB'"),
        ("2.5Mb", "'2.5MB'"),
        ("3k", "'3KiB'"),
    ],
)
def test_a_size_without_a_known_unit_is_refused_with_a_suggestion(text: str, suggested: str) -> None:
    with pytest.raises(ConfigError, match="did you mean") as caught:
        parse_bytes(text)
    assert suggested in str(caught.value)
    assert "4GiB or 500MB" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "suggested"), [("10", "'10s'"), ("10sec", "'10s'"), ("5min", "'5m'"), ("9S", "'9s'")]
)
def test_a_duration_without_a_known_unit_is_refused_with_a_suggestion(text: str, suggested: str) -> None:
    with pytest.raises(ConfigError, match="did you mean") as caught:
        parse_seconds(text)
    assert suggested in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "1e3MB", "4GiBs", "4 Gi B", "٤GiB", "inf", "nan", "0.1B", "1" * 40]
)
def test_what_is_not_a_size_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text)
    assert "\n" not in str(caught.value)
    assert "accepted:" in str(caught.value)


@pytest.mark.parametrize("text", ["", "s", "-1s", "1e3s", "5GiB", "1:30"])
def test_what_is_not_a_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="accepted:"):
        parse_seconds(text)


def test_no_unit_of_the_other_kind_is_suggested() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_seconds("5gb")
    assert "did you mean" not in str(caught.value)


def test_formatting_refuses_what_is_not_a_quantity() -> None:
    with pytest.raises(ValueError, match="negative"):
        format_bytes(-1)
    with pytest.raises(ValueError, match="duration"):
        format_seconds(float("nan"))


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (184_320_000, "175.8 MiB"), (2**40, "1.0 TiB")]
)
def test_sizes_for_people_are_rounded(value: int, text: str) -> None:
    assert human_bytes(value) == text
