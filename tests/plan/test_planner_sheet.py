"""The formula language: arithmetic and nothing else, IEEE in every corner."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.plan.planner_formulas import SHEET
from tiercel.plan.planner_sheet import Cell, Sheet, divide, least


def value(formula: str, **inputs: float) -> float:
    return Sheet(tuple(inputs), (Cell("x", formula, "1"),)).bind(inputs)["x"]


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("a + b * 2 - 1", 13.0),
        ("-a / b", -0.8),
        ("min(a, b) + max(a, b)", 9.0),
        ("floor(a / b) + ceil(a / b)", 1.0),
        ("a if a > b else b", 5.0),
        ("least(lambda n: n * a - 21, 100)", 6.0),
        ("least(lambda n: n * a - 2100, 100)", math.inf),
    ],
)
def test_arithmetic(formula: str, expected: float) -> None:
    assert value(formula, a=4, b=5) == expected


@pytest.mark.parametrize(
    "formula",
    [
        "a.real",
        "a[0]",
        "open('x')",
        "__import__('os')",
        "a ** 2",
        "a // 2",
        "'text'",
        "True",
        "unknown",
        "a if a else 0",
        "a < 2",
        "min(a, b=1)",
        "least(a, 3)",
        "[a]",
        "lambda x: x",
    ],
)
def test_what_is_not_arithmetic_is_refused(formula: str) -> None:
    with pytest.raises(ValueError, match="formula x"):
        value(formula, a=4)


def test_a_cell_sees_only_what_stands_above_it() -> None:
    cells = (Cell("f", "a * n", "1", params=("n",)), Cell("y", "f(3)", "1"))
    assert Sheet(("a",), cells).bind({"a": 2})["y"] == 6
    with pytest.raises(ValueError, match="f is not"):
        Sheet(("a",), cells[::-1])


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [(1, 0.0, math.inf), (-1, 0.0, -math.inf), (1, -0.0, -math.inf), (0, 0, math.nan), (6, 3, 2)],
)
def test_division_is_ieee(a: float, b: float, expected: float) -> None:
    found = divide(a, b)
    assert found == expected or (math.isnan(found) and math.isnan(expected))


@given(root=st.floats(0, 2e6), limit=st.integers(1, 10**6))
def test_least_finds_the_first_whole_number_above_the_root(root: float, limit: int) -> None:
    expected = max(math.floor(root) + 1, 1)
    assert least(lambda n: n - root, limit) == (expected if expected <= limit else math.inf)


def test_every_formula_of_the_planner_says_what_it_assumes() -> None:
    for cell in SHEET.cells.values():
        assert cell.unit, cell.name
        assert cell.assumption, cell.name


def test_every_input_and_every_function_is_used() -> None:
    used = set().union(*SHEET.uses.values())
    assert set(SHEET.inputs) <= used
    # These are for the break-even table, which asks for them at many prefixes.
    asked = {"breakeven_bytes_per_s", "least_prefix", "split_tokens", "ram_needed_bytes_per_s"}
    functions = {cell.name for cell in SHEET.cells.values() if cell.params}
    assert functions - used <= asked
