"""The two endpoints that generate: from a request's body to its answer, whole or as a stream of events.

    body -> checked -> a place in the queue -> tokens -> job -> answer

A client that leaves, a deadline that passes and a server that stops all end the job the same way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from http import HTTPStatus

import msgspec
from starlette.types import Receive, Scope, Send

from tiercel.config import ServeConfig
from tiercel.engines.transformers import Delta, Request
from tiercel.engines.transformers.chunks import Span
from tiercel.errors import RequestError
from tiercel.store.sessions import Sessions
from tiercel.web.api.answers import DONE, Answer, Writer, event
from tiercel.web.api.body import Asked, parse_chat, parse_completion
from tiercel.web.api.engine import Loaded
from tiercel.web.api.exchange import exchange_of
from tiercel.web.api.faults import ApiError, bad, show
from tiercel.web.api.intake import GONE, ClientGone, Intake, client_gone, watched
from tiercel.web.api.job import Job
from tiercel.web.api.metrics import Metrics
from tiercel.web.api.queue import GenerationQueue

_log = logging.getLogger("tiercel.serve")
# A stream's client that reads no more is let go this long after the request's deadline.
_SEND_GRACE_S = 5.0
_EVENTS = b"text/event-stream; charset=utf-8"


class Service:
    """What all requests share: the loaded model, the queue, the figures and the limits."""

    def __init__(self, loaded: Loaded, limits: ServeConfig) -> None:
        self.loaded, self.limits = loaded, limits
        self.metrics = Metrics(loaded.store, limits.queue_requests, loaded.policy, loaded.facts.lossy)
        self.sessions = Sessions()
        self.queue = GenerationQueue(loaded.engine, limits.queue_requests, self.metrics, self.sessions)
        self.intake = Intake(limits.max_body_bytes, limits.queue_requests + 16)
        # Tokenising a long prompt takes a while: beside the engine, not in front of the other clients.
        self._tokenizing = ThreadPoolExecutor(1, "tokenize")

    async def request(self, asked: Asked) -> Request:
        """The engine's request. Raises ApiError."""
        loop = asyncio.get_running_loop()
        try:
            tokens, chunks = await loop.run_in_executor(self._tokenizing, self._tokenize, asked)
        except RequestError as error:
            raise bad(str(error), "messages" if asked.chat else "prompt") from None
        return self._checked(asked, tokens, chunks)

    def _tokenize(self, asked: Asked) -> tuple[list[int], tuple[Span, ...]]:
        separator = asked.hints.chunks
        if separator is None:
            return self._tokens(asked), ()
        self._check_readable(asked)
        if isinstance(asked.prompt, str):
            return self.loaded.engine.cut(asked.prompt, separator)
        if not asked.chat:
            raise bad("tiercel.chunks is a text and the prompt is token ids; accepted is a text", "prompt")
        return self.loaded.engine.cut(_messages(asked), separator)

    def _tokens(self, asked: Asked) -> list[int]:
        self._check_readable(asked)
        if isinstance(asked.prompt, str):
            return self.loaded.engine.encode(asked.prompt)
        if not asked.chat:
            return [one for one in asked.prompt if isinstance(one, int)]
        return self.loaded.engine.chat_prompt(_messages(asked))

    def _check_readable(self, asked: Asked) -> None:
        facts = self.loaded.facts
        if isinstance(asked.prompt, str) and not facts.has_tokenizer:
            raise bad("prompt is a text and the model has no tokenizer; accepted are token ids", "prompt")
        if asked.chat and not facts.chats:
            raise bad("the model has no chat template; use /v1/completions", "messages", "no_chat_template")

    def bring_up(self, request: Request) -> None:
        """Begin to bring what is stored of a request up to RAM while it waits its turn."""

        def begin() -> None:
            chain = self.loaded.engine.chain(request.tokens, request.salt)
            if chain is not None:
                self.loaded.store.prefetch(chain)

        self._tokenizing.submit(begin)

    def _checked(self, asked: Asked, tokens: list[int], chunks: tuple[Span, ...]) -> Request:
        """Raises ApiError for a prompt that the model cannot take."""
        facts, param = self.loaded.facts, "messages" if asked.chat else "prompt"
        if not tokens:
            raise bad(f"{param} comes to no token; accepted is one or more", param)
        if wrong := next((one for one in tokens if not 0 <= one < facts.vocab_tokens), None):
            raise bad(
                f"{param} has the token id {show(wrong)}; accepted are 0 to {facts.vocab_tokens - 1}", param
            )
        if facts.context_tokens is not None and len(tokens) >= facts.context_tokens:
            raise bad(
                f"the prompt has {len(tokens)} tokens; this model's context is {facts.context_tokens}, "
                "at least one of them for the answer",
                param,
                "context_length_exceeded",
            )
        return asked.request(tokens, chunks, self.limits.max_answer_tokens)

    def check_model(self, name: str | None) -> None:
        """Refuse the name of another model; none at all is this one."""
        if name is not None and name != self.loaded.facts.name:
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"model {show(name)} is not here; this server has {show(self.loaded.facts.name)}",
                param="model",
                code="model_not_found",
            )


