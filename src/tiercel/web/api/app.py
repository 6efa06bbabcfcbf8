"""The ASGI application: which path answers what, who may ask, how every answer is counted and logged.

Whatever goes wrong ends as OpenAI's error object; only its kind and place reach a log, never a prompt.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tiercel.service.logs import place_of, request_id
from tiercel.web.api import faults
from tiercel.web.api.completions import Completions, Service
from tiercel.web.api.exchange import Exchange, begin, exchange_of
from tiercel.web.api.faults import ApiError
from tiercel.web.api.metrics import Metrics
from tiercel.web.api.steering import Steering
from tiercel.web.api.tracing import Tracing
from tiercel.web.watch.app import pages as site_pages
from tiercel.web.watch.endpoints import CLEAR, DESCRIPTION, HISTORY, OVERVIEW, STREAM, Endpoints

_log = logging.getLogger("tiercel.serve")
DECISIONS = "/v1/cache/decisions"
ACTIONS = {f"/v1/cache/{one}": one for one in "prefetch warm pin unpin demote drop explain".split()}
LIVE = (OVERVIEW, STREAM, HISTORY, DESCRIPTION, CLEAR)
PAGES = ("/", "/plan", "/api/plan")
PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics", *ACTIONS, DECISIONS,
    *LIVE, *PAGES,
)  # fmt: skip
# There is nothing of anybody's in them; the page asks for the key itself.
_FOR_ALL = frozenset({"/health", *PAGES})
_ASSETS = "/assets/"
_CLIENT_LEFT = 499
_ID_HEADER = "x-request-id"
_STARTED_S = int(time.time())

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def make_app(
    service: Service,
    api_key: str | None = None,
    lifespan: Lifespan | None = None,
    tracing: Tracing | None = None,
    live: Endpoints | None = None,
) -> Starlette:
    """The application that serves `service`; with `api_key`, /v1 and /metrics are for its holders.

    `live` are the figures behind the dashboard, and what its buttons do.
    """
    pages, steering = _Pages(service), Steering(service, live)
    app = Starlette(
        routes=[
            Route(PATHS[0], Completions(service, chat=True), methods=["POST"]),
            Route(PATHS[1], Completions(service, chat=False), methods=["POST"]),
            Route(PATHS[2], pages.models),
            Route("/v1/models/{name:path}", pages.model),
            Route(PATHS[3], pages.health),
            Route(PATHS[4], pages.metrics),
            *(Route(path, steering.endpoint(action), methods=["POST"]) for path, action in ACTIONS.items()),
            Route(DECISIONS, steering.decisions),
            *([] if live is None else [*live.looking(), live.clear_route(), *site_pages()]),
        ],
        middleware=[
            Middleware(_Counted, metrics=service.metrics, tracing=tracing),
            *([Middleware(_Guarded, api_key=api_key)] if api_key else []),
        ],
        exception_handlers={ApiError: _refused, HTTPException: _no_route, Exception: _Fault(service.metrics)},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


class _Pages:
    """The small endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._entry()]})

    async def model(self, request: Request) -> Response:
        self._service.check_model(request.path_params["name"])
        return JSONResponse(self._entry())

    def _entry(self) -> dict[str, object]:
        facts = self._service.loaded.facts
        return {
            "id": facts.name,
            "object": "model",
            "created": _STARTED_S,
            "owned_by": "tiercel",
            "max_model_len": facts.context_tokens,
            "tiercel": {"exact": not facts.lossy, "lossy": list(facts.lossy)},
        }

    async def health(self, request: Request) -> Response:
        queue = self._service.queue
        waiting, running = queue.depth
        body = {
            "status": "shutting_down" if queue.closing else "ok",
            "model": self._service.loaded.facts.name,
            "waiting": waiting,
            "running": running,
        }
        return JSONResponse(
            body, status_code=HTTPStatus.SERVICE_UNAVAILABLE if queue.closing else HTTPStatus.OK
        )

    async def metrics(self, request: Request) -> Response:
        # The store's lock may be held for a moment; the event loop does not wait for it.
        text = await run_in_threadpool(self._service.metrics.text)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    exchange_of(request.scope).outcome = error.code or ""
    return error.response()


async def _no_route(request: Request, error: Exception) -> Response:
    """A wrong path or method, as Starlette found it."""
    assert isinstance(error, HTTPException)
    path, status = request.url.path[:200], HTTPStatus(error.status_code)
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        accepted = (error.headers or {}).get("Allow", "")
        refusal = ApiError(
            status, f"{path} does not take {request.method}; accepted is {accepted}",
            code="method_not_allowed", headers=error.headers,
        )  # fmt: skip
    elif status is HTTPStatus.NOT_FOUND:
        refusal = ApiError(
            status, f"there is no {path} here; accepted are {', '.join(PATHS)}", code="unknown_url"
        )
    else:
        refusal = ApiError(status, str(error.detail), code="http_error", headers=error.headers)
    exchange_of(request.scope).outcome = refusal.code or ""
    return refusal.response()


class _Fault:
    """The answer to a fault of ours."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def __call__(self, request: Request, error: Exception) -> Response:
        self._metrics.faults.inc()
        _log.error("internal fault: %s", place_of(error), extra={"kind": place_of(error)})
        # What answers here stands outside of what gives every other answer its id.
        response = faults.internal().response()
        response.headers[_ID_HEADER] = exchange_of(request.scope).request_id
        return response


class _Counted:
    """Gives every request its id; counts, logs and traces it by endpoint and status when it has ended."""

    def __init__(self, app: ASGIApp, metrics: Metrics, tracing: Tracing | None) -> None:
        self._app, self._metrics, self._tracing = app, metrics, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Paths are the client's to invent; the series of a metric are not.
        exchange = begin(scope, scope["path"] if scope["path"] in PATHS else "other")
        request_id.set(exchange.request_id)

        async def watching(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = int(message["status"])
                own = (_ID_HEADER.encode(), exchange.request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), own]}
            await send(message)

        failed = True
        try:
            await self._app(scope, receive, watching)
            failed = False
        finally:
            exchange.ended_s = time.monotonic()
            lost = HTTPStatus.INTERNAL_SERVER_ERROR if failed else _CLIENT_LEFT
            exchange.status = exchange.status or int(lost)
            self._metrics.requests.labels(exchange.endpoint, str(exchange.status)).inc()
            self._metrics.seconds.labels(exchange.endpoint).observe(exchange.ended_s - exchange.arrived_s)
            # A call of the event loop's own: whatever went wrong in it would not reach the request.
            asyncio.get_running_loop().call_soon(self._tell, exchange)

    def _tell(self, exchange: Exchange) -> None:
        try:
            if self._tracing is not None:
                self._tracing.record(exchange)
        finally:
            exchange.log()


def _for_all(path: str) -> bool:
    return path in _FOR_ALL or path.startswith(_ASSETS)


class _Guarded:
    """Asks for the API key, everywhere but at /health and for the pages' own files."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app, self._expected = app, f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _for_all(scope["path"]):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                exchange_of(scope).outcome = "invalid_api_key"
                refusal = ApiError(
                    HTTPStatus.UNAUTHORIZED,
                    "the API key is missing or wrong; accepted is the header 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
