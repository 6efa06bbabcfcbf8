"""One raw value (TOML value, environment text, flag) to the typed value of a setting, and back to text.

It never repairs a value: what is not accepted is refused in one line that says what is.
"""

from __future__ import annotations

import re
from pathlib import Path

from tiercel.config.schema import Kind, Setting
from tiercel.config.units import (
    DURATION_ACCEPTED,
    SIZE_ACCEPTED,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_seconds,
)
from tiercel.errors import ConfigError

# Up to the last @: a password with a slash or an @ of its own, rightly escaped or not, is hidden in full.
_CREDENTIALS_IN_URL = re.compile(r"(\w://[^/@\s:?]*:).*@")
_SECRET_IN_URL = re.compile(
    r"([?&][^=&]*(?:pass|secret|token|key|sas|signature|credential)[^=&]*=)[^&]*", re.IGNORECASE
)


_SHARE = re.compile(r"[0-9]{1,3}(\.[0-9]{1,16})?|\.[0-9]{1,16}")
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def accepted(setting: Setting) -> str:
    """Return in words what `setting` takes, such as `an integer from 1 to 64`."""
    match setting.kind:
        case Kind.CHOICE:
            return "one of " + ", ".join(setting.choices)
        case Kind.PATH:
            return "a path"
        case Kind.TEXT:
            return "a text"
        case Kind.FLAG:
            return "true or false"
        case Kind.SHARE:
            return "a share above 0, up to 1, such as 0.25"
        case Kind.URL:
            return "a URL, such as valkey://host:6379"
        case Kind.SIZE:
            what = SIZE_ACCEPTED
        case Kind.DURATION:
            what = DURATION_ACCEPTED
        case Kind.INTEGER:
            what = "an integer"
    if setting.high == float("inf"):
        return f"{what}, at least {_text_of_bound(setting, setting.low)}" if setting.low else what
    return f"{what}, from {_text_of_bound(setting, setting.low)} to {_text_of_bound(setting, setting.high)}"


def convert(setting: Setting, raw: object, base: Path) -> object:
    """Return the typed value of `raw`; relative paths are taken from `base`. Raises ConfigError.

    The error says what is wrong and what is accepted; the caller knows and adds where the value stood.
    """
    match setting.kind:
        case Kind.SIZE:
            return _within(setting, parse_bytes(_number_text(raw)))
        case Kind.DURATION:
            return _within(setting, parse_seconds(_number_text(raw)))
        case Kind.INTEGER:
            return _within(setting, _integer(setting, raw))
        case Kind.SHARE if _SHARE.fullmatch(str(raw)) and 0 < float(str(raw)) <= 1:
            return float(str(raw))
        case Kind.CHOICE if raw in setting.choices:
            return raw
        case Kind.TEXT if isinstance(raw, str) and raw:
            return raw
        case Kind.FLAG if isinstance(raw, bool):
            return raw
        case Kind.FLAG if isinstance(raw, str) and raw.lower() in _FLAGS:
            return _FLAGS[raw.lower()]
        case Kind.URL if isinstance(raw, str) and "://" in raw:
            return raw
        case Kind.PATH if isinstance(raw, str) and raw and "\0" not in raw:
            return base / _expand_home(raw)
    raise ConfigError(f"{show(raw)} is not accepted; accepted: {accepted(setting)}")


def show(raw: object) -> str:
    """Return a raw value for an error message or a listing: short, on one line, passwords in URLs masked."""
    text = masked(" ".join(str(raw).split()))
    if isinstance(raw, bool):
        text = text.lower()
    return f"'{text if len(text) <= 200 else text[:197] + '...'}'"


def masked(text: str) -> str:
    """Return a text with passwords in URLs, and values of parameters named like a secret, as `***`."""
    if "://" not in text:
        return text
    return _SECRET_IN_URL.sub(r"\1***", _CREDENTIALS_IN_URL.sub(r"\1***@", text))


def text_of(setting: Setting, value: object) -> str:
    """Return a typed value as it would be written in a file; `not set` for an optional one that is not."""
    if value is None:
        return "not set"
    if setting.kind is Kind.SIZE and isinstance(value, int):
        return format_bytes(value)
    if setting.kind is Kind.DURATION and isinstance(value, (int, float)):
        return format_seconds(value)
    return show(value)[1:-1]


def _text_of_bound(setting: Setting, bound: float) -> str:
    return text_of(setting, int(bound) if setting.kind is not Kind.DURATION else bound)


def _number_text(raw: object) -> str:
    # A bare TOML number reaches the parser as text, so that it is refused with the same suggestion.
    return raw if isinstance(raw, str) else str(raw).lower()


def _integer(setting: Setting, raw: object) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    # int() would also take ' 1_0 ', '١' and a 5,000-digit number.
    if isinstance(raw, str) and re.fullmatch(r"-?[0-9]{1,18}", raw):
        return int(raw)
    raise ConfigError(f"{show(raw)} is not an integer; accepted: {accepted(setting)}")


def _within(setting: Setting, value: float) -> float:
    if setting.low <= value <= setting.high:
        return value
    what = "negative" if value < 0 else "too small" if value < setting.low else "too large"
    raise ConfigError(
        f"'{text_of(setting, value) if value >= 0 else value}' is {what}; accepted: {accepted(setting)}"
    )


def _expand_home(raw: str) -> Path:
    try:
        return Path(raw).expanduser()
    except RuntimeError:
        raise ConfigError(f"{show(raw)} names a home directory that is not known; give a full path") from None