class Completions:
    """`/v1/chat/completions` if `chat`, else `/v1/completions`, as an ASGI application."""

    def __init__(self, service: Service, *, chat: bool) -> None:
        self._service, self._chat = service, chat
        self._parse = parse_chat if chat else parse_completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises ApiError before anything was sent, and sends it as an event after."""
        service, loop, exchange = self._service, asyncio.get_running_loop(), exchange_of(scope)
        arrived_s, deadline_s = exchange.arrived_s, service.limits.request_deadline_s
        until_s = loop.time() + deadline_s
        try:
            asked = self._parse(await service.intake.body(scope, receive), service.limits.max_answer_tokens)
        except ClientGone:
            return
        service.check_model(asked.sampling.model)
        with service.queue.reserve() as seat:
            job = Job(await service.request(asked), arrived_s)
            seat.submit(job)
        if asked.hints.prefetch:
            service.bring_up(job.request)
        answer = Answer(len(job.request.tokens))
        stop = partial(service.queue.stop, job)
        try:
            async with watched(receive, until_s, deadline_s, stop), aclosing(job.deltas()) as deltas:
                writer = self._writer(asked, exchange.request_id)
                if asked.sampling.stream:
                    await _stream(deltas, answer, writer, send, until_s + _SEND_GRACE_S)
                else:
                    await _whole(deltas, answer, writer, send)
        except ApiError as error:
            if error.code != GONE:
                raise
        finally:
            stop(client_gone(), "disconnect")  # whatever ended this: nothing is left behind
            exchange.generated(job, answer)

    def _writer(self, asked: Asked, request_id: str) -> Writer:
        facts = self._service.loaded.facts
        return Writer(
            chat=self._chat,
            answer_id=f"{'chatcmpl' if self._chat else 'cmpl'}-{request_id}",
            created_s=int(time.time()),
            model=facts.name,
            fingerprint=facts.fingerprint,
            include_usage=asked.include_usage,
            explain=asked.hints.explain,
        )


def _messages(asked: Asked) -> list[Mapping[str, str]]:
    return [one for one in asked.prompt if isinstance(one, Mapping)]


async def _whole(deltas: AsyncGenerator[Delta], answer: Answer, writer: Writer, send: Send) -> None:
    async for delta in deltas:
        answer.add(delta)
    body = msgspec.json.encode(writer.whole(answer))
    await _start(send, b"application/json", (b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.body", "body": body})


async def _stream(
    deltas: AsyncGenerator[Delta], answer: Answer, writer: Writer, send: Send, send_until_s: float
) -> None:
    """Nothing is sent before the first token, so that whatever fails until then has its own HTTP status."""

    async def put(data: bytes, more: bool = True) -> None:
        # A client that reads no more would hold its connection for ever.
        async with asyncio.timeout_at(send_until_s):
            await send({"type": "http.response.body", "body": data, "more_body": more})

    started = False
    try:
        async for delta in deltas:
            answer.add(delta)
            if not started:
                started = True
                await _start(send, _EVENTS, (b"cache-control", b"no-cache"))
                for chunk in writer.first():
                    await put(event(chunk))
            for chunk in writer.more(delta, answer):
                await put(event(chunk))
        for chunk in writer.last(answer):
            await put(event(chunk))
        await put(DONE, more=False)
    except ApiError as error:
        if not started or error.code == GONE:
            raise
        await put(event(error.body()), more=False)
    except TimeoutError:
        _log.warning("a client stopped reading its stream; its connection is closed")


async def _start(send: Send, kind: bytes, *more: tuple[bytes, bytes]) -> None:
    headers = [(b"content-type", kind), *more]
    await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": headers})
