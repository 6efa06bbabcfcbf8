"""What is sent in a round: sessions of turns, made one by one from a seed, the same for both sides.

Every session begins with a heading of this run, round and session, so that nothing an earlier run or round
left in a cache can help it. What sessions share on purpose has one heading for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from random import Random

from tiercel.bench.spec import SESSIONS_MAX, TOOL_TOKENS, Spec
from tiercel.bench.texts import Texts

# A pause is exponential; a rare one of minutes would only make a run long.
_PAUSE_TIMES_MAX = 4.0
_TOOLS = ("search", "read_file", "run_tests", "list_files")


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what is said, `pause_s` after the last answer. `again`: it begins like an earlier one."""

    text: str
    pause_s: float
    again: bool


@dataclass(frozen=True, slots=True)
class Session:
    """Requests of which each begins with the ones before it. `arrives_s` after the round's start."""

    number: int
    system: str
    turns: tuple[Turn, ...]
    arrives_s: float


def sessions_of(spec: Spec, texts: Texts, run: str, round_number: int) -> Iterator[Session]:
    """The round's sessions in the order they come. `run` is what tells this run's prompts from all others."""
    make = {
        "chat": _chat,
        "overflow": _chat,
        "document": _document,
        "agents": _agent,
        "unique": _unique,
    }[spec.workload]
    heading = f"Reference {run}-{spec.workload}-{round_number}"
    arrivals = _arrivals(spec, round_number)
    total = _total(spec)
    for number in islice(count(), SESSIONS_MAX if total is None else total):
        system, turns = make(spec, texts, heading, round_number, number)
        yield Session(number, system, turns, next(arrivals))


def planned(spec: Spec, round_number: int) -> int | None:
    """How many requests a side is to send in a round; None where only time ends it."""
    total = _total(spec)
    whole = None if total is None else total * (1 if spec.single else spec.turns)
    limit = spec.requests_in(round_number)
    return limit if whole is None else whole if limit is None else min(limit, whole)


def _total(spec: Spec) -> int | None:
    """How many sessions a round has."""
    if spec.workload == "document":
        endless = spec.duration_s is not None and spec.requests is None
        return None if endless else (spec.sessions or 1) * spec.turns
    return spec.sessions


def _arrivals(spec: Spec, round_number: int) -> Iterator[float]:
    random, at_s = _random(spec, round_number, "arrivals"), 0.0
    while True:
        yield at_s
        if spec.rate:
            at_s += random.expovariate(spec.rate)


def _random(spec: Spec, round_number: int, what: str) -> Random:
    return Random(f"{spec.seed}:{spec.workload}:{round_number}:{what}")


def _pauses(spec: Spec, round_number: int, number: int) -> Iterator[float]:
    random = _random(spec, round_number, f"pauses of {number}")
    yield 0.0
    while True:
        long_s = random.expovariate(1 / spec.pause_s) if spec.pause_s else 0.0
        yield min(long_s, _PAUSE_TIMES_MAX * spec.pause_s)


def _nth(spec: Spec, round_number: int, number: int) -> int:
    """Which piece of text: no two sessions of a run the same, as far as there are texts."""
    return number + round_number * (spec.sessions or 1)


Made = tuple[str, tuple[Turn, ...]]


def _chat(spec: Spec, texts: Texts, heading: str, round_number: int, number: int) -> Made:
    piece = _nth(spec, round_number, number)
    questions, pauses = texts.questions(piece), _pauses(spec, round_number, number)
    turns = []
    for turn in range(spec.turns):
        question = f"Question {turn + 1}: {questions[turn % len(questions)]}"
        if turn == 0:
            question = f"{heading}-{number}\n\n{texts.piece(piece, spec.tokens)}\n\n---\n{question}"
        turns.append(Turn(question, next(pauses), turn > 0))
    return "", tuple(turns)


def _document(spec: Spec, texts: Texts, heading: str, round_number: int, number: int) -> Made:
    documents = spec.sessions or 1
    lap, place = divmod(number, documents)
    order = list(range(documents))
    _random(spec, round_number, f"order {lap}").shuffle(order)
    document = order[place]
    piece = _nth(spec, round_number, document)
    questions = texts.questions(piece)
    text = (
        f"{heading}-{document}\n\n{texts.piece(piece, spec.tokens)}\n\n---\n"
        f"Question {lap + 1}: {questions[lap % len(questions)]}"
    )
    return "", (Turn(text, 0.0, lap > 0),)


def _agent(spec: Spec, texts: Texts, heading: str, round_number: int, number: int) -> Made:
    manual = texts.piece(round_number, spec.tokens)
    system = f"{heading}\nYou are an agent. Use the tools. Your manual:\n\n{manual}"
    pauses = _pauses(spec, round_number, number)
    turns = [
        Turn(
            f"Task {number + 1}: which part of the manual applies here? Look it up.", next(pauses), number > 0
        )
    ]
    for turn in range(1, spec.turns):
        result = texts.piece(number * spec.turns + turn + 1, TOOL_TOKENS)
        said = f"Result of {_TOOLS[turn % len(_TOOLS)]}:\n{result}\n\nWhat next?"
        turns.append(Turn(said, next(pauses), True))
    return system, tuple(turns)


def _unique(spec: Spec, texts: Texts, heading: str, round_number: int, number: int) -> Made:
    piece = _nth(spec, round_number, number)
    text = f"{heading}-{number}\n\n{texts.piece(piece, spec.tokens)}\n\n---\n{texts.questions(piece)[0]}"
    return "", (Turn(text, 0.0, False),)
