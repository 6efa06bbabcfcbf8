"""The addresses under which a `Watch` is looked at and steered.

No answer holds a prompt's text or a token id: sources tell counts, times, places and digests only. Model
names are the operator's own words, and are data to the page.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tiercel.web.api.bounds import AtMost
from tiercel.web.api.faults import bad, show
from tiercel.web.api.intake import ClientGone, Intake
from tiercel.web.site import HEADERS
from tiercel.web.watch.guard import Guard
from tiercel.web.watch.history import SAMPLES_MAX
from tiercel.web.watch.openapi import description
from tiercel.web.watch.steering import ACTIONS, BODY_BYTES_MAX, Call, parse_call
from tiercel.web.watch.watch import Watch

OVERVIEW, STREAM, HISTORY = "/v1/overview", "/v1/overview/stream", "/v1/history"
METRICS, DESCRIPTION = "/metrics", "/openapi.json"
CACHE = {f"/v1/cache/{one}": one for one in ACTIONS}
CLEAR = "/v1/cache/clear"
_POINTS = 360
_LOOK_S = 0.2
# A comment now and then shows whether the client is still there.
_SILENCE_S = 10.0
_AT_ONCE_MAX = 16

Endpoint = Callable[[Request], Awaitable[Response]]


class Endpoints:
    """All of a watch's endpoints, behind one guard."""

    def __init__(self, watch: Watch, guard: Guard) -> None:
        self._watch, self._guard = watch, guard
        self._intake = Intake(BODY_BYTES_MAX, _AT_ONCE_MAX, "no call here is longer")
        self._calls = AtMost(_AT_ONCE_MAX, "too many calls are under way")

    def looking(self) -> list[Route]:
        """Those that only tell; `/metrics` is apart, because a server has its own."""
        return [
            Route(OVERVIEW, self.guarded(self.overview)),
            Route(STREAM, self.guarded(self.stream)),
            Route(HISTORY, self.guarded(self.history)),
            Route(DESCRIPTION, self.guarded(self.describe)),
        ]

    def metrics_route(self) -> Route:
        """`/metrics`."""
        return Route(METRICS, self.guarded(self.metrics))

    def steering(self) -> list[Route]:
        """Those that change something."""
        return [
            Route(path, self.guarded(self.steer(action), changes=True), methods=["POST"])
            for path, action in CACHE.items()
        ]

    def clear_route(self) -> Route:
        """The only one of those that a server with calls of its own lacks."""
        return Route(CLEAR, self.guarded(self.steer(CACHE[CLEAR]), changes=True), methods=["POST"])

    def guarded(self, endpoint: Endpoint, *, changes: bool = False) -> Endpoint:
        """The endpoint for those who may."""

        async def answer(request: Request) -> Response:
            self._guard.check(request, changes=changes)
            response = await endpoint(request)
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return answer

    async def overview(self, request: Request) -> Response:
        """What a person looks at, read just now; 503 while the store is away."""
        up, body = await run_in_threadpool(self._watch.overview)
        status = HTTPStatus.OK if up else HTTPStatus.SERVICE_UNAVAILABLE
        return Response(body, status, media_type="application/json")

    async def stream(self, request: Request) -> Response:
        """The same about once a second, as server-sent events."""
        self._watch.admit()
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        watch, seen, silent_s = self._watch, self._watch.latest[0], 0.0
        # Counted from here on: an answer that is never begun would never be counted out.
        with watch.listening():
            yield b"retry: 2000\n\n"
            while not watch.closing:
                number, body = watch.latest
                if number != seen:
                    seen, silent_s = number, 0.0
                    yield b"id: %d\ndata: %b\n\n" % (number, body)
                elif silent_s >= _SILENCE_S:
                    silent_s = 0.0
                    yield b":\n\n"
                await asyncio.sleep(_LOOK_S)
                silent_s += _LOOK_S
            yield b"event: end\ndata: {}\n\n"

    async def history(self, request: Request) -> Response:
        """The last hour."""
        given = request.query_params.get("points", str(_POINTS))
        if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= SAMPLES_MAX):
            raise bad(f"points is {show(given)}; accepted is 1 to {SAMPLES_MAX}", "points")
        return JSONResponse(await run_in_threadpool(self._watch.history.as_json, int(given)))

    async def metrics(self, request: Request) -> Response:
        """The figures for Prometheus."""
        text = await run_in_threadpool(self._watch.source.metrics)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def describe(self, request: Request) -> Response:
        """The OpenAPI description of all this."""
        return Response(json.dumps(description()), media_type="application/json")

    def steer(self, action: str) -> Endpoint:
        """What answers /v1/cache/ACTION."""

        async def answer(request: Request) -> Response:
            try:
                raw = await self._intake.body(request.scope, request.receive)
            except ClientGone:
                return Response(status_code=HTTPStatus.BAD_REQUEST)
            return JSONResponse(await self._act(action, raw, request))

        return answer

    async def on_prefix(self, action: str, raw: bytes, request: HTTPConnection) -> dict[str, Any]:
        """What a server with calls of its own leaves to us: a body that names a prefix. Raises ApiError."""
        self._guard.check(request, changes=True)
        return await self._act(action, raw, request)

    async def _act(self, action: str, raw: bytes, request: HTTPConnection) -> dict[str, Any]:
        call, authorization = parse_call(action, raw), request.headers.get("authorization", "")
        with self._calls.one_more():
            return await run_in_threadpool(self._steered, call, authorization)

    def _steered(self, call: Call, authorization: str) -> dict[str, Any]:
        try:
            return self._watch.source.steer(call, authorization)
        finally:
            self._watch.outdated()
