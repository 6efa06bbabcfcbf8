"""Tokens to text, as they come: whole characters only, and never past a stop string.

It holds back what is not certain yet (half a character, the beginning of what may become a stop string).
"""

from __future__ import annotations

from typing import Any

_REPLACEMENT = "\ufffd"
# A character has at most four bytes; a longer run of undecodable tokens is not one character in the making.
_HELD_TOKENS_MAX = 32


class StreamDecoder:
    """Turns one answer's tokens into text. `tokenizer` None gives no text."""

    def __init__(self, tokenizer: Any | None, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._ids: list[int] = []
        # ids[:start] are out; ids[start:read] are out too, and give what follows its context for spacing.
        self._start = self._read = 0
        self._held = ""
        self._out: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._out)

    def push(self, token: int) -> str:
        """Take one token; returns text that is certain now. Sets `stopped` when a stop string is complete."""
        if self._tokenizer is None or self.stopped:
            return ""
        self._ids.append(token)
        before = self._decode(self._start, self._read)
        after = self._decode(self._start, len(self._ids))
        waiting = len(self._ids) - self._read
        if after.endswith(_REPLACEMENT) and waiting < _HELD_TOKENS_MAX:
            return ""
        self._start, self._read = self._read, len(self._ids)
        return self._give(after[len(before) :])

    def finish(self) -> str:
        """No more tokens: returns what was held back."""
        if self._tokenizer is None or self.stopped:
            return ""
        rest = self._decode(self._start, len(self._ids))[len(self._decode(self._start, self._read)) :]
        self._start = self._read = len(self._ids)
        text = self._give(rest)
        if not self.stopped:
            text += self._held
            self._out.append(self._held)
        self._held = ""
        return text

    def _decode(self, start: int, stop: int) -> str:
        assert self._tokenizer is not None
        text = self._tokenizer.decode(
            self._ids[start:stop], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _give(self, text: str) -> str:
        pending = self._held + text
        found = [at for one in self._stop if (at := pending.find(one)) >= 0]
        if found:
            self.stopped = True
            certain, self._held = pending[: min(found)], ""
        else:
            keep = max((_overlap(pending, one) for one in self._stop), default=0)
            certain, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        self._out.append(certain)
        return certain


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, short of all of it."""
    return next(
        (size for size in range(min(len(stop) - 1, len(text)), 0, -1) if stop.startswith(text[-size:])), 0
    )
