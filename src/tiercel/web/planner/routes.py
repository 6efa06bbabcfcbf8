"""The planner's addresses: its page, its script of choices, and one JSON address that plans.

It reads no file that a request names.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tiercel.errors import TiercelError
from tiercel.web import site
from tiercel.web.planner import page
from tiercel.web.site import HEADERS

QUERY_CHARS_MAX = 4096
# The one that is made and those that wait for theirs.
PLANS_MAX = 8


class _Plans:
    """Plans one at a time: a daemon that works beside this must not wait for many."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        self._there = 0

    async def answer(self, request: Request) -> Response:
        """The plan, or 429 where too many wait for theirs."""
        if self._there >= PLANS_MAX:
            busy = _refusal("too many plans are asked for; try again in 1 s", HTTPStatus.TOO_MANY_REQUESTS)
            busy.headers["Retry-After"] = "1"
            return busy
        self._there += 1
        try:
            async with self._one:
                return await plan(request)
        finally:
            self._there -= 1


async def plan(request: Request) -> Response:
    """`/api/plan?model=...&gpu=...`: the options of `tiercel plan`; 400 with one line for a bad one."""
    if len(request.url.query) > QUERY_CHARS_MAX:
        return _refusal(f"query of {len(request.url.query)} characters; accepted: at most {QUERY_CHARS_MAX}")
    try:
        return JSONResponse(
            await run_in_threadpool(page.plan_json, dict(request.query_params)), headers=HEADERS
        )
    except TiercelError as error:
        return _refusal(str(error))


def _refusal(message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> Response:
    return JSONResponse({"error": message}, status_code=status, headers=HEADERS)


def routes(*, live: bool) -> list[Route]:
    """The planner at `/plan`. Without `live` there is nothing to watch, and the page says how to connect."""

    async def shown(request: Request) -> Response:
        return site.page(page.PAGE)

    async def data(request: Request) -> Response:
        return site.script(await run_in_threadpool(page.data_script, live=live))

    return [
        Route("/plan", shown),
        Route("/api/plan", _Plans().answer),
        Route(f"/assets/{page.DATA_FILE}", data),
    ]
