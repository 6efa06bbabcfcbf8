"""What a migration ends in: a `tiercel.toml` that loads, and for every option found what became of it.

Nothing that was given is left out: it becomes a note, or an error. Secrets are neither written nor shown.
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from tiercel.config import Config, format_bytes
from tiercel.config.schema import TIERS_MAX
from tiercel.config.values import masked
from tiercel.errors import ConfigError
from tiercel.migrate.given import Given, only_signs, printable

GIB = 2**30
_LEAST_BYTES = 2**20


class Fate(enum.Enum):
    """What became of an option, in the order in which it is told."""

    TAKEN = "taken over"
    DECIDE = "for you to decide"
    NOT_HERE = "not here"
    NEEDLESS = "nothing to set"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Note:
    """One option and what became of it."""

    given: Given
    fate: Fate
    text: str

    def __str__(self) -> str:
        shown = self.given.shown
        return f"{printable(masked(self.given.name))}{f' = {shown}' if shown else ''}: {printable(self.text)}"


@dataclass(slots=True)
class Draft:
    """A `tiercel.toml` in the making. `disk_size`: what a directory gets whose size nobody said."""

    disk_size: str = "100GB"
    notes: list[Note] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    _sections: dict[str, dict[str, object]] = field(default_factory=dict)
    _tiers: list[dict[str, object]] = field(default_factory=list)

    def note(self, given: Given, fate: Fate, text: str) -> None:
        self.notes.append(Note(given, fate, text))

    def set(self, given: Given, key: str, value: object, why: str = "") -> None:
        """Set `section.name`, and say so; of two options that mean the same setting the first counts."""
        section, _, name = key.partition(".")
        body = self._sections.setdefault(section, {})
        if name in body:
            self.note(
                given, Fate.DECIDE, f'{key} is "{body[name]}" already, by another option; this: {value}'
            )
            return
        body[name] = value
        self.note(given, Fate.TAKEN, f'{key} = "{value}"{f"; {why}" if why else ""}')

    def set_size(self, given: Given, key: str, size_bytes: float, why: str = "") -> None:
        """Set a size; one below what is accepted is said to be none."""
        if size_bytes < _LEAST_BYTES:
            self.note(given, Fate.DECIDE, f"{key} stays as it is by default; 1MiB is the least")
            return
        self.set(given, key, format_bytes(int(size_bytes)), why)

    def add_files(self, given: Given, path: str, size: str | None, why: str, **more: object) -> None:
        """Add a directory; without a size it gets `disk_size`, for its owner to look at."""
        if "\0" in path or not path.isprintable():
            raise given.fail("a path")
        # A URL may hold a password; a ~ would be somebody's home here.
        if "://" in path:
            raise given.fail("a directory")
        path = os.path.join(os.getcwd(), path) if path.startswith("~") else path
        for number, tier in enumerate(self._tiers):
            other = str(tier.get("path", ""))
            if other and _overlap(path, other):
                self.note(
                    given, Fate.DECIDE, f"'{path}' overlaps the directory of tier {number}: not written"
                )
                return
        settings = {"path": path, "size": size or self.disk_size, **more}
        if not self._add(given, settings, why):
            return
        if size is None:
            self.note(
                given, Fate.DECIDE, f"its size has no limit there; {self.disk_size} is a guess (--disk-size)"
            )
        if not os.path.isabs(path):
            self.note(given, Fate.DECIDE, "a relative path starts from the folder of this file")

    def add_place(self, given: Given, kind: str, url: str, why: str = "", **more: object) -> None:
        """Add a networked tier by its URL."""
        if any(tier.get("url") == url for tier in self._tiers):
            self.note(given, Fate.NEEDLESS, "the same place once more")
            return
        self._add(given, {"kind": kind, "url": url, **more}, why)

    def _add(self, given: Given, settings: dict[str, object], why: str) -> bool:
        if len(self._tiers) == TIERS_MAX:
            self.note(
                given, Fate.DECIDE, f"there are {TIERS_MAX} tiers already, the most there may be: not written"
            )
            return False
        self._tiers.append(settings)
        number = len(self._tiers) - 1
        self.note(
            given, Fate.TAKEN, f"tiers.{number}, {settings.get('kind', 'files')}{f'; {why}' if why else ''}"
        )
        return True

    def check(self) -> None:
        """Raise ConfigError if what would be written does not load."""
        keys = {f"{name}.{key}": one for name, body in self._sections.items() for key, one in body.items()}
        keys |= {f"tiers.{at}.{key}": one for at, tier in enumerate(self._tiers) for key, one in tier.items()}
        try:
            Config.load(None, {}, keys)
        except ConfigError as error:
            raise ConfigError(f"what would be written is not accepted: {error}") from None

    def report(self) -> Iterator[str]:
        """Every option, under what became of it, then the commands to use."""
        for fate in Fate:
            of_fate = [str(note) for note in self.notes if note.fate is fate]
            if of_fate:
                yield f"{fate.value}:"
                yield from (f"  {one}" for one in of_fate)
        if self.commands:
            yield "start with:"
            yield from (f"  {only_signs(one)}" for one in self.commands)

    def toml(self, source: str) -> str:
        """The file as text, the report as comments above. Raises ConfigError if it would not load."""
        self.check()
        lines = [f"# Made by `tiercel migrate` from {printable(source)}.", "#"]
        lines += [f"# {one}" for one in self.report()]
        for name, body in self._sections.items():
            lines += ["", f"[{name}]", *_settings(body)]
        for tier in self._tiers:
            lines += ["", "[[tiers]]", *_settings(tier)]
        return "\n".join(lines) + "\n"


def _settings(body: dict[str, object]) -> Iterator[str]:
    for name, value in body.items():
        # A JSON text of printable signs is a TOML text as well.
        yield f"{name} = {json.dumps(value, ensure_ascii=False)}"


def _overlap(one: str, other: str) -> bool:
    first, second = (os.path.join(os.path.abspath(path), "") for path in (one, other))
    return first.startswith(second) or second.startswith(first)
