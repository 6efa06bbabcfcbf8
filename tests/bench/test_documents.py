"""Documents: real ones that every machine has, the user's own, and one line for each that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiercel.bench.documents import built_in_documents, choose_documents, cut_to_tokens, user_document
from tiercel.errors import ConfigError


def words(text: str) -> int:
    return len(text.split())


def test_four_long_real_documents_come_with_python_itself() -> None:
    found = [one for one in built_in_documents() if "pydoc_data" in one.source]
    assert len([one for one in found if len(one.text) > 20_000]) >= 4
    assert all(len(set(one.questions)) == 3 for one in found)


def test_a_cut_is_at_a_line_and_never_longer_than_asked() -> None:
    text = "".join(f"line {number} of this text\n" for number in range(1000))
    cut = cut_to_tokens(text, 333, words)
    assert 300 <= words(cut) <= 333
    assert text.startswith(cut + "\n")
    assert cut_to_tokens("short", 333, words) == "short"


def test_a_text_without_lines_is_cut_anywhere() -> None:
    assert 0 < words(cut_to_tokens("word " * 5000, 100, words)) <= 100


def test_the_users_documents_come_first(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("my own words " * 100)
    chosen = choose_documents([file], 3, 200, 64, words)
    assert chosen[0].name == "mine.txt"
    assert len({one.name for one in chosen}) == 3


def test_two_documents_of_one_name_are_told_apart(tmp_path: Path) -> None:
    files = [tmp_path / folder / "it.txt" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text("words " * 100)
    assert [one.name for one in choose_documents(files, 2, 200, 64, words)] == ["it.txt", "it.txt (2)"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b" \n\t ", "is empty"),
        (b"\xff\xfe\x00\x01", "is not text"),
        (b"abc\0def", "is not text"),
        (b"too short", "has 2 tokens; accepted: 64 or more"),
    ],
)
def test_a_document_that_cannot_be_used_is_one_line(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "it.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        choose_documents([file], 1, 200, 64, words)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_directory_is_no_document(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        user_document(tmp_path)


def test_more_conversations_than_documents() -> None:
    with pytest.raises(ConfigError, match="--conversations 64: this machine has"):
        choose_documents([], 64, 200, 64, words)


def test_more_documents_than_conversations(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 documents for 1 conversations"):
        choose_documents([tmp_path / "a", tmp_path / "b"], 1, 200, 64, words)
