"""What a client is told when a request cannot be served: an HTTP status and OpenAI's error object.

    {"error": {"message": one line, "type": ..., "param": the field or null, "code": ...}}

Never a traceback, and never more of the prompt than the client's own offending value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus

from starlette.responses import JSONResponse

_SHOWN_CHARS_MAX = 80

INVALID = "invalid_request_error"
SERVER = "server_error"


class ApiError(Exception):
    """One refused or failed request, as the client is told about it."""

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.message = " ".join(message.split())
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        """The error object of a response body or of an event of a stream."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole response."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def bad(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A 400 for the field `param`."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def too_busy(what: str, code: str = "queue_full", retry_s: int = 1) -> ApiError:
    """A 429: `what` there is too much of already."""
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS,
        f"{what}; try again in {retry_s} s",
        kind="rate_limit_error",
        code=code,
        headers={"Retry-After": str(retry_s)},
    )


def no_session(session: str) -> ApiError:
    """A 404: whoever asks does not know this session."""
    return ApiError(
        HTTPStatus.NOT_FOUND,
        f"session {show(session)} is not known here, or not with this cache_salt; accepted is one that a "
        "request named within 24 hours",
        param="session",
        code="session_not_found",
    )


def internal() -> ApiError:
    """A 500: a fault of ours, of which the client learns nothing but that."""
    return ApiError(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "the server failed to answer this request; its log says where",
        kind=SERVER,
        code="internal_error",
    )


def shutting_down() -> ApiError:
    """A 503: the server has been told to stop."""
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "the server is shutting down",
        kind=SERVER,
        code="shutting_down",
        headers={"Retry-After": "5"},
    )


def too_late(deadline_s: float) -> ApiError:
    """A 504: the request's deadline passed, in the queue or while it was answered."""
    return ApiError(
        HTTPStatus.GATEWAY_TIMEOUT,
        f"the request took longer than the {deadline_s:g} s it is allowed (serve.request_deadline)",
        kind=SERVER,
        code="deadline_exceeded",
    )


def show(value: object) -> str:
    """A value from a body for an error message: JSON, cut short."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):  # an integer too long to print, or a very deep list
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS_MAX else text[: _SHOWN_CHARS_MAX - 3] + "..."
