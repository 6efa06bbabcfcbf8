"""The tasks: the same for a seed, answerable from their context, and unlike for another seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiercel.bench.texts import Texts, find_texts
from tiercel.errors import ConfigError, RequestError
from tiercel.eval.judge import encode
from tiercel.eval.own import own_task
from tiercel.eval.samples import Sample, Turn
from tiercel.eval.tasks import TASKS, tasks_named

FILLER = Texts(find_texts(None)).piece


@pytest.mark.parametrize("name", TASKS)
def test_a_seed_names_a_text(name: str) -> None:
    make = TASKS[name].make
    assert make(1, FILLER) == make(1, FILLER)
    assert make(1, FILLER) != make(2, FILLER)
    assert len({make(seed, FILLER).context for seed in range(6)}) == 6


@pytest.mark.parametrize("name", [name for name in TASKS if name != "text-nll"])
def test_every_answer_stands_in_the_context(name: str) -> None:
    for seed in range(3):
        sample = TASKS[name].make(seed, FILLER)
        assert sample.scored
        for turn in sample.turns:
            assert turn.answer.strip().rstrip('"}') in sample.context


def test_needles_are_not_at_the_end() -> None:
    for seed in range(5):
        sample = TASKS["needle"].make(seed, FILLER)
        assert sample.context.index("The secret number") < 0.85 * len(sample.context)


def test_how_a_text_goes_on_is_what_follows_it() -> None:
    sample = TASKS["text-nll"].make(1, FILLER)
    assert not sample.scored
    assert sample.context + sample.turns[0].answer == FILLER(1, 1750)


def test_unknown_tasks_are_named() -> None:
    with pytest.raises(ConfigError, match="--tasks: 'needel' is unknown; accepted: json-records"):
        tasks_named(["needle", "needel"])


class Letters:
    """A tokenizer that makes a token of each character."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [0] * add_special_tokens + [ord(one) for one in text]}


def test_spans_are_the_answers() -> None:
    sample = Sample("abc", (Turn("q", "xy"), Turn("", "z")))
    encoded = encode(sample, Letters(), None)
    assert encoded.context == (0, 97, 98, 99)
    assert ["".join(map(chr, encoded.new[a:b])) for a, b in encoded.spans] == ["xy", "z"]


def test_the_first_token_behind_the_context_is_not_predicted() -> None:
    encoded = encode(Sample("abc", (Turn("", "xyz"),)), Letters(), None)
    assert encoded.spans == ((1, 3),)


def test_an_answer_of_which_nothing_is_predicted_has_no_place_and_alone_is_refused() -> None:
    encoded = encode(Sample("abc", (Turn("", "x"), Turn("", "y"))), Letters(), None)
    assert encoded.spans == ((1, 2),)
    with pytest.raises(RequestError, match="one token behind its context"):
        encode(Sample("abc", (Turn("", "x"),)), Letters(), None)
    assert encode(Sample("abc", (Turn("q", "x"),)), Letters(), None).spans == ((1, 2),)


def test_a_sample_that_is_too_long_is_refused() -> None:
    with pytest.raises(RequestError, match="a sample has 7 tokens; accepted by this model: 6"):
        encode(Sample("abc", (Turn("q", "xy"),)), Letters(), 6)
    encode(Sample("abc", (Turn("q", "xy"),)), Letters(), 7)


def test_own_tasks(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [
        {"context": "A.", "turns": [{"question": "q", "answer": " a"}, {"question": "r", "answer": " b"}]},
        {"context": "B.", "question": "s", "answer": " c"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    task = own_task(path)
    assert task.name == "mine"
    assert task.make(1, FILLER) == Sample("A.", (Turn("q", " a"), Turn("r", " b")))
    assert task.make(2, FILLER) == task.make(4, FILLER) == Sample("B.", (Turn("s", " c"),))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("{}", "line 1: .*context"),
        ("not json", "line 1"),
        ('{"context": "x", "question": "y"}', "line 1 has no context or no answer"),
        (
            '{"context": "x", "answer": "y"}\n{"context": "x", "qestion": "y", "answer": "z"}',
            "line 2: .*qestion",
        ),
    ],
)
def test_own_tasks_that_are_none(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"--task-file: .*{said}"):
        own_task(path)
