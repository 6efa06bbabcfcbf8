"""What a request may say about its own cache use, in one small object that every engine's API carries alike.

    {"no_store": true, "no_load": true, "pin": "10m", "priority": "low", "prefetch": true,
     "session": "agent-7", "explain": true, "chunks": "\n###\n"}

Checked here once, so that a misspelt hint is refused wherever it is given; where nothing can be refused, it
is left out and told of. Does nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiercel.config import parse_seconds
from tiercel.errors import ConfigError, RequestError
from tiercel.store.policy.admission import Sight

PIN_S_MAX = 86400.0
SESSION_CHARS_MAX = 256
_SHOWN_CHARS_MAX = 80
_FLAGS = ("no_store", "no_load", "prefetch", "explain")
_FIELDS = ("no_store", "no_load", "pin", "priority", "prefetch", "session", "explain", "chunks")
# What is larger is refused unread: under vLLM the scheduler waits for this.
_GIVEN_MAX = 32
_TTL_CHARS_MAX = 64
_SEPARATOR_CHARS_MAX = 64
_INT_BITS_MAX = 256


class HintError(RequestError):
    """A hint that is not one; `param` is the path of the field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param} {message}")
        self.param = param


@dataclass(frozen=True, slots=True)
class Hints:
    """Checked hints. `store` False keeps nothing of the request, `load` False reuses nothing for it.

    `pin_s` above 0 keeps its blocks from eviction for so long; those of a `low` one go first. `prefetch`
    brings what is stored of it up to RAM while it waits its turn. `session` is a name under which prefetch,
    demote and drop find what the last request of a conversation left. `chunks` is the text that stands around
    and between the prompt's chunks, such as documents; it stays in the prompt. `sure`, which no request can
    say of itself, stores at once whatever the admission policy is.
    """

    store: bool = True
    load: bool = True
    pin_s: float = 0.0
    low: bool = False
    prefetch: bool = False
    session: str | None = None
    explain: bool = False
    chunks: str | None = None
    sure: bool = False

    def sight(self, otherwise: Sight = Sight.NEW) -> Sight:
        """What these hints say of blocks to store; `otherwise` if they say nothing of it."""
        if self.pin_s or self.sure:
            return Sight.SURE
        return Sight.LOW if self.low else otherwise


def parse_hints(given: object, where: str = "tiercel") -> Hints:
    """The hints in a decoded JSON value; None is no hints. `where` names the field. Raises HintError."""
    told = _told(given, where)
    for name in told:
        if name not in _FIELDS:
            near = difflib.get_close_matches(name[:100], _FIELDS, n=1) if isinstance(name, str) else []
            hint = f"did you mean {near[0]}?" if near else f"accepted are {', '.join(_FIELDS)}"
            raise HintError(f"{where}.{_show(name)}", f"is not a known hint; {hint}")
    for name in _FLAGS:
        if not isinstance(told.get(name, False), bool):
            raise HintError(f"{where}.{name}", f"is {_show(told[name])}; accepted is true or false")
    return Hints(
        store=not told.get("no_store", False),
        load=not told.get("no_load", False),
        pin_s=parse_ttl(told["pin"], f"{where}.pin") if "pin" in told else 0.0,
        low="priority" in told and _is_low(told["priority"], f"{where}.priority"),
        prefetch=told.get("prefetch", False),
        session=parse_session(told["session"], f"{where}.session") if "session" in told else None,
        explain=told.get("explain", False),
        chunks=_separator(told["chunks"], f"{where}.chunks") if "chunks" in told else None,
    )


def sift_hints(given: object, where: str = "tiercel") -> tuple[Hints, list[HintError]]:
    """The hints that are right, and what is wrong with the others: for who cannot refuse a request."""
    refused: list[HintError] = []
    try:
        told = _told(given, where)
    except HintError as error:
        return Hints(), [error]
    right: dict[Any, Any] = {}
    for name, value in told.items():
        if name not in _FIELDS:
            # Without looking for the nearest name: nobody reads it, and somebody waits.
            refused.append(HintError(f"{where}.{_show(name)}", "is not a known hint"))
            continue
        try:
            parse_hints({name: value}, where)
        except HintError as error:
            refused.append(error)
        else:
            right[name] = value
    return parse_hints(right, where), refused


def parse_ttl(given: object, where: str) -> float:
    """A time such as `10m`, in seconds, above 0 and up to a day. Raises HintError."""
    try:
        ttl_s = parse_seconds(given) if isinstance(given, str) and len(given) <= _TTL_CHARS_MAX else 0.0
    except ConfigError:
        ttl_s = 0.0
    if not 0.0 < ttl_s <= PIN_S_MAX:
        raise HintError(where, f"is {_show(given)}; accepted is a time with a unit, such as 10m, up to 24h")
    return ttl_s


def parse_session(given: object, where: str) -> str:
    """The name of a session. Raises HintError."""
    if not (isinstance(given, str) and 1 <= len(given) <= SESSION_CHARS_MAX and given.isprintable()):
        accepted = f"accepted are 1 to {SESSION_CHARS_MAX} printable characters"
        raise HintError(where, f"is {_show(given)}; {accepted}")
    return given


def _separator(given: object, where: str) -> str:
    if not (isinstance(given, str) and 1 <= len(given) <= _SEPARATOR_CHARS_MAX):
        accepted = f"accepted is the text that separates chunks, 1 to {_SEPARATOR_CHARS_MAX} characters"
        raise HintError(where, f"is {_show(given)}; {accepted}")
    return given


def _told(given: object, where: str) -> dict[Any, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise HintError(where, f"is {_show(given)}; accepted is an object of {', '.join(_FIELDS)}")
    if len(given) > _GIVEN_MAX:
        raise HintError(where, f"has {len(given)} fields; accepted are {', '.join(_FIELDS)}")
    return {name: value for name, value in given.items() if value is not None}


def _is_low(given: object, where: str) -> bool:
    if given not in ("low", "normal"):
        raise HintError(where, f"is {_show(given)}; accepted are low and normal (to keep a prompt: pin)")
    return given == "low"


def _show(value: object) -> str:
    if isinstance(value, str):
        value = value[:_SHOWN_CHARS_MAX]
    elif isinstance(value, int) and value.bit_length() > _INT_BITS_MAX:
        return f"an integer of {value.bit_length()} bits"
    text = ascii(value) if isinstance(value, str | int | float | bool) else f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS_MAX else text[: _SHOWN_CHARS_MAX - 3] + "..."
