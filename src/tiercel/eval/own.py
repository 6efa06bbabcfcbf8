"""Tasks of the user's: a JSONL file, a sample a line.

    {"context": "…", "turns": [{"question": "…", "answer": "…"}, …]}
    {"context": "…", "question": "…", "answer": "…"}

Context, question and answer follow each other as they are: spaces and line breaks belong to them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tiercel.errors import ConfigError
from tiercel.eval.samples import Filler, Sample, Task, Turn

_BYTES_MAX = 256 << 20


class _Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    question: str
    answer: str


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    context: str
    turns: list[_Turn] = []
    question: str = ""
    answer: str = ""


def own_task(path: Path) -> Task:
    """The task of a file; seed n is its line n, and it begins again after the last. Raises ConfigError."""
    samples = _samples(path)

    def make(seed: int, filler: Filler) -> Sample:
        return samples[(seed - 1) % len(samples)]

    return Task(path.stem, f"{len(samples)} samples of {path.name}", True, make)


def _samples(path: Path) -> list[Sample]:
    try:
        with path.open("rb") as file:
            raw = file.read(_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"--task-file: '{path}' cannot be read: {error.strerror or error}") from None
    if len(raw) > _BYTES_MAX:
        raise ConfigError(f"--task-file: '{path}' is larger than the {_BYTES_MAX >> 20} MiB accepted")
    samples = [_sample(path, number, line) for number, line in enumerate(raw.splitlines(), 1) if line.strip()]
    if not samples:
        raise ConfigError(f"--task-file: '{path}' is empty; accepted: a JSON object a line")
    return samples


def _sample(path: Path, number: int, line: bytes) -> Sample:
    where = f"--task-file: '{path}' line {number}"
    try:
        read = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{where}: {error}; accepted: an object with context and turns, or context, question and answer"
        ) from None
    turns = [*read.turns, *([_Turn(read.question, read.answer)] if read.answer else [])]
    if not read.context.strip() or not turns or not all(one.answer for one in turns):
        raise ConfigError(f"{where} has no context or no answer; accepted: neither may be empty")
    return Sample(read.context, tuple(Turn(one.question, one.answer) for one in turns))
