"""Streaming text: its pieces add up, never hold half a character, never reach past a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tiercel.engines.transformers.text import StreamDecoder


class ByteTokenizer:
    """The hardest case: every token is one byte of UTF-8."""

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def run(text: bytes, stop: tuple[str, ...] = ()) -> tuple[list[str], StreamDecoder]:
    decoder = StreamDecoder(ByteTokenizer(), stop)
    pieces = [decoder.push(one) for one in text]
    pieces.append(decoder.finish())
    assert decoder.text == "".join(pieces)
    return pieces, decoder


@given(st.text())
def test_pieces_add_up_to_the_text(text: str) -> None:
    pieces, _ = run(text.encode())
    assert "".join(pieces) == text


@given(st.text(alphabet="aé€🎈", min_size=1))
def test_no_piece_holds_half_a_character(text: str) -> None:
    pieces, _ = run(text.encode())
    assert all("\ufffd" not in piece for piece in pieces)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_text_come_out_and_do_not_pile_up(text: bytes) -> None:
    pieces, _ = run(text + b"." * 40)
    assert "".join(pieces).endswith("." * 40)


@given(st.text(alphabet="abc"), st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string_to_complete(text: str, stop: list[str]) -> None:
    pieces, decoder = run(text.encode(), tuple(stop))
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(one) for one in stop)]
    assert decoder.stopped == bool(ends)
    if not ends:
        assert "".join(pieces) == text
        return
    seen = text[: ends[0]]
    assert "".join(pieces) == seen[: min(at for one in stop if (at := seen.find(one)) >= 0)]


def test_what_may_become_a_stop_string_is_held_back() -> None:
    decoder = StreamDecoder(ByteTokenizer(), ("END",))
    assert [decoder.push(one) for one in b"xEN"] == ["x", "", ""]
    assert decoder.push(ord("x")) == "ENx"
    assert [decoder.push(one) for one in b"END!"] == ["", "", "", ""]
    assert decoder.stopped
    assert decoder.finish() == ""


def test_without_a_tokenizer_there_is_no_text() -> None:
    decoder = StreamDecoder(None)
    assert (decoder.push(5), decoder.finish(), decoder.text) == ("", "", "")
