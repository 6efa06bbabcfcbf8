"""Being asked to stop: Ctrl-C and SIGTERM end a run in order, with a report on what there is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Stop:
    """Whether somebody asked. Handlers run in the main thread; anybody may look or wait."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        """Ask to stop. The second time raises KeyboardInterrupt."""
        if self._asked.is_set():
            raise KeyboardInterrupt
        self._asked.set()

    def wait(self, seconds: float) -> bool:
        """Whether somebody asked, after `seconds` at most."""
        return self._asked.wait(seconds)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM ask, within this block."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, lambda *_: self.ask()) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)
