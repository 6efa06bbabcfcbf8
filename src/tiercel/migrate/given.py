"""An option as found somewhere else: name, value, where it stood. Read with a type, shown without secrets."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tiercel.config.values import masked
from tiercel.errors import ConfigError

_SECRET = re.compile(r"pass|secret|token|key|cred|connection_string|sas|auth", re.IGNORECASE)
_HARMLESS = re.compile(r"-?[0-9.]+|true|false|none|", re.IGNORECASE)
_SHOWN_MAX = 80
HIDDEN = "***"
# What stands for "not used" there.
_OFF = (None, False, 0, "", "0", "0.0", "false", "none", "null")  # False is 0 and 0.0, too


@dataclass(frozen=True, slots=True)
class Given:
    """`name` as spelt there, `origin` for messages (`lmcache.yaml`, `environment`, `flag`)."""

    name: str
    value: object = field(repr=False)
    origin: str

    @property
    def shown(self) -> str:
        """The value on one line, short, without what may be a secret."""
        if isinstance(self.value, Mapping):
            return "{...}"
        if isinstance(self.value, list) and any(isinstance(one, (Mapping, list)) for one in self.value):
            return "[...]"
        text = str(self.value).lower() if isinstance(self.value, bool) else str(self.value)
        if _SECRET.search(self.name) and not _HARMLESS.fullmatch(text):
            return HIDDEN
        text = printable(masked(text))
        return text if len(text) <= _SHOWN_MAX else f"{text[: _SHOWN_MAX - 3]}..."

    @property
    def off(self) -> bool:
        """Whether the value is one that means "not used"."""
        value = self.value.strip().lower() if isinstance(self.value, str) else self.value
        return value in (*_OFF, [], {})

    def inner(self, name: str, value: object) -> Given:
        """One of the options inside this one."""
        return replace(self, name=f"{self.name}.{name}", value=value)

    def fail(self, accepted: str) -> ConfigError:
        """The one line for a value that cannot be read."""
        return ConfigError(
            f"{self.origin}: {printable(self.name)}: '{self.shown}' is not accepted; accepted: {accepted}"
        )

    def number(self) -> float:
        """A finite number, of 0 or more. Raises ConfigError."""
        try:
            number = float(self.value) if isinstance(self.value, (int, float, str)) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if isinstance(self.value, bool) or not 0 <= number < 2**63:
            raise self.fail("a number")
        return number

    def flag(self) -> bool:
        """As LMCache reads it: `true` and `1` are true, everything else is not."""
        return str(self.value).strip().lower() in ("true", "1")

    def text(self) -> str:
        """A printable text. Raises ConfigError."""
        if not isinstance(self.value, str) or not self.value.strip() or not self.value.isprintable():
            raise self.fail("a text")
        return self.value.strip()

    def texts(self) -> list[str]:
        """Texts as a list or with commas between them. Raises ConfigError."""
        if isinstance(self.value, list):
            return [replace(self, value=one).text() for one in self.value]
        return [one.strip() for one in self.text().split(",") if one.strip()]

    def mapping(self) -> dict[str, Given]:
        """The options inside, also where they are given as JSON. Raises ConfigError."""
        value = self.value
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise self.fail("an object, as JSON") from None
        if not isinstance(value, Mapping):
            raise self.fail("an object")
        return {str(name): self.inner(str(name), one) for name, one in value.items()}

    def items(self) -> list[Given]:
        """The members of a list. Raises ConfigError."""
        if not isinstance(self.value, list):
            raise self.fail("a list")
        return [replace(self, name=f"{self.name}.{at}", value=one) for at, one in enumerate(self.value)]


def printable(text: str) -> str:
    """On one line, and nothing that a terminal or a TOML comment would take for more than a sign."""
    return only_signs(" ".join(text.split()))


def only_signs(text: str) -> str:
    """The same text, with ? for what is no printable sign."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)
