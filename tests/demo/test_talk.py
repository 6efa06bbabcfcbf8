"""Conversations: each prompt continues the one before; what could be reused is counted in blocks."""

from __future__ import annotations

import pytest

from tiercel.bench.documents import Document
from tiercel.demo.talk import new_talk, reusable_tokens

DOCUMENT = Document("A text", "somewhere", "Once upon a time.", ("First?", "Second?", "Third?"))


def test_turns_only_append() -> None:
    talk = new_talk(0, DOCUMENT)
    first = talk.ask(DOCUMENT.text)
    assert DOCUMENT.text in first[0]["content"]
    assert first[0]["content"].endswith("First?")
    assert (talk.turn, talk.question) == (1, "First?")
    talk.hear("An answer.", (1, 2, 3))
    second = talk.ask()
    assert second[:2] == [*first, {"role": "assistant", "content": "An answer."}]
    assert second[2]["content"] == "Second?"
    assert (talk.turn, talk.question) == (2, "Second?")


@pytest.mark.parametrize(
    ("before", "prompt", "reusable"),
    [
        ((), [1] * 10, 0),
        ((1,) * 9, [1] * 10, 8),
        ((1,) * 8, [1] * 8, 4),  # the last token is always computed
        ((1, 1, 1, 1, 2, 2, 2, 2), [1, 1, 1, 1, 2, 2, 2, 3, 3], 4),
        ((1, 1, 1), [1, 1, 1, 1, 1], 0),
    ],
)
def test_what_could_be_reused(before: tuple[int, ...], prompt: list[int], reusable: int) -> None:
    assert reusable_tokens(before, prompt, 4) == reusable
