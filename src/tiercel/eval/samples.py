"""What is asked: a context to be read, then questions with the answers that are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer, as they follow each other in the text; both keep their spaces.

    `field`: the answer is the value of this key of a JSON object (text2json only).
    """

    question: str
    answer: str
    field: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One text. `scored`: answers are right or wrong; else they only have a likelihood."""

    context: str
    turns: tuple[Turn, ...]
    scored: bool = True


# filler(number, tokens) is a piece of real text of about so many tokens, always the same for a number.
Filler = Callable[[int, int], str]


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of question. `dense`: its answers need many facts of the context; `make(seed, filler)` is one
    sample.
    """

    name: str
    words: str
    dense: bool
    make: Callable[[int, Filler], Sample]
