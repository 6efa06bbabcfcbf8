"""What each tier needs besides its single values, and what several tiers may not share.

Only looks at what is configured: it opens no tier, and of a URL it knows no more than where it points.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from tiercel.config.schema import FILES, MEMORY, TIER_KINDS, TIERS, TierConfig, entries
from tiercel.config.sources import Assignment
from tiercel.config.values import accepted, masked
from tiercel.errors import ConfigError

# Packages add kinds of tiers under this group; the name of the entry point is the kind.
TIER_ENTRY_POINTS = "tiercel.tiers"
KEY_SOURCES = ("file:", "env:", "command:")
# Parameters that say where a place is; all others only say how it is used.
_PLACE_PARAMETERS = ("endpoint", "prefix")


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a kind of tier must be told, what means nothing to it, and when it is written to unless told."""

    needed: tuple[str, ...]
    foreign: tuple[str, ...]
    write: str = "through"


# A key would lie in the same memory as what it encrypts. And what RAM still has need not be in memory twice.
_RULES = {
    FILES: _Rule(("path", "size"), ("url",)),
    MEMORY: _Rule(("size",), ("path", "url", "encrypt"), write="on-evict"),
}
_NETWORKED = _Rule(("url",), ("path",))


def check_tiers(tiers: Sequence[TierConfig], assigned: Mapping[str, Assignment]) -> None:
    """Raise ConfigError for a kind that is unknown, a place that is missing or shared by two tiers."""
    directories: dict[Path, int] = {}
    places: dict[str, int] = {}
    for index, tier in enumerate(tiers):
        _check_kind(tier, f"{TIERS}.{index}", assigned)
        _check_needs(tier, f"{TIERS}.{index}", assigned)
        if tier.encrypt is not None and not tier.encrypt.startswith(KEY_SOURCES):
            # What was given instead may be a key: it is not shown.
            raise assigned[f"{TIERS}.{index}.encrypt"].fail(
                "is no source of keys; accepted: file:PATH, env:NAME or command:PROGRAM ARGUMENTS"
            )
        if tier.path is not None:
            real = Path(os.path.realpath(tier.path))
            for other, other_index in directories.items():
                if real == other or other in real.parents or real in other.parents:
                    raise assigned[f"{TIERS}.{index}.path"].fail(
                        f"'{tier.path}' overlaps the directory of tier {other_index}; "
                        "accepted: a directory of its own for each tier"
                    )
            directories[real] = index
        if tier.url is not None:
            place = _place(tier.url)
            if place in places:
                raise assigned[f"{TIERS}.{index}.url"].fail(
                    f"'{masked(tier.url)}' is the place of tier {places[place]}; "
                    "accepted: a place of its own for each tier"
                )
            places[place] = index


def by_kind(tier: TierConfig, prefix: str, assigned: Mapping[str, Assignment]) -> TierConfig:
    """The tier at `prefix`, with what its kind does unless told."""
    said = f"{prefix}.write" in assigned
    return tier if said else dataclasses.replace(tier, write=_rule(tier.kind).write)


def tier_kinds() -> list[str]:
    """Every kind there is here: those of Tiercel, then those of installed packages."""
    return list(dict.fromkeys((*TIER_KINDS, *sorted(entry_points(group=TIER_ENTRY_POINTS).names))))


def _check_kind(tier: TierConfig, prefix: str, assigned: Mapping[str, Assignment]) -> None:
    if tier.kind in TIER_KINDS:
        return
    kinds = tier_kinds()
    if tier.kind not in kinds:
        near = difflib.get_close_matches(tier.kind.lower(), kinds, n=1, cutoff=0.6)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise assigned[f"{prefix}.kind"].fail(
            f"'{tier.kind}' is no kind of tier; {hint}accepted: {', '.join(kinds)}, or the name of an entry "
            f"point {TIER_ENTRY_POINTS} of an installed package"
        )


def _rule(kind: str) -> _Rule:
    return _RULES.get(kind, _NETWORKED)


def _check_needs(tier: TierConfig, prefix: str, assigned: Mapping[str, Assignment]) -> None:
    """All that the kind needs, and nothing of another kind's."""
    rule = _rule(tier.kind)
    for name in rule.foreign:
        if f"{prefix}.{name}" in assigned:
            others = ", ".join(kind for kind in tier_kinds() if name not in _rule(kind).foreign)
            raise assigned[f"{prefix}.{name}"].fail(
                f"does not go with kind '{tier.kind}'; accepted: {rule.needed[0]}, or a kind of {others}"
            )
    given = next(a for key, a in assigned.items() if key.startswith(f"{prefix}."))
    for name in rule.needed:
        if f"{prefix}.{name}" not in assigned:
            setting = next(
                entry.setting for entry in entries() if (entry.section, entry.name) == (TIERS, name)
            )
            raise ConfigError(f"{given.origin}: {prefix}.{name}: is missing; accepted: {accepted(setting)}")


def _place(url: str) -> str:
    """A URL without its credentials and without what only says how the place is used."""
    place, _, query = url.partition("?")
    scheme, _, rest = place.partition("://")
    located = [pair for pair in re.split("&", query) if pair.partition("=")[0] in _PLACE_PARAMETERS]
    return f"{scheme.lower()}://{rest.rpartition('@')[2].rstrip('/')}?{'&'.join(sorted(located))}"
