"""A streamed answer, byte by byte as it comes: when its tokens came, what it said, what the server counted.

Believes nothing: a server may send half lines, other objects, counts that cannot be, or stop in the middle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

_LINE_BYTES_MAX = 1 << 20
_ANSWER_BYTES_MAX = 64 << 20
_ERROR_CHARS_MAX = 200


class StreamFault(Exception):
    """The stream is not what it should be; the text is a kind, the same for all streams with this fault."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass(slots=True)
class Heard:
    """An answer as far as it was heard. `first_s` and `last_s`: when its first and latest text came; `end_s`:
    when it was complete. An answer without any text has its end as its first token.
    """

    tokens_max: int
    first_s: float | None = None
    last_s: float | None = None
    end_s: float | None = None
    pieces: int = 0
    texts: list[str] = field(default_factory=list)
    done: bool = False
    finished: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    counted_tokens: int | None = None
    _rest: bytes = b""
    _bytes: int = 0

    def feed(self, piece: bytes, now_s: float) -> None:
        """Take what came at `now_s`. Raises StreamFault."""
        self._bytes += len(piece)
        if self._bytes > _ANSWER_BYTES_MAX:
            raise StreamFault("answer too long")
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _LINE_BYTES_MAX:
            raise StreamFault("line too long")
        for line in lines:
            self._line(line.rstrip(b"\r"), now_s)

    def end(self) -> None:
        """The stream is over. Raises StreamFault if the answer is not."""
        if not self.done and not self.finished:
            raise StreamFault("broken off")
        if self.first_s is None:
            raise StreamFault("empty answer")

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def tokens(self) -> int:
        """As the server counted, else the pieces that came."""
        return self.pieces if self.counted_tokens is None else self.counted_tokens

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first; None for an answer of one."""
        if self.first_s is None or self.last_s is None or self.tokens < 2 or self.pieces < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)

    def _line(self, line: bytes, now_s: float) -> None:
        if not line.startswith(b"data:"):
            return  # comments, event names and the empty lines between events
        data = line[5:].strip()
        if data == b"[DONE]":
            self.done, self.end_s = True, now_s
            return
        try:
            chunk = msgspec.json.decode(data, type=_Chunk)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise StreamFault("not OpenAI's chunks") from None
        if chunk.error is not None:
            raise StreamFault("error in the stream")
        for choice in chunk.choices:
            self._choice(choice, now_s)
        if chunk.usage is not None:
            self._usage(chunk.usage)

    def _choice(self, choice: _Choice, now_s: float) -> None:
        delta = choice.delta or _Delta()
        text = choice.text or delta.content or delta.reasoning_content or delta.reasoning
        if choice.finish_reason is not None:
            self.finished, self.end_s = True, now_s
            if not text:
                self.first_s = now_s if self.first_s is None else self.first_s
        if not text:
            return
        self.first_s = now_s if self.first_s is None else self.first_s
        self.last_s = now_s
        self.pieces += 1
        self.texts.append(text)

    def _usage(self, usage: _Usage) -> None:
        prompt, tokens = usage.prompt_tokens, usage.completion_tokens
        if prompt is not None and prompt > 0:
            self.prompt_tokens = prompt
            details = usage.prompt_tokens_details
            cached = None if details is None else details.cached_tokens
            if cached is not None and 0 <= cached <= prompt:
                self.cached_tokens = cached
        if tokens is not None and 0 <= tokens <= self.tokens_max:
            self.counted_tokens = tokens


def error_text(body: bytes) -> str:
    """What a refusal says of itself, in one short line; empty if it says nothing readable."""
    try:
        told = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    error = told.get("error", told) if isinstance(told, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(message or "").split())[:_ERROR_CHARS_MAX]
