"""How the site's files are answered: pages, assets, and the headers that keep foreign code out."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tiercel.web import assets

# Scripts and styles of ours, and nothing else: no inline code, no other host, no frame around us.
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page(name: str) -> Response:
    """One of `assets.PAGES`."""
    return Response(assets.text(name), media_type=assets.kind(name), headers=HEADERS)


def script(source: str) -> Response:
    """A script that is made from code."""
    return Response(source, media_type="text/javascript", headers=HEADERS)


async def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in assets.FILES:
        return Response("not found\n", 404, media_type="text/plain", headers=HEADERS)
    return Response(assets.text(name), media_type=assets.kind(name), headers=HEADERS)


def asset_route() -> Route:
    """`/assets/NAME`. A script that is made from code has a route of its own, in front of this one."""
    return Route("/assets/{name:path}", _asset)
