"""What is sent: the same for both sides, unlike any other round or run, sharing what it should share."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.bench.documents import Document
from tiercel.bench.spec import KINDS, Asked, Spec
from tiercel.bench.texts import Texts, find_texts
from tiercel.bench.workload import Session, planned, sessions_of
from tiercel.errors import ConfigError

DOCUMENTS = [
    Document(
        f"d{number}",
        f"d{number}",
        "".join(f"line {number} {at} of it\n" for at in range(400)),
        ("A?", "B?", "C?"),
    )
    for number in range(3)
]
TEXTS = Texts(DOCUMENTS)
NAMES = st.sampled_from(list(KINDS))


def prompts(session: Session) -> list[str]:
    """A session's prompts as far as they are known before it runs."""
    said, found = session.system, []
    for turn in session.turns:
        said += turn.text
        found.append(said)
    return found


def made(spec: Spec, run: str = "run", number: int = 0, most: int = 50) -> list[Session]:
    return list(islice(sessions_of(spec, TEXTS, run, number), most))


@given(NAMES, st.integers(2, 6), st.integers(1, 4), st.integers(0, 3))
def test_a_round_is_made_the_same_again(workload: str, sessions: int, turns: int, seed: int) -> None:
    spec = Asked(sessions=sessions, turns=turns, seed=seed, rate=2.0).spec(workload)
    assert made(spec) == made(spec)
    requests = sum(len(one.turns) for one in made(spec))
    assert requests == planned(spec, 0)


@given(NAMES, st.integers(2, 4))
def test_no_prompt_begins_like_one_of_another_round_or_run(workload: str, sessions: int) -> None:
    spec = Asked(sessions=sessions, tokens=100).spec(workload)
    groups = [made(spec), made(spec, number=1), made(spec, run="other")]
    begins = [{prompt[:60].split("\n")[0] for one in group for prompt in prompts(one)} for group in groups]
    assert not begins[0] & begins[1]
    assert not begins[0] & begins[2]


@given(NAMES, st.integers(2, 5), st.integers(1, 4))
def test_again_means_that_the_long_beginning_was_sent_before(
    workload: str, sessions: int, turns: int
) -> None:
    spec = Asked(sessions=sessions, turns=turns, tokens=200).spec(workload)
    seen: set[str] = set()
    for one in made(spec):
        for turn, prompt in zip(one.turns, prompts(one), strict=True):
            begin = prompt[:500]
            assert turn.again == (begin in seen)
            seen.add(begin)


def test_unique_prompts_share_nothing() -> None:
    spec = Asked(sessions=20, tokens=100).spec("unique")
    assert len({one.turns[0].text[:30] for one in made(spec)}) == 20


def test_documents_are_asked_about_in_mixed_order_each_as_often() -> None:
    spec = Asked(sessions=4, turns=6).spec("document")
    headings = [one.turns[0].text.split("\n")[0] for one in made(spec)]
    assert {headings.count(one) for one in headings} == {6}
    assert headings[:4] != headings[4:8] or headings[4:8] != headings[8:12]


def test_sessions_arrive_as_often_as_asked() -> None:
    spec = Asked(sessions=4000, rate=5.0, tokens=16).spec("unique")
    arrivals = [one.arrives_s for one in sessions_of(spec, TEXTS, "run", 0)]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] / len(arrivals) == pytest.approx(1 / 5.0, rel=0.1)
    gaps = [b - a for a, b in pairwise(arrivals)]
    # Poisson: as much spread as mean.
    mean = sum(gaps) / len(gaps)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.15)


@pytest.mark.parametrize(
    ("asked", "workload", "wanted"),
    [
        (Asked(requests=10, rounds=2), "chat", 5),
        (Asked(requests=12, rounds=3), "unique", 4),
        (Asked(requests=7, rounds=2), "document", 4),
        (Asked(duration_s=10.0), "chat", None),
        (Asked(duration_s=10.0), "document", None),
        (Asked(duration_s=10.0, requests=8, rounds=2), "chat", 4),
        (Asked(sessions=3, turns=5), "chat", 15),
    ],
)
def test_how_many_requests_a_round_has(asked: Asked, workload: str, wanted: int | None) -> None:
    assert planned(asked.spec(workload), 0) == wanted


@given(NAMES, st.integers(1, 50), st.integers(1, 9), st.integers(1, 9) | st.none())
def test_no_more_requests_than_asked_for(
    workload: str, requests: int, rounds: int, sessions: int | None
) -> None:
    if workload == "overflow" and sessions == 1:
        return  # refused: too few for this workload
    spec = Asked(requests=requests, rounds=rounds, sessions=sessions).spec(workload)
    counts = [planned(spec, number) or 0 for number in range(rounds)]
    assert sum(counts) <= requests
    if sessions is None:
        assert sum(counts) == requests


@given(st.integers(0, 40), st.integers(16, 4000))
def test_pieces_have_about_the_length_asked_for_and_are_found_again(number: int, tokens: int) -> None:
    piece = TEXTS.piece(number, tokens)
    assert piece == TEXTS.piece(number, tokens)
    assert tokens * 4 * 0.4 <= len(piece) <= tokens * 4


def test_a_spec_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="accepted: all, chat"):
        Asked().spec("chats")
    with pytest.raises(ConfigError, match="too few for 'overflow'"):
        Asked(sessions=1).spec("overflow")


def test_the_users_texts(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("two " * 50)
    (tmp_path / "a.txt").write_text("one " * 50)
    (tmp_path / "c.bin").write_bytes(b"\0" * 50)
    assert [one.name for one in find_texts(tmp_path)] == ["a.txt", "b.md"]
    assert len(find_texts(None)) >= 4
    (tmp_path / "d.txt").write_bytes(b"\xff\xfe")
    for folder, words in ((tmp_path, "is not text"), (tmp_path / "no", "not a directory")):
        with pytest.raises(ConfigError, match=words):
            find_texts(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no text files"):
        find_texts(tmp_path / "empty")
