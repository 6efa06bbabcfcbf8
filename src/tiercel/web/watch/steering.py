"""What a body may ask to be done with a prefix or a scope that the page shows, checked field by field."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from tiercel.blocks import TAG_BYTES
from tiercel.store.policy.hints import HintError, parse_session, parse_ttl
from tiercel.web.api.faults import bad, show

ON_PREFIX = ("prefetch", "pin", "unpin", "demote", "drop")
ACTIONS = (*ON_PREFIX, "clear")
BODY_BYTES_MAX = 4096
PREFIX_CHARS = 12
SCOPE_CHARS = 2 * TAG_BYTES
_HEX = re.compile(r"(?:[0-9a-f]{2})+")
_TTL = "10m"
# Longer ones do not fit a body here; the command line takes them.
_SALT_CHARS_MAX = 256


@dataclass(frozen=True, slots=True)
class Call:
    """One action: on the prefix called `prefix`, on what a tenant's `session` left, for `clear` on a scope.

    `scope` is its tag; None: on all.
    """

    action: str
    prefix: str = ""
    scope: bytes | None = None
    ttl_s: float = 0.0
    session: str = ""
    salt: str | None = field(default=None, repr=False)


def names_prefix(raw: bytes) -> bool:
    """Whether a body is one of ours, for a server that also takes prompts and sessions."""
    if len(raw) > BODY_BYTES_MAX or b"prefix" not in raw:
        return False
    try:
        given = json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return isinstance(given, dict) and "prefix" in given


def parse_call(action: str, raw: bytes) -> Call:
    """The call a body asks for. Raises ApiError."""
    given = _object(raw)
    fields = ("scope", "all") if action == "clear" else ("prefix", "session", "cache_salt")
    fields = (*fields, "ttl") if action == "pin" else fields
    for name in given:
        if name not in fields:
            raise bad(
                f"{show(name)} is not a known field of {action}; accepted: {', '.join(fields)}",
                name[:80], "unknown_parameter",
            )  # fmt: skip
    if action == "clear":
        return _clear(given)
    try:
        ttl_s = parse_ttl(given.get("ttl", _TTL), "ttl") if action == "pin" else 0.0
        if "session" in given:
            session = parse_session(given["session"], "session")
            return Call(action, ttl_s=ttl_s, session=session, salt=_salt(given))
    except HintError as error:
        raise bad(str(error), error.param) from None
    if "cache_salt" in given:
        raise bad("cache_salt goes with a session, and none is given", "cache_salt")
    return Call(action, _hex(given, "prefix", PREFIX_CHARS), ttl_s=ttl_s)


def _clear(given: dict[str, Any]) -> Call:
    everything = given.get("all", False)
    if not isinstance(everything, bool):
        raise bad(f"all is {show(everything)}; accepted is true", "all")
    if everything == ("scope" in given):
        raise bad("accepted is one of scope and all: true", "scope", "missing_required_parameter")
    return Call("clear", scope=None if everything else bytes.fromhex(_hex(given, "scope", SCOPE_CHARS)))


def _salt(given: dict[str, Any]) -> str | None:
    if "prefix" in given:
        raise bad("accepted is one of prefix and session", "prefix")
    salt = given.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= _SALT_CHARS_MAX):
        raise bad(f"cache_salt is not a text of 1 to {_SALT_CHARS_MAX} characters", "cache_salt")
    return salt


def _object(raw: bytes) -> dict[str, Any]:
    try:
        given = json.loads(raw)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise bad("the body is no JSON object", code="invalid_json")
    return given


def _hex(given: dict[str, Any], name: str, chars: int) -> str:
    if name not in given:
        raise bad(f"{name} is missing", name, "missing_required_parameter")
    text = given[name]
    if not (isinstance(text, str) and len(text) == chars and _HEX.fullmatch(text)):
        raise bad(f"{name} is {show(text)}; accepted are {chars} hexadecimal digits, as on the page", name)
    return text
