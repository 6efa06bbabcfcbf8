"""What is said about a run: rows with exactly the promised keys, and sentences that only repeat them."""

from __future__ import annotations

import json

import msgspec
import pytest
from tests.demo.conftest import make_turn

from tiercel.demo.outcome import Outcome

KEYS = [
    "name", "prompt_tokens", "reused_tokens", "source", "ttft_cold_s", "ttft_s", "speedup", "same_answer",
    "bytes_ram", "bytes_disk",
]  # fmt: skip


def test_rows_have_exactly_the_promised_keys_and_first_turns_have_none(outcome: Outcome) -> None:
    written = json.loads(outcome.to_json())
    assert [list(row) for row in written["rows"]] == [KEYS] * 3
    assert written["ok"] is True
    assert [row["source"] for row in written["rows"]] == ["ram", "disk", "disk"]
    assert written["rows"][0]["speedup"] == pytest.approx(25.0)


def test_a_mixed_turn_counts_as_from_the_slowest_and_says_so() -> None:
    assert make_turn(blocks={"ram": 1, "disk": 2}).source == "disk"
    assert make_turn(blocks={"ram": 1, "disk": 2}).source_text() == "RAM (1) + disk (2)"
    assert make_turn(blocks={"ram": 3}).source_text() == "RAM"
    assert make_turn(blocks={}).source == "none"


def test_a_turn_after_the_restart_is_named_so(outcome: Outcome) -> None:
    assert [row.name for row in outcome.rows][-1] == "One, after restart"


def test_the_summary_counts_what_differs(outcome: Outcome) -> None:
    assert "25.0x as fast from RAM" in outcome.summary()
    assert "every answer the same" in outcome.summary()
    turns = (*outcome.turns[:-1], msgspec.structs.replace(outcome.turns[-1], same_answer=False))
    assert "2 of the answers the same" in msgspec.structs.replace(outcome, turns=turns).summary()


def test_a_run_without_rows_claims_nothing(outcome: Outcome) -> None:
    empty = msgspec.structs.replace(outcome, turns=())
    assert empty.summary() == "No turn was resumed, so there is nothing to compare."
    assert json.loads(empty.to_json())["rows"] == []
