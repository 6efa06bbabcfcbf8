"""What a body may ask to be done with a prefix or a scope that the page shows, checked field by field."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from tiercel.blocks import TAG_BYTES
from tiercel.store.policy.hints import HintError, parse_ttl
from tiercel.web.api.faults import bad, show

ON_PREFIX = ("prefetch", "pin", "unpin", "demote", "drop")
ACTIONS = (*ON_PREFIX, "clear")
BODY_BYTES_MAX = 4096
PREFIX_CHARS = 12
SCOPE_CHARS = 2 * TAG_BYTES
_HEX = re.compile(r"(?:[0-9a-f]{2})+")
_TTL = "10m"


@dataclass(frozen=True, slots=True)
class Call:
    """One action: on the prefix that is called `prefix`, or for `clear` on a scope's tag (None: on all)."""

    action: str
    prefix: str = ""
    scope: bytes | None = None
    ttl_s: float = 0.0


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
    fields = {"clear": ("scope", "all"), "pin": ("prefix", "ttl")}.get(action, ("prefix",))
    for name in given:
        if name not in fields:
            raise bad(
                f"{show(name)} is not a known field of {action}; accepted: {', '.join(fields)}",
                name[:80], "unknown_parameter",
            )  # fmt: skip
    if action == "clear":
        return _clear(given)
    prefix = _hex(given, "prefix", PREFIX_CHARS)
    try:
        ttl_s = parse_ttl(given.get("ttl", _TTL), "ttl") if action == "pin" else 0.0
    except HintError as error:
        raise bad(str(error), "ttl") from None
    return Call(action, prefix, ttl_s=ttl_s)


def _clear(given: dict[str, Any]) -> Call:
    everything = given.get("all", False)
    if not isinstance(everything, bool):
        raise bad(f"all is {show(everything)}; accepted is true", "all")
    if everything == ("scope" in given):
        raise bad("accepted is one of scope and all: true", "scope", "missing_required_parameter")
    return Call("clear", scope=None if everything else bytes.fromhex(_hex(given, "scope", SCOPE_CHARS)))


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
