"""Taking a request in: its body within bounds, and word of a client that has gone. No wait without an end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus

from starlette.types import Receive, Scope

from tiercel.config import format_bytes
from tiercel.web.api import faults
from tiercel.web.api.bounds import AtMost
from tiercel.web.api.faults import ApiError, bad

_BODY_DEADLINE_S = 60.0
# A refused body is read on for a while: closing at once would reset the connection under the answer.
_DRAIN_BYTES_MAX = 64 << 20
_DRAIN_DEADLINE_S = 5.0
GONE = "client_gone"


class ClientGone(Exception):
    """The client closed the connection before its request was whole."""


class Intake:
    """Reads bodies, of which no more than `at_once_max` may be in the making. `named` is the bound's name."""

    def __init__(self, body_bytes_max: int, at_once_max: int, named: str = "serve.max_body") -> None:
        self._body_bytes_max, self._named = body_bytes_max, named
        self._reading = AtMost(at_once_max, "too many requests are being sent at once", "too_many_uploads")

    async def body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole JSON body. Raises ApiError (408, 413, 415, 429) and ClientGone."""
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            # Also keeps out forms of web pages, which browsers send anywhere without asking.
            shown = kind.decode("latin-1")[:80] or "missing"
            raise ApiError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"the Content-Type is {shown}; accepted is application/json",
                code="unsupported_content_type",
            )
        try:
            with self._reading.one_more():
                async with asyncio.timeout(_BODY_DEADLINE_S):
                    return await self._read(headers.get(b"content-length", b""), receive)
        except TimeoutError:
            raise ApiError(
                HTTPStatus.REQUEST_TIMEOUT, f"the body did not arrive within {_BODY_DEADLINE_S:g} s",
                code="body_timeout",
            ) from None  # fmt: skip

    async def _read(self, declared: bytes, receive: Receive) -> bytes:
        if declared.isdigit() and int(declared) > self._body_bytes_max:
            await self._refuse(receive, 0, more=True)
        parts: list[bytes] = []
        size_bytes = 0
        more = True
        while more:
            part, more = await _part(receive)
            size_bytes += len(part)
            if size_bytes > self._body_bytes_max:
                parts.clear()
                await self._refuse(receive, size_bytes, more=more)
            parts.append(part)
        if not size_bytes:
            raise bad("the body is empty; accepted is a JSON object", code="invalid_json")
        return b"".join(parts)

    async def _refuse(self, receive: Receive, size_bytes: int, *, more: bool) -> None:
        try:
            async with asyncio.timeout(_DRAIN_DEADLINE_S):
                while more and size_bytes <= _DRAIN_BYTES_MAX:
                    part, more = await _part(receive)
                    size_bytes += len(part)
        except TimeoutError:
            pass
        limit = format_bytes(self._body_bytes_max)
        raise ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is larger than the {limit} this server takes ({self._named})",
            code="body_too_large",
        )


async def _part(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message.get("body", b""), message.get("more_body", False)


@asynccontextmanager
async def watched(
    receive: Receive, until_s: float, deadline_s: float, stop: Callable[[ApiError, str], None]
) -> AsyncIterator[None]:
    """Call `stop` when the client leaves or the time is up (`until_s`, on the event loop's clock)."""
    loop = asyncio.get_running_loop()
    timer = loop.call_at(until_s, stop, faults.too_late(deadline_s), "deadline")

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        stop(client_gone(), "disconnect")

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        timer.cancel()
        watcher.cancel()


def client_gone() -> ApiError:
    """The end of a request that nobody waits for; only ever counted, never sent."""
    return ApiError(HTTPStatus.BAD_REQUEST, "the client has gone", code=GONE)
