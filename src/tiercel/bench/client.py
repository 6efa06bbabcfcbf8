"""One OpenAI-compatible server, asked over HTTP: streamed answers with their times, its model, its figures.

Every call has a deadline and ends as a value, whatever the server does. The key goes into a header and
nowhere else; texts go nowhere.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from tiercel.bench.stream import Heard, StreamFault, error_text
from tiercel.errors import ConfigError

_REFUSAL_BYTES_MAX = 64 << 10
_FIGURES_BYTES_MAX = 16 << 20
# What is not a request of the workload: the list of models, figures.
_CALL_S = 10.0
# Shorter than any server keeps an idle connection, so that none is closed under a request.
_KEEP_ALIVE_S = 1.0
_DRAIN_S = 1.0
_URL = re.compile(r"https?://[^\s/]+")


def checked_url(flag: str, url: str) -> str:
    """`url` without a trailing slash or `/v1`. Raises ConfigError for what is no URL."""
    base = url.rstrip("/").removesuffix("/v1")
    try:
        good = bool(_URL.match(base)) and bool(httpx.URL(base).host)
    except httpx.InvalidURL:
        good = False
    if good and httpx.URL(base).userinfo:
        raise ConfigError(f"{flag}: holds a password; accepted: a URL without, the key in TIERCEL_API_KEY")
    if not good:
        raise ConfigError(f"{flag} {url}: is no URL; accepted: such as http://127.0.0.1:8000")
    return base


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a request. Times on the monotonic clock; `fault` is empty when it was answered.

    `gone`: nobody listens there. `said` is the server's own word on a refusal.
    """

    sent_s: float
    end_s: float
    heard: Heard
    fault: str = ""
    said: str = ""
    gone: bool = False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a server says of its model."""

    name: str
    context_tokens: int | None


class Client:
    """Asks one server, as often at once as it is called. Use it as an asynchronous context."""

    def __init__(
        self, url: str, model: str | None, api_key: str | None, extra: Mapping[str, Any] | None = None
    ) -> None:
        self.url, self.model = url, model
        self._extra = dict(extra or {})
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # No proxy of the environment: it would be asked for this host's own addresses too.
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=None,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEP_ALIVE_S),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def ask(self, messages: Sequence[Mapping[str, str]], tokens_max: int, deadline_s: float) -> Reply:
        """Send one conversation and hear the answer out, for `deadline_s` at most."""
        body = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": tokens_max,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        heard, said, sent_s = Heard(tokens_max), "", time.monotonic()
        fault, gone = "", False
        try:
            async with asyncio.timeout(deadline_s) as limit:
                said = await self._hear(body, heard, limit)
            heard.end()
        except TimeoutError:
            fault = "" if heard.done else "deadline"
        except StreamFault as wrong:
            fault = str(wrong)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            fault, gone = "no connection", True
        except httpx.HTTPError:
            # A server that has sent its last word may close as it likes.
            fault = "" if heard.done else "broken off"
        except _Refused as refusal:
            fault, said = f"HTTP {refusal.status}", refusal.said
        return Reply(sent_s, time.monotonic(), heard, fault, said, gone)

    async def _hear(self, body: Mapping[str, Any], heard: Heard, limit: asyncio.Timeout) -> str:
        async with self._http.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise _Refused(response.status_code, error_text(await _some(response, _REFUSAL_BYTES_MAX)))
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise StreamFault("no stream")
            async for piece in response.aiter_bytes():
                was_done = heard.done
                heard.feed(piece, time.monotonic())
                if heard.done and not was_done:
                    # The answer is here; wait a little for the end, so that the server sees no client leave.
                    limit.reschedule(asyncio.get_running_loop().time() + _DRAIN_S)
        return ""

    async def model_info(self) -> ModelInfo:
        """The server's model: the one named, else the first it lists. Raises ConfigError if it tells none."""
        listed = await self._get("/v1/models", _FIGURES_BYTES_MAX)
        try:
            found = msgspec.json.decode(listed or b"", type=_Models).data
        except (msgspec.DecodeError, UnicodeDecodeError):
            found = []
        for one in found:
            if self.model in (None, one.id):
                return ModelInfo(one.id, one.max_model_len)
        if self.model is not None:
            return ModelInfo(self.model, None)
        raise ConfigError(
            f"{self.url}: lists no model at /v1/models; accepted: an OpenAI-compatible server, or --name"
        )

    async def has(self, path: str) -> bool:
        """Whether the server has something at `path`."""
        return await self._get(path, _FIGURES_BYTES_MAX) is not None

    async def figures(self) -> str:
        """The server's `/metrics` page; empty if it has none."""
        raw = await self._get("/metrics", _FIGURES_BYTES_MAX)
        return "" if raw is None else raw.decode("utf-8", "replace")

    async def _get(self, path: str, bytes_max: int) -> bytes | None:
        try:
            async with asyncio.timeout(_CALL_S), self._http.stream("GET", f"{self.url}{path}") as response:
                if response.status_code != httpx.codes.OK:
                    return None
                return await _some(response, bytes_max)
        except (TimeoutError, httpx.HTTPError):
            return None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Refused(Exception):
    """The server answered with another status than 200."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(status)
        self.status, self.said = status, said


async def _some(response: httpx.Response, bytes_max: int) -> bytes:
    """The body, or its first `bytes_max` bytes."""
    found = b""
    async for piece in response.aiter_bytes():
        found += piece
        if len(found) >= bytes_max:
            break
    return found[:bytes_max]
