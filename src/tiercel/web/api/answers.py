"""What goes back to a client: OpenAI's objects for a chat or a plain completion, whole or in chunks.

Pure: events of the engine in, plain dictionaries out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tiercel.engines.transformers.request import Delta
from tiercel.store.policy import Decision, as_json

DONE = b"data: [DONE]\n\n"


def event(body: Mapping[str, object]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


@dataclass(slots=True)
class Answer:
    """An answer as far as it has come. `reused_tokens` of the prompt were restored, not computed."""

    prompt_tokens: int
    tokens: int = 0
    reused_tokens: int = 0
    finish_reason: str | None = None
    texts: list[str] = field(default_factory=list)
    decision: Decision | None = None

    def add(self, delta: Delta) -> None:
        """Take one more token."""
        self.tokens += 1
        self.reused_tokens = delta.reused_tokens
        self.finish_reason = delta.finish_reason
        self.texts.append(delta.text)
        self.decision = self.decision or delta.decision

    def usage(self) -> dict[str, Any]:
        """OpenAI's account of it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
            "prompt_tokens_details": {"cached_tokens": self.reused_tokens},
        }


@dataclass(frozen=True, slots=True)
class Writer:
    """The shape of one request's answer. `created_s` is Unix time. `explain` adds what was decided."""

    chat: bool
    answer_id: str
    created_s: int
    model: str
    fingerprint: str
    include_usage: bool
    explain: bool = False

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The answer in one piece."""
        text = "".join(answer.texts)
        said: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text, "refusal": None}}
            if self.chat
            else {"text": text}
        )
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": answer.finish_reason}
        kind = "chat.completion" if self.chat else "text_completion"
        return self._frame(kind, [choice]) | {"usage": answer.usage()} | self._explained(answer)

    def first(self) -> Iterator[dict[str, Any]]:
        """What comes before the text: in a chat, whose turn it is."""
        if self.chat:
            yield self._chunk({"role": "assistant", "content": ""}, None)

    def more(self, delta: Delta, answer: Answer) -> Iterator[dict[str, Any]]:
        """The chunks for one token: its text, if there is any yet, and how the answer so far ended."""
        if delta.text:
            yield self._chunk({"content": delta.text}, None)
        if delta.finish_reason is not None:
            yield self._chunk({}, delta.finish_reason) | self._explained(answer)

    def last(self, answer: Answer) -> Iterator[dict[str, Any]]:
        """What comes after the text."""
        if self.include_usage:
            yield self._frame(self._chunk_kind, []) | {"usage": answer.usage()}

    def _explained(self, answer: Answer) -> dict[str, Any]:
        if not self.explain or answer.decision is None:
            return {}
        return {"tiercel": as_json(answer.decision)}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, said: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        text: dict[str, Any] = {"delta": said} if self.chat else {"text": said.get("content", "")}
        choice = {"index": 0, **text, "logprobs": None, "finish_reason": finish_reason}
        return self._frame(self._chunk_kind, [choice]) | ({"usage": None} if self.include_usage else {})

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }
