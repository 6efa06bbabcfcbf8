"""One request on its way through the queue and the engine, between its client and the engine's thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextvars import copy_context
from typing import Any

from tiercel.engines.transformers import Delta, Request
from tiercel.web.api.faults import ApiError


class Job:
    """One request in the queue or in the engine. Made on the event loop that reads its `inbox`.

    The inbox gets the answer's tokens and ends with the one that has a finish reason, or with an `ApiError`.
    `ended` is set once the engine has done with the request altogether, blocks stored and all.
    """

    def __init__(self, request: Request, arrived_s: float) -> None:
        self.request = request
        self.arrived_s = arrived_s
        self.begun_s: float | None = None
        self.first_token_s: float | None = None
        self.stopped: ApiError | None = None
        self.failed: ApiError | None = None
        self.over = False
        # The engine thread's own: its place in the batch, and whether it failed there.
        self.member: Any = None
        self.broken = False
        self.inbox: asyncio.Queue[Delta | ApiError] = asyncio.Queue()
        self.ended = asyncio.Event()
        # The engine's thread logs for this request, so it works in its context.
        self.context = copy_context()
        self._loop = asyncio.get_running_loop()

    async def deltas(self) -> AsyncGenerator[Delta]:
        """The answer's tokens as they come; the last one has a finish reason. Raises ApiError."""
        while not self.over:
            item = await self.inbox.get()
            if isinstance(item, ApiError):
                self.over = True
                self.failed = item
                raise item
            self.over = item.finish_reason is not None
            yield item

    def post(self, item: Delta | ApiError) -> None:
        """Put `item` into the inbox, from any thread; dropped when nobody listens any more."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self.inbox.put_nowait, item)

    def end(self) -> None:
        """The engine has done with it; from any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.ended.set)
