"""The table and the lines on a screen."""

from __future__ import annotations

import io

import msgspec
from rich.console import Console
from tests.demo.conftest import make_turn

from tiercel.demo.console import ConsoleScreen, show, store_cost_text, turn_text
from tiercel.demo.outcome import Outcome
from tiercel.report.console import one_line


def shown(outcome: Outcome) -> str:
    out = io.StringIO()
    show(outcome, Console(file=out, width=140, highlight=False))
    return out.getvalue()


def test_the_table_has_a_line_per_resumed_turn(outcome: Outcome) -> None:
    text = shown(outcome)
    for words in ("One, after restart", "RAM (1) + disk (2)", "2.50 s", "0.100 s", "25.0x", "yes"):
        assert words in text
    assert "Storing cost the 2 first turns 0.60 s of 6.0 s (10.0%)." in text


def test_a_name_is_never_read_as_markup(outcome: Outcome) -> None:
    turns = tuple(msgspec.structs.replace(turn, name="[red]x[/red]") for turn in outcome.turns)
    assert "[red]x[/red]" in shown(msgspec.structs.replace(outcome, turns=turns))


def test_a_different_answer_is_loud() -> None:
    turn = make_turn(number=2, blocks={"disk": 3}, cold_s=2.0, same_answer=False)
    assert "DIFFERENT ANSWER" in turn_text(turn)


def test_control_characters_of_a_name_do_not_reach_the_terminal() -> None:
    assert one_line("a\x1b[2Jb\nc") == "a [2Jb c"


def test_without_first_turns_no_cost_is_claimed(outcome: Outcome) -> None:
    assert store_cost_text(msgspec.structs.replace(outcome, turns=())) == ""


def test_without_a_terminal_progress_is_plain_lines(outcome: Outcome) -> None:
    out = io.StringIO()
    with ConsoleScreen(Console(file=out, width=80)) as screen:
        screen.steps(2)
        screen.say("reading [b]x[/b]")
        screen.advance()
        screen.took(outcome.turns[0])
    assert out.getvalue().splitlines()[0] == "... reading [b]x[/b]"
    assert "\x1b" not in out.getvalue()
