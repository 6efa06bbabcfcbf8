"""The page's server: its files and one JSON address that plans. It reads no file that a request names."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tiercel.errors import TiercelError
from tiercel.web import page

QUERY_CHARS_MAX = 4096
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


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


def _refusal(message: str) -> Response:
    return JSONResponse({"error": message}, status_code=400, headers=HEADERS)


async def files(request: Request) -> Response:
    """The page's own files."""
    name = request.path_params.get("name", "index.html")
    if name == page.DATA_FILE:
        return Response(page.data_script(static=False), media_type="text/javascript", headers=HEADERS)
    if name not in page.FILES:
        return Response("not found\n", 404, media_type="text/plain", headers=HEADERS)
    return Response(page.file_text(name), media_type=page.FILES[name], headers=HEADERS)


def create_app() -> Starlette:
    """The ASGI application."""
    return Starlette(routes=[Route("/api/plan", plan), Route("/", files), Route("/{name}", files)])
