"""The site as an application: the live page and its figures, the planner, or the planner alone.

Whatever goes wrong ends as an error object; only its kind and place reach a log.
"""

from __future__ import annotations

import logging
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tiercel.service.logs import place_of
from tiercel.web import site
from tiercel.web.api import faults
from tiercel.web.api.faults import ApiError
from tiercel.web.planner.routes import routes as planner_routes
from tiercel.web.watch.endpoints import Endpoints
from tiercel.web.watch.guard import Guard
from tiercel.web.watch.watch import Watch

_log = logging.getLogger("tiercel")


def pages() -> list[Route]:
    """Both pages and their files: no figures in them, so they are for everybody."""

    async def live(request: Request) -> Response:
        return site.page("live.html")

    return [Route("/", live), *planner_routes(live=True), site.asset_route()]


def make_site(watch: Watch, guard: Guard) -> Starlette:
    """The site over one watch."""
    endpoints = Endpoints(watch, guard)
    return _application([*pages(), *endpoints.looking(), endpoints.metrics_route(), *endpoints.steering()])


def make_planner() -> Starlette:
    """The planner alone, where there is nothing to watch."""

    async def to_the_planner(request: Request) -> Response:
        return RedirectResponse("plan")

    return _application([Route("/", to_the_planner), *planner_routes(live=False), site.asset_route()])


def _application(routes: list[Route]) -> Starlette:
    handlers = {ApiError: _refused, HTTPException: _no_route, Exception: _fault}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    response = error.response()
    response.headers.update(site.HEADERS)
    return response


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, status = request.url.path[:200], HTTPStatus(error.status_code)
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        message, code = f"{path} does not take {request.method}", "method_not_allowed"
    elif status is HTTPStatus.NOT_FOUND:
        message, code = f"there is no {path} here; /openapi.json says what is", "unknown_url"
    else:
        message, code = str(error.detail), "http_error"
    return await _refused(request, ApiError(status, message, code=code, headers=error.headers))


async def _fault(request: Request, error: Exception) -> Response:
    _log.error("internal fault: %s", place_of(error), extra={"kind": place_of(error)})
    return await _refused(request, faults.internal())
