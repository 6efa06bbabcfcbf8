"""The endpoints under /v1/cache: bring a prompt up, keep it, put it away, forget it, tell what was decided.

    body -> the prompt's blocks, by its tokens or its session -> one call to the store, on a thread of its own

`warm` alone computes, and waits in the queue like any request. Neither prompts nor tokens go back to clients.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

import msgspec
from starlette.requests import HTTPConnection
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tiercel.blocks import Chain
from tiercel.errors import RequestError
from tiercel.store.policy import as_json
from tiercel.store.sessions import tenant_of
from tiercel.web.api.body import Target, parse_target
from tiercel.web.api.bounds import AtMost
from tiercel.web.api.completions import Service
from tiercel.web.api.faults import ApiError, bad, no_session, show
from tiercel.web.api.intake import GONE, ClientGone, client_gone, watched
from tiercel.web.api.job import Job
from tiercel.web.watch.endpoints import Endpoints
from tiercel.web.watch.sources import steered_prompt
from tiercel.web.watch.steering import ON_PREFIX, names_prefix

_DEADLINE_S = 10.0
_THREADS, _AT_ONCE_MAX = 4, 64
_DECISIONS_SHOWN = 20
_DECISIONS_MAX = 256


class Steering:
    """`POST /v1/cache/ACTION`, as an ASGI application each."""

    def __init__(self, service: Service, live: Endpoints | None = None) -> None:
        self._service, self._live = service, live
        self._threads = ThreadPoolExecutor(_THREADS, "steer")
        self._calls = AtMost(_AT_ONCE_MAX, "too many calls are under way")

    def endpoint(self, action: str) -> Endpoint:
        """What answers /v1/cache/ACTION."""
        return Endpoint(self, action)

    async def decisions(self, request: HttpRequest) -> Response:
        """`GET /v1/cache/decisions`: what was decided lately, the latest first. Raises ApiError."""
        given = request.query_params.get("limit", str(_DECISIONS_SHOWN))
        if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= _DECISIONS_MAX):
            raise bad(f"limit is {show(given)}; accepted is 1 to {_DECISIONS_MAX}", "limit")
        kept = self._service.loaded.store.decisions(int(given))
        body = msgspec.json.encode({"object": "list", "data": [as_json(one) for one in kept]})
        return Response(body, media_type="application/json")

    async def answer(self, action: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call. Raises ApiError."""
        arrived_s = time.monotonic()
        by_session = action not in ("warm", "explain")
        try:
            raw = await self._service.intake.body(scope, receive)
        except ClientGone:
            return
        if self._live is not None and action in ON_PREFIX and names_prefix(raw):
            # A prefix is anybody's, where a prompt or a session is known to who asks: it needs the token.
            told = await self._live.on_prefix(action, raw, HTTPConnection(scope))
            await JSONResponse(told)(scope, receive, send)
            return
        target = parse_target(raw, ttl=action == "pin", session=by_session)
        self._service.check_model(target.model)
        body: dict[str, Any] | None
        if action == "explain":
            body = await self._explain(target)
        elif action == "warm":
            body = await self._warm(target, arrived_s, receive)
        else:
            body = await self._steer(action, target)
        if body is not None:
            await JSONResponse(body)(scope, receive, send)

    async def _steer(self, action: str, target: Target) -> dict[str, Any]:
        # Whoever has just got an answer and puts it away means all of it.
        with suppress(TimeoutError):
            async with asyncio.timeout(_DEADLINE_S):
                for job in self._service.queue.settling:
                    await job.ended.wait()
        chain = self._known(target) if target.asked is None else await self._named(target)
        store = self._service.loaded.store
        done = await self._aside(partial(steered_prompt, store, action, chain, target.ttl_s))
        if action == "drop" and target.session is not None:
            self._service.sessions.note(tenant_of(target.salt), target.session, ())
        return _shown(action, chain, done)

    async def _explain(self, target: Target) -> dict[str, Any]:
        tokens = await self._tokens(target)
        explain = self._service.loaded.engine.explain
        return as_json(await self._aside(partial(explain, tokens, salt=target.salt)))

    async def _warm(self, target: Target, arrived_s: float, receive: Receive) -> dict[str, Any] | None:
        """Compute a prompt and keep its blocks; None when the client left meanwhile."""
        service, loop = self._service, asyncio.get_running_loop()
        deadline_s = service.limits.request_deadline_s
        until_s = loop.time() + deadline_s
        chain = await self._named(target)
        with service.queue.reserve() as seat:
            job = Job(await self._request(target), arrived_s)
            seat.submit(job)
        stop = partial(service.queue.stop, job)
        try:
            async with watched(receive, until_s, deadline_s, stop), aclosing(job.deltas()) as deltas:
                async for _ in deltas:
                    pass
                await job.ended.wait()
        except ApiError as error:
            if error.code != GONE:
                raise
            return None
        finally:
            stop(client_gone(), "disconnect")
        hit = await self._aside(partial(service.loaded.store.lookup, chain, 0.0))
        return _shown("warm", chain, hit.blocks)

    async def _request(self, target: Target) -> Any:
        assert target.asked is not None
        return await self._service.request(target.asked)

    async def _tokens(self, target: Target) -> list[int]:
        return list((await self._request(target)).tokens)

    async def _named(self, target: Target) -> Chain:
        try:
            chain = self._service.loaded.engine.chain(await self._tokens(target), target.salt)
        except RequestError as error:
            raise bad(str(error)) from None
        return self._there(chain)

    def _known(self, target: Target) -> Chain:
        assert target.session is not None
        chains = self._service.sessions.chains(tenant_of(target.salt), target.session)
        if not chains:
            raise no_session(target.session)
        return chains[0]

    @staticmethod
    def _there(chain: Chain | None) -> Chain:
        if chain is None:
            raise bad("this server has no store", code="no_store")
        return chain

    async def _aside(self, call: Callable[[], Any]) -> Any:
        """Make a call that may wait, beside the event loop."""
        with self._calls.one_more():
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)


class Endpoint:
    """One action, as an ASGI application."""

    def __init__(self, steering: Steering, action: str) -> None:
        self._steering, self._action = steering, action

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._steering.answer(self._action, scope, receive, send)


def _shown(action: str, chain: Chain, done: int) -> dict[str, Any]:
    return {"object": "cache", "action": action, "blocks": len(chain), "done": done}
