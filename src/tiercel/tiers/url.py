"""The URL of a networked tier: where it is, and its options as query parameters, read with types and units.

    valkey://user:password@host:6379/0?cluster=yes&ttl=1d      s3://bucket/prefix?region=us-east-1

Parsing opens nothing. A parameter that nobody reads is refused by `done`, and no error, `str` or `repr`
shows a password or a value of a parameter that is named like a secret.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import unquote

from tiercel.config.units import format_bytes, format_seconds, parse_bytes, parse_seconds
from tiercel.config.values import masked
from tiercel.errors import ConfigError, TierError

T = TypeVar("T")

_SHAPE = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?#]*)([^?#]*)(?:\?([^#]*))?", re.IGNORECASE | re.ASCII)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^:\[\]]*)(?::([0-9]{1,5}))?", re.ASCII)
_FLAGS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
_EXAMPLE = "scheme://user:password@host:port/path?name=value"


@dataclass(frozen=True, slots=True)
class TierUrl:
    """A parsed URL, percent-decoded. `path` keeps its leading slash; `port` is None where none is given.

    The readers (`text`, `size`, ...) return a parameter's value, or the default where it is absent, and raise
    `TierError` in one line for a value that is not accepted. Call `done()` after the last of them.
    """

    scheme: str
    host: str = ""
    port: int | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    path: str = ""
    params: dict[str, str] = field(default_factory=dict, repr=False)
    shown: str = field(default="", compare=False)
    _asked: set[str] = field(default_factory=set, repr=False, compare=False)

    def __str__(self) -> str:
        return self.shown

    @classmethod
    def parse(cls, text: str) -> TierUrl:
        """Read a URL. Raises `TierError` naming it, with secrets masked."""
        shown = masked(" ".join(text.split()))
        match = _SHAPE.fullmatch(text)
        # An @ behind the host may be the tail of a password with a bare / or ? in it.
        if match is None or not text.isprintable() or " " in text or "@" in (match[3] + (match[4] or "")):
            raise TierError(
                f"'{shown}' is not the URL of a tier; accepted: {_EXAMPLE}, where / ? # @ and spaces within "
                "a name or password are written as %2F %3F %23 %40 %20"
            )
        scheme, authority, path, query = match.groups()
        credentials, at, place = authority.rpartition("@")
        user, colon, password = credentials.partition(":")
        host = _HOST.fullmatch(place)
        port = int(host[2]) if host and host[2] else None
        if host is None or (port is not None and not 0 < port < 65536):
            raise TierError(
                f"'{shown}' has no valid host and port; accepted: {_EXAMPLE}, with a port from 1 to 65535"
            )
        return cls(
            scheme=scheme.lower(),
            host=unquote(host[1].strip("[]")),
            port=port,
            user=unquote(user) if at and user else None,
            password=unquote(password) if colon else None,
            path=unquote(path),
            params=_params(query or "", shown),
            shown=shown,
        )

    def text(self, name: str, default: T) -> str | T:
        """A parameter as it stands."""
        self._asked.add(name)
        return self.params.get(name, default)

    def choice(self, name: str, accepted: tuple[str, ...], default: T) -> str | T:
        """A parameter that is one of a few words."""
        value = self.text(name, None)
        if value is not None and value not in accepted:
            raise self.refuse(name, f"is not accepted; accepted: one of {', '.join(accepted)}")
        return default if value is None else value

    def flag(self, name: str, default: bool) -> bool:
        """A parameter that is `yes` or `no`."""
        value = self.text(name, None)
        if value is not None and value.lower() not in _FLAGS:
            raise self.refuse(name, "is not accepted; accepted: yes or no")
        return default if value is None else _FLAGS[value.lower()]

    def integer(self, name: str, default: T, low: int = 0, high: int = 2**63 - 1) -> int | T:
        """A whole number from `low` to `high`."""
        value = self.text(name, None)
        if value is None:
            return default
        if not re.fullmatch(r"-?[0-9]{1,19}", value) or not low <= int(value) <= high:
            raise self.refuse(name, f"is not accepted; accepted: an integer from {low} to {high}")
        return int(value)

    def size(self, name: str, default: T, low: int = 0, high: int = 2**63 - 1) -> int | T:
        """Bytes, given with a unit, from `low` to `high`."""
        value = self.text(name, None)
        if value is None:
            return default
        try:
            size_bytes = parse_bytes(value)
        except ConfigError as error:
            raise self.refuse(name, str(error)) from None
        if not low <= size_bytes <= high:
            bounds = f"from {format_bytes(low)} to {format_bytes(high)}"
            raise self.refuse(name, f"is not accepted; accepted: a size {bounds}")
        return size_bytes

    def duration(self, name: str, default: T, low: float = 0.0, high: float = 3.2e9) -> float | T:
        """Seconds, given with a unit, from `low` to `high`."""
        value = self.text(name, None)
        if value is None:
            return default
        try:
            duration_s = parse_seconds(value)
        except ConfigError as error:
            raise self.refuse(name, str(error)) from None
        if not low <= duration_s <= high:
            bounds = f"from {format_seconds(low)} to {format_seconds(high)}"
            raise self.refuse(name, f"is not accepted; accepted: a duration {bounds}")
        return duration_s

    def refuse(self, name: str, why: str) -> TierError:
        """The one-line error for a parameter, to be raised by whoever knows what is accepted."""
        return TierError(f"{self.shown}: parameter '{name}': {why}")

    def done(self) -> None:
        """Refuse parameters that no reader has asked for, with the nearest that one has."""
        for name in self.params:
            if name not in self._asked:
                near = difflib.get_close_matches(name, sorted(self._asked), n=1, cutoff=0.5)
                known = ", ".join(sorted(self._asked)) or "none"
                hint = f"did you mean '{near[0]}'?" if near else f"accepted: {known}"
                raise TierError(f"{self.shown}: parameter '{name}' is unknown; {hint}")


def _params(query: str, shown: str) -> dict[str, str]:
    params: dict[str, str] = {}
    for pair in filter(None, query.split("&")):
        # Not `unquote_plus`: in a password or a path a plus is a plus.
        name, equals, value = (unquote(part) for part in pair.partition("="))
        if not name or not equals or not value:
            raise TierError(f"{shown}: '{name}' has no value; accepted: parameters as name=value")
        if name in params:
            raise TierError(f"{shown}: parameter '{name}' is given twice; accepted: once")
        params[name] = value
    return params
