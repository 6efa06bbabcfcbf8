"""Text2JSON's score, by examples of each rule."""

from __future__ import annotations

import json

import pytest

from tiercel.eval.text2json import score_objects, score_text

RIGHT = [
    {"name": "Ada", "job": "baker", "city": "Oslo"},
    {"name": "Ben", "job": "pilot", "city": "Rome"},
]


@pytest.mark.parametrize(
    ("found", "score"),
    [
        (RIGHT, 1.0),
        (RIGHT[::-1], 1.0),
        (RIGHT[:1], 0.5),
        ([], 0.0),
        ([{**RIGHT[0], "job": "nurse"}, RIGHT[1]], 0.875),  # a wrong value: a quarter of one of two
        ([{"name": "Ada", "city": "Oslo"}, RIGHT[1]], 0.75),  # a missing key: half of one of two
        ([{"name": "Ada", "city": "Rome"}, RIGHT[1]], 0.625),
        ([{"name": "Ada"}, {"name": "Ben"}], 0.0),
        ([*RIGHT, {"name": "Cid", "job": "x", "city": "y"}], 2 / 3),  # one that is not there
        ([RIGHT[0], {**RIGHT[0], "job": "nurse"}, RIGHT[1]], 1.0),  # of two the first counts
        ([{"job": "baker"}], 0.0),
    ],
)
def test_objects(found: list[dict[str, object]], score: float) -> None:
    assert score_objects(found, RIGHT) == pytest.approx(score)


def test_names_that_occur_twice_are_left_out() -> None:
    twice = [*RIGHT, {"name": "Ada", "job": "nurse", "city": "Bonn"}]
    assert score_objects(RIGHT, twice) == 1.0
    assert score_objects(RIGHT[1:], twice) == 1.0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (json.dumps(RIGHT), 1.0),
        (f"Here it is:\n```json\n{json.dumps(RIGHT)}\n```", 1.0),
        ("no list", 0.0),
        ("[1, 2", 0.0),
        ("] [", 0.0),
        (json.dumps(RIGHT) + " and " + json.dumps(RIGHT), 0.0),
        ("[1, null, \"x\"]", 0.0),
    ],
)  # fmt: skip
def test_texts(text: str, score: float) -> None:
    assert score_text(text, RIGHT) == score
