"""A conversation about one document: its messages, turn by turn. Knows no engine and no store."""

from __future__ import annotations

import msgspec

from tiercel.bench.documents import Document

Message = dict[str, str]

_OPENING = "Read this text, then answer questions about it.\n\n{text}\n\n---\n{question}"


class Talk(msgspec.Struct):
    """The messages so far. Every turn only appends, so each prompt begins with the one before it.

    `tokens` are the prompt and answer of the last turn: what the store may hold of this conversation.
    """

    lane: int
    name: str
    questions: tuple[str, ...]
    messages: list[Message] = []
    tokens: tuple[int, ...] = ()

    @property
    def turn(self) -> int:
        """Number of the turn under way or just done, from 1; 0 before the first."""
        return (len(self.messages) + 1) // 2

    @property
    def question(self) -> str:
        """The question of the turn under way."""
        return self.questions[(self.turn - 1) % len(self.questions)]

    def ask(self, text: str = "") -> list[Message]:
        """Begin the next turn and return its messages; `text` is the document, in the first turn."""
        question = self.questions[self.turn % len(self.questions)]
        content = _OPENING.format(text=text, question=question) if text else question
        self.messages.append({"role": "user", "content": content})
        return list(self.messages)

    def hear(self, answer: str, tokens: tuple[int, ...]) -> None:
        """End the turn with the model's answer; `tokens` are its whole prompt and answer."""
        self.messages.append({"role": "assistant", "content": answer})
        self.tokens = tokens


def new_talk(lane: int, document: Document) -> Talk:
    """A conversation that has not begun."""
    return Talk(lane, document.name, document.questions)


def reusable_tokens(before: tuple[int, ...], prompt: list[int], block_tokens: int) -> int:
    """How many tokens of `prompt` lie in full blocks that the turn `before` could have stored.

    At least one token is always computed, so a prompt that ends at a block boundary reuses a block less.
    """
    common = next(
        (at for at, (old, new) in enumerate(zip(before, prompt, strict=False)) if old != new),
        min(len(before), len(prompt)),
    )
    return min(common, len(prompt) - 1) // block_tokens * block_tokens
