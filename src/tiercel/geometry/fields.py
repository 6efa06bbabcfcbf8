"""Typed reading of a model configuration, one field at a time.

A field that is missing, of the wrong type or out of range becomes a `GeometryError` of one line that
names the file, the field, the value seen and what is accepted. It never guesses a value: a default is
used only where the caller states one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tiercel.errors import GeometryError

LAYERS_MAX = 10_000
HEADS_MAX = 100_000
DIM_MAX = 10_000_000
TOKENS_MAX = 10**12
_SHOWN_CHARS_MAX = 60

Config = Mapping[str, Any]


def shown(value: object) -> str:
    """`value` as one short printable line."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, (list, tuple)) and len(value) > 8:
        return f"a list of {len(value)}"
    text = repr(value)
    text = text if len(text) <= _SHOWN_CHARS_MAX else text[: _SHOWN_CHARS_MAX - 1] + "…"
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


class Fields:
    """A view of one configuration object. `source` (file name) and `path` (nesting) head every message.

    `defaults` are what the published configuration class of the model type fills in for an absent
    field; an explicit null counts as absent only where the caller asks for an optional field.
    """

    __slots__ = ("_defaults", "path", "source", "values")

    def __init__(self, source: str, values: Config, defaults: Config | None = None, path: str = "") -> None:
        self.source = source
        self.values = values
        self._defaults = defaults or {}
        self.path = path

    def refuse(self, field: str, accepted: str) -> NoReturn:
        """Raise for `field`: its name, the value seen, what is accepted."""
        seen = shown(self.values[field]) if field in self.values else "missing"
        raise GeometryError(f"{self.source}: {self.path}{field}: {seen}; accepted: {accepted}")

    def name_of(self, names: Sequence[str]) -> str:
        """The first of `names` that the configuration has with a value; else the first name."""
        for name in names:
            if self.values.get(name) is not None:
                return name
        return names[0]

    def raw(self, *names: str) -> Any:
        """The value of the first present name, then of the first defaulted one, else None."""
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        for name in names:
            if name in self.values:
                continue
            if self._defaults.get(name) is not None:
                return self._defaults[name]
        return None

    def count(self, *names: str, top: int = DIM_MAX, least: int = 1) -> int:
        """A required whole number in least..top."""
        value = self.optional(*names, top=top, least=least)
        if value is None:
            self.refuse(names[0], f"a whole number from {least} to {top}")
        return value

    def optional(self, *names: str, top: int = DIM_MAX, least: int = 1) -> int | None:
        """A whole number in least..top, or None where absent or null."""
        value = self.raw(*names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= top:
            self.refuse(self.name_of(names), f"a whole number from {least} to {top}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """A true or false; `default` where absent or null."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def object(self, name: str) -> Fields | None:
        """A nested object, or None where absent or null."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.refuse(name, "an object")
        return Fields(self.source, value, path=f"{self.path}{name}.")

    def per_layer(self, name: str, num_layers: int, accepted: str) -> list[Any] | None:
        """A list with one entry per layer, or None where absent. A longer list is refused too."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != num_layers:
            self.refuse(name, f"a list of {num_layers} entries, one per layer ({accepted})")
        return list(value)

    def numbers(self, name: str, top: int, least: int = 0) -> list[int] | None:
        """A list of whole numbers in least..top, or None where absent."""
        value = self.raw(name)
        if value is None:
            return None
        accepted = f"a list of whole numbers from {least} to {top}"
        if not isinstance(value, list):
            self.refuse(name, accepted)
        for entry in value:
            if isinstance(entry, bool) or not isinstance(entry, int) or not least <= entry <= top:
                self.refuse(name, accepted)
        return list(value)
