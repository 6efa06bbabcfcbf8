"""Where settings come from: a TOML file, `TIERCEL_...` variables, flags; each as flat `section.name` keys.

A name that is not a setting is refused with the nearest one that is. Nothing here is ever ignored:
a misspelt variable that silently does nothing is the fault this module exists to prevent.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tiercel.config.paths import CACHE_DIR_VARIABLE
from tiercel.config.schema import SECTIONS, TIERS, TIERS_MAX, entries
from tiercel.errors import ConfigError

PREFIX = "TIERCEL_"
CONFIG_VARIABLE = "TIERCEL_CONFIG"
API_KEY_VARIABLE = "TIERCEL_API_KEY"
# Variables that begin with the prefix and are not settings.
OTHER_VARIABLES = (CONFIG_VARIABLE, CACHE_DIR_VARIABLE, API_KEY_VARIABLE)

_NAMES: dict[str, frozenset[str]] = {
    section: frozenset(entry.name for entry in entries() if entry.section == section)
    for section in (*SECTIONS, TIERS)
}
_INDEX = re.compile(r"0|[1-9][0-9]?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A raw value and where it stood; `label` is the key as spelt there, `base` anchors relative paths."""

    key: str
    raw: object
    origin: str
    label: str
    base: Path

    def fail(self, why: str) -> ConfigError:
        """Return the one-line error for this value."""
        return ConfigError(f"{self.origin}: {self.label}: {why}")


def from_file(path: Path) -> Iterator[Assignment]:
    """Yield the assignments of a TOML file. Raises ConfigError for an unreadable or malformed one."""
    try:
        # Some editors begin a file with a byte order mark, which TOML does not know.
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"file {path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"file {path}: not valid TOML: {error}") from error
    origin, base = f"file {path}", path.absolute().parent
    for key, raw in _flatten(document, origin):
        _require_known(key, key, origin, _all_keys(), "setting")
        yield Assignment(key, raw, origin, key, base)


def from_environ(environ: Mapping[str, str]) -> Iterator[Assignment]:
    """Yield the assignments of the environment; an empty value counts as not set."""
    keys = {variable_of(key): key for key in _all_keys()}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX):
            _refuse_misspelt_prefix(variable, keys)
        elif variable not in OTHER_VARIABLES:
            _require_known(variable, variable, "environment", (*keys, *OTHER_VARIABLES), "variable")
            if raw := environ[variable]:
                yield Assignment(keys[variable], raw, "environment", variable, Path.cwd())


def from_flags(overrides: Mapping[str, object]) -> Iterator[Assignment]:
    """Yield the assignments of flags, given as dotted keys; a value of None counts as not given."""
    for key, raw in overrides.items():
        _require_known(key, key, "flag", _all_keys(), "setting")
        if raw is not None:
            yield Assignment(key, raw, "flag", key, Path.cwd())


def variable_of(key: str) -> str:
    """Return the environment variable of a dotted key: `tiers.0.path` is `TIERCEL_TIERS_0_PATH`."""
    return PREFIX + key.replace(".", "_").upper()


def _all_keys() -> list[str]:
    keys = [f"{section}.{name}" for section in SECTIONS for name in sorted(_NAMES[section])]
    return keys + [f"{TIERS}.{i}.{name}" for i in range(TIERS_MAX) for name in sorted(_NAMES[TIERS])]


def _flatten(document: dict[str, object], origin: str) -> Iterator[tuple[str, object]]:
    """Yield (dotted key, value) of a parsed file, refusing sections and lists of the wrong shape."""
    for section, body in document.items():
        if section == TIERS:
            if not isinstance(body, list) or not all(isinstance(tier, dict) for tier in body):
                raise ConfigError(
                    f"{origin}: {TIERS}: is not a list of tables; write [[{TIERS}]] for each tier"
                )
            if len(body) > TIERS_MAX:
                raise ConfigError(f"{origin}: {TIERS}: {len(body)} tiers; accepted: at most {TIERS_MAX}")
            for index, tier in enumerate(body):
                yield from ((f"{TIERS}.{index}.{name}", value) for name, value in tier.items())
        elif section in SECTIONS:
            if not isinstance(body, dict):
                raise ConfigError(
                    f"{origin}: {section}: is a section; write [{section}] and its settings below"
                )
            yield from ((f"{section}.{name}", value) for name, value in body.items())
        else:
            # A setting outside its section is told where it belongs; a section gets the nearest section.
            yield section, body


def _require_known(name: str, label: str, origin: str, known: Iterable[str], what: str) -> None:
    candidates = list(known)
    if name in candidates:
        return
    raise ConfigError(f"{origin}: {label}: unknown {what}; {_suggest(name, candidates)}")


def _suggest(name: str, candidates: list[str]) -> str:
    parts = name.split(".")
    if parts[0] == TIERS and len(parts) > 1 and not _is_tier_index(parts[1]):
        return f"write {TIERS}.0.NAME for the first tier, up to {TIERS}.{TIERS_MAX - 1}.NAME"
    if near := _nearest(name, parts, candidates):
        return f"did you mean '{near}'?"
    siblings = [c for c in candidates if c.startswith(f"{parts[0]}.")] if len(parts) > 1 else []
    return "accepted: " + ", ".join(siblings or [*(f"[{s}]" for s in SECTIONS), f"[[{TIERS}]]"])


def _nearest(name: str, parts: list[str], candidates: list[str]) -> str | None:
    """Return the known name nearest to `name`, or None when guessing would mislead."""
    *prefix, leaf = parts
    section = parts[0] if prefix else ""
    if section in _NAMES:
        # The section is right, and would make every name in it look near.
        if near := difflib.get_close_matches(leaf, sorted(_NAMES[section]), n=1, cutoff=0.5):
            return ".".join([*prefix, near[0]])
        return next((c for c in candidates if c.endswith(f".{leaf}")), None)
    if elsewhere := [c for c in candidates if c.endswith(f".{name}")]:
        return elsewhere[0]
    pool = [*_NAMES] if not prefix and not name.isupper() and "_" not in name else candidates
    close = difflib.get_close_matches(name.upper(), [c.upper() for c in pool], n=1)
    return next((c for c in pool if c.upper() in close), None)


def _is_tier_index(text: str) -> bool:
    return _INDEX.fullmatch(text) is not None and int(text) < TIERS_MAX


def _refuse_misspelt_prefix(variable: str, keys: Mapping[str, str]) -> None:
    """Refuse `TIERCLE_RAM_SIZE` and its kind: a setting's own name behind nearly the right prefix."""
    head, _, rest = variable.partition("_")
    if not difflib.get_close_matches(head.upper(), [PREFIX[:-1]], n=1, cutoff=0.75):
        return
    if f"{PREFIX}{rest.upper()}" in keys:
        raise ConfigError(
            f"environment: {variable}: unknown variable; did you mean '{PREFIX}{rest.upper()}'?"
        )
