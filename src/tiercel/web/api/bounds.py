"""So many at once and no more: whoever comes beyond is told to come back. Nobody waits here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tiercel.web.api.faults import too_busy


class AtMost:
    """Counts what is under way in one event loop. `what` there is too much of is told to who is refused."""

    def __init__(self, most: int, what: str, code: str = "queue_full") -> None:
        self._most, self._what, self._code = most, what, code
        self._under_way = 0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Be one of them. Raises ApiError (429)."""
        if self._under_way >= self._most:
            raise too_busy(self._what, self._code)
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
