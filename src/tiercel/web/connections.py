"""A server's connections: so many and no more, and none for a client that asks nothing or reads nothing.

Beside a daemon or a store, the descriptors of silent clients are missing where blocks are kept, and a stream
that nobody reads takes another's place. How long a body may take is decided by who reads it, not here.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.auto import AutoHTTPProtocol

# The head of a request must be there within this time, an answer that was said to be the last fetched, and of
# one that waits to be read some more be read.
SILENT_S = 10.0


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # one of two classes, chosen at import
    """One of at most `connections_max`. A request under way, however slow, and a stream that is read are left
    alone.
    """

    connections_max = 128

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to look, or refuse it."""
        super().connection_made(transport)
        self._stuck: object = None
        self._timer = self.loop.call_later(SILENT_S, self._look)
        if len(self.connections) > self.connections_max:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End looking."""
        self._timer.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        closing = self.transport.is_closing()
        idle = self.cycle is None or self.cycle.response_complete
        # Between two requests uvicorn's own timer runs, until the first byte of the next one.
        unread_bytes = self.transport.get_write_buffer_size()
        stuck = closing or unread_bytes > 0 or (idle and self.timeout_keep_alive_task is None)
        state = (self.cycle, closing, unread_bytes)
        if stuck and self._stuck == state:
            self.transport.abort()
            return
        self._stuck = state if stuck else None
        self._timer = self.loop.call_later(SILENT_S, self._look)


class ServingConnection(Connection):
    """One of a server of completions, whose clients keep more of them open."""

    connections_max = 512
