"""One line on stderr that is written over, for a person who watches; silent where nobody can."""

from __future__ import annotations

import sys
import time

_EVERY_S = 0.1


class ProgressLine:
    """Shows the newest text now and then; leaves the last one standing."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._watched = self._stream is not None and self._stream.isatty()
        self._shown_s = 0.0
        self._text = ""
        self._width = 0

    def show(self, text: str) -> None:
        """Take a text, and show it unless another was shown a moment ago."""
        self._text = text
        now_s = time.monotonic()
        if self._watched and now_s - self._shown_s >= _EVERY_S:
            self._shown_s = now_s
            self._write()

    def end(self) -> None:
        """Show the last text and end the line."""
        if self._watched and self._text:
            self._write()
            self._stream.write("\n")
            self._stream.flush()
        self._text = ""

    def _write(self) -> None:
        self._stream.write("\r" + self._text.ljust(self._width))
        self._stream.flush()
        self._width = len(self._text)
