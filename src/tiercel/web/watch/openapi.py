"""The OpenAPI description of the figures and of what steers them; tests hold the answers against it."""

from __future__ import annotations

from typing import Any

from tiercel import __version__
from tiercel.web.watch.history import SAMPLES_MAX
from tiercel.web.watch.steering import ACTIONS, PREFIX_CHARS, SCOPE_CHARS

_WORDS = {
    "prefetch": "Bring a prefix up to RAM.",
    "pin": "Keep a prefix from eviction for a time.",
    "unpin": "End a prefix' pins.",
    "demote": "Write a prefix' own blocks down and free their RAM.",
    "drop": "Forget a prefix, but for what others share, and what follows it.",
    "clear": "Forget all blocks of a scope, or of all scopes.",
}
_DONE_WORDS = "How many of the prefix' or session's blocks that was done with."
_PREFIX = {
    "type": "string", "pattern": f"^[0-9a-f]{{{PREFIX_CHARS}}}$", "description": "As /v1/overview shows it."
}  # fmt: skip
_SCOPE = {"type": "string", "pattern": f"^[0-9a-f]{{{SCOPE_CHARS}}}$", "description": "A scope's tag."}
_SESSION = {
    "type": "string", "pattern": "^[ -~]{1,256}$", "description": "The name that requests gave themselves.",
}  # fmt: skip
_SALT = {
    "type": "string", "minLength": 1, "maxLength": 256, "description": "The salt of the session's requests.",
}  # fmt: skip
_SOURCE = {
    "type": "object",
    "required": ["kind", "where", "up", "version", "epoch"],
    "properties": {
        "kind": {"type": "string", "enum": ["daemon", "server", "demo"]},
        "where": {"type": "string"},
        "up": {"type": "boolean", "description": "Whether the store answers."},
        "why": {"type": "string", "description": "Why not."},
        "version": {"type": "string"},
        "epoch": {"type": "integer", "description": "Another one: totals began anew."},
    },
}
_COUNTS = {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}}


