"""One answer as it comes: its tokens, their text, and whether it has ended. Knows no model and no store."""

from __future__ import annotations

from tiercel.engines.transformers.request import Delta, FinishReason
from tiercel.engines.transformers.text import StreamDecoder


class Stopped(Exception):
    """A prefill was given up between two blocks, because nobody waits for it any more."""


class Answer:
    """The tokens of one answer so far, and whether it has ended."""

    def __init__(self, eos_ids: frozenset[int], decoder: StreamDecoder, tokens_max: int) -> None:
        self._eos_ids, self._tokens_max = eos_ids, tokens_max
        self.decoder = decoder
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.reused_tokens = 0

    def add(self, token: int) -> Delta:
        """Take the next token and say what it adds."""
        self.tokens.append(token)
        text = self.decoder.push(token)
        if token in self._eos_ids or self.decoder.stopped:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self._tokens_max:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self.decoder.finish()
        if self.decoder.stopped:
            self.finish_reason = "stop"
        return Delta(token, text, self.finish_reason, self.reused_tokens)
