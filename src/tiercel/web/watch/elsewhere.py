"""A source that is another server's: `tiercel serve`, or a daemon with `--http`. Asked over HTTP.

Reads with the key of the environment; what changes something carries the token of whoever asked, and the
other server judges it. Follows no redirect and uses no proxy: both would carry the token elsewhere.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from http import HTTPStatus
from http.client import HTTPException
from typing import Any

from tiercel import __version__
from tiercel.config.sources import API_KEY_VARIABLE
from tiercel.errors import ConfigError
from tiercel.web.api.faults import SERVER, ApiError
from tiercel.web.watch.steering import Call

_READ_S, _STEER_S = 5.0, 30.0
_ANSWER_BYTES_MAX = 16 << 20


class ServerSource:
    """The server at `url`, such as http://127.0.0.1:8000. Raises ConfigError for what is no URL."""

    def __init__(self, url: str) -> None:
        self._base = url.rstrip("/").removesuffix("/v1")
        if not self._base.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url}: is no URL; accepted: such as http://127.0.0.1:8000")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
        key = os.environ.get(API_KEY_VARIABLE)
        self._own = f"Bearer {key}" if key else ""

    def read(self, *, full: bool) -> dict[str, Any]:
        """See `Source.read`."""
        try:
            status, raw = self._ask("/v1/overview", None, self._own, _READ_S)
        except (OSError, HTTPException, ValueError) as fault:
            return self._away(f"{self._base} cannot be asked: {getattr(fault, 'reason', fault)}")
        told = _object(raw)
        if told is None or not isinstance(told.get("source"), dict):
            return self._away(f"{self._base} answered {status} {_message(told)}".strip())
        told["source"] |= {"where": self._base}
        return told

    def steer(self, call: Call, authorization: str) -> dict[str, Any]:
        """See `Source.steer`."""
        body: dict[str, Any] = {"prefix": call.prefix}
        if call.session:
            body = {"session": call.session} | ({} if call.salt is None else {"cache_salt": call.salt})
        if call.action == "clear":
            body = {"all": True} if call.scope is None else {"scope": call.scope.hex()}
        if call.action == "pin":
            body["ttl"] = f"{call.ttl_s:g}s"
        try:
            raw_body = json.dumps(body).encode()
            status, raw = self._ask(f"/v1/cache/{call.action}", raw_body, authorization, _STEER_S)
        except (OSError, HTTPException, ValueError) as fault:
            raise _unreachable(f"{self._base} cannot be asked: {getattr(fault, 'reason', fault)}") from None
        told = _object(raw)
        if told is None or status != HTTPStatus.OK:
            raise _refusal(status, told, f"{self._base} answered {status}")
        return told

    def metrics(self) -> bytes:
        """See `Source.metrics`."""
        try:
            status, raw = self._ask("/metrics", None, self._own, _READ_S)
        except (OSError, HTTPException, ValueError) as fault:
            raise _unreachable(f"{self._base} cannot be asked: {getattr(fault, 'reason', fault)}") from None
        if status != HTTPStatus.OK:
            raise _unreachable(f"{self._base} answered {status} to /metrics")
        return raw

    def close(self) -> None:
        """See `Source.close`."""

    def _ask(self, path: str, body: bytes | None, authorization: str, wait_s: float) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if authorization:
            headers["Authorization"] = authorization
        asked = urllib.request.Request(f"{self._base}{path}", body, headers)
        try:
            with self._opener.open(asked, timeout=wait_s) as answer:
                return int(answer.status), answer.read(_ANSWER_BYTES_MAX)
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, refusal.read(_ANSWER_BYTES_MAX)

    def _away(self, why: str) -> dict[str, Any]:
        return {
            "source": {"kind": "server", "where": self._base, "up": False, "version": __version__, "why": why}
        }


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect ends as a refusal with its status."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        read = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


def _message(told: dict[str, Any] | None) -> str:
    error = (told or {}).get("error")
    return str(error.get("message", ""))[:200] if isinstance(error, dict) else ""


def _refusal(status: int, told: dict[str, Any] | None, otherwise: str) -> ApiError:
    """The other server's refusal, as our own; what is none becomes a 502."""
    error = (told or {}).get("error")
    if not isinstance(error, dict) or not 400 <= status < 500:
        return _unreachable(_message(told) or otherwise)
    return ApiError(HTTPStatus(status), _message(told) or otherwise, code=str(error.get("code"))[:80])


def _unreachable(why: str) -> ApiError:
    return ApiError(HTTPStatus.BAD_GATEWAY, why, kind=SERVER, code="server_away")