def description() -> dict[str, Any]:
    """The description, as plain data."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tiercel: figures and steering",
            "version": __version__,
            "description": "What a store does, as the dashboard shows it. No prompt's text and no token id.",
        },
        "paths": {
            "/v1/overview": {"get": _get("overview", "What a person looks at.", "Overview", away=True)},
            "/v1/overview/stream": {"get": _stream()},
            "/v1/history": {"get": _history()},
            "/metrics": {"get": _metrics()},
            "/openapi.json": {"get": _get("describe", "This description.", None)},
            **{f"/v1/cache/{action}": {"post": _post(action)} for action in ACTIONS},
        },
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Overview": _overview(), "History": _columns(), "Done": _done(), "Error": _error()},
        },
    }


def _answer(words: str, schema: dict[str, Any], kind: str = "application/json") -> dict[str, Any]:
    return {"description": words, "content": {kind: {"schema": schema}}}


def _refusal(words: str) -> dict[str, Any]:
    return _answer(words, {"$ref": "#/components/schemas/Error"})


# What every address may answer: a Host that is not ours, no token where reading needs one, a fault of ours.
_ALWAYS = {
    "401": _refusal("The token is missing or wrong."),
    "421": _refusal("The Host is not this server's."),
    "500": _refusal("A fault of the server; its log says where."),
}


def _get(name: str, words: str, schema: str | None, *, away: bool = False) -> dict[str, Any]:
    told = {"type": "object"} if schema is None else {"$ref": f"#/components/schemas/{schema}"}
    answers = {"200": _answer(words, told), **_ALWAYS}
    if away:
        answers["503"] = _answer("The store does not answer; `source.why` says more.", told)
    return {"operationId": name, "summary": words, "responses": answers}


def _stream() -> dict[str, Any]:
    words = "The overview about once a second, as server-sent events whose data is its JSON."
    answers = {
        "200": _answer(words, {"type": "string"}, "text/event-stream"),
        "429": _refusal("As many streams are open as may be."), **_ALWAYS,
    }  # fmt: skip
    return {"operationId": "stream", "summary": words, "responses": answers}


def _history() -> dict[str, Any]:
    points = {
        "name": "points", "in": "query", "description": "Most samples to tell.",
        "schema": {"type": "integer", "minimum": 1, "maximum": SAMPLES_MAX, "default": 360},
    }  # fmt: skip
    words = "Totals of the last hour, every two seconds, by column."
    return _get("history", words, "History") | {
        "parameters": [points],
        "responses": {
            "200": _answer(words, {"$ref": "#/components/schemas/History"}),
            "400": _refusal("points is no such number."), **_ALWAYS,
        },
    }  # fmt: skip


def _metrics() -> dict[str, Any]:
    words = "The figures for Prometheus."
    answers = {
        "200": _answer(words, {"type": "string"}, "text/plain"),
        "502": _refusal("The server that is watched does not answer."),
        "503": _refusal("The store does not answer."), **_ALWAYS,
    }  # fmt: skip
    return {"operationId": "metrics", "summary": words, "responses": answers}


def _post(action: str) -> dict[str, Any]:
    ttl = {"type": "string", "enum": ["30s", "10m", "1h", "24h"], "description": "Any time up to 24h."}
    more = {"ttl": ttl} if action == "pin" else {}
    by_prefix = {
        "type": "object", "required": ["prefix"], "properties": {"prefix": _PREFIX} | more,
        "additionalProperties": False,
    }  # fmt: skip
    by_session = {
        "type": "object", "required": ["session"],
        "properties": {"session": _SESSION, "cache_salt": _SALT} | more, "additionalProperties": False,
    }  # fmt: skip
    body: dict[str, Any] = {"oneOf": [by_prefix, by_session]}
    if action == "clear":
        one_scope = {
            "type": "object", "required": ["scope"], "properties": {"scope": _SCOPE},
            "additionalProperties": False,
        }  # fmt: skip
        everything = {
            "type": "object", "required": ["all"], "properties": {"all": {"const": True}},
            "additionalProperties": False,
        }  # fmt: skip
        body = {"oneOf": [one_scope, everything]}
    return {
        "operationId": action,
        "summary": _WORDS[action],
        "security": [{"token": []}],
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": _answer(_WORDS[action], {"$ref": "#/components/schemas/Done"}),
            "400": _refusal("The body is not what is accepted."),
            "404": _refusal("The prefix or session is not known here, or no more."),
            "408": _refusal("The body did not arrive in time."),
            "413": _refusal("The body is too large."),
            "415": _refusal("The body is not JSON."),
            "429": _refusal("Too much is under way."),
            "502": _refusal("The server that is watched does not answer."),
            "503": _refusal("The store does not answer."),
            **_ALWAYS,
        },
    }  # fmt: skip


def _overview() -> dict[str, Any]:
    scope = {
        "type": "object", "required": ["tag", "model", "adapter", "salt", "blocks", "nbytes"],
        "properties": {
            "tag": _SCOPE, "model": {"type": "string"}, "adapter": {"type": "string"},
            "salt": {"type": "string", "description": "A short digest of the tenant's salt."},
            "blocks": _COUNTS, "nbytes": _COUNTS,
        },
    }  # fmt: skip
    prefix = {
        "type": "object",
        "required": ["prefix", "parent", "tag", "level", "start", "length", "blocks", "nbytes"],
        "properties": {
            "prefix": _PREFIX, "parent": {"type": "string"}, "tag": _SCOPE,
            "level": {"type": "integer", "minimum": 0}, "start": {"type": "integer", "minimum": 0},
            "length": {"type": "integer", "minimum": 1}, "blocks": _COUNTS, "nbytes": _COUNTS,
        },
    }  # fmt: skip
    fault = {
        "type": "object", "required": ["kind", "tier", "text", "count", "at_s"],
        "properties": {"count": {"type": "integer", "minimum": 1}, "at_s": {"type": "number"}},
    }  # fmt: skip
    return {
        "type": "object",
        "required": ["source", "at_s"],
        "properties": {
            "source": _SOURCE,
            "at_s": {"type": "number", "description": "Unix time."},
            "stats": {"type": "object", "description": "Absent while no engine has opened the store."},
            "scopes": {"type": "array", "items": scope},
            "more_scopes": {"type": "integer", "minimum": 0},
            "prefixes": {"type": "array", "items": prefix},
            "faults": {"type": "array", "items": fault},
            "decisions": {"type": "array", "items": {"type": "object", "required": ["reason"]}},
        },
    }


def _columns() -> dict[str, Any]:
    numbers = {"type": "array", "items": {"type": ["number", "null"]}}
    table = {"type": "object", "additionalProperties": numbers}
    return {
        "type": "object",
        "required": ["every_s", "at_s", "epoch", "totals", "places"],
        "properties": {
            "every_s": {"type": "number"},
            "at_s": {"type": "array", "items": {"type": "number"}},
            "epoch": {"type": "array", "items": {"type": "integer"}},
            "totals": table,
            "places": {"type": "object", "additionalProperties": table},
        },
    }


def _done() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["object", "action", "blocks", "done"],
        "properties": {
            "object": {"const": "cache"}, "action": {"type": "string", "enum": list(ACTIONS)},
            "blocks": {"type": "integer", "minimum": 0},
            "done": {"type": "integer", "minimum": 0, "description": _DONE_WORDS},
        },
    }  # fmt: skip


def _error() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"}, "type": {"type": "string"},
                    "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]},
                },
            }
        },
    }  # fmt: skip
