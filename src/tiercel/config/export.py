"""A configuration as environment variables, to hand it to a process of our own.

Not through its arguments: those are shown to every user of the host, and a URL may hold a password.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from tiercel.config.config import Config
from tiercel.config.schema import SECTIONS, TIERS, Kind, Setting, public_name
from tiercel.config.sources import CONFIG_VARIABLE, OTHER_VARIABLES, PREFIX, variable_of
from tiercel.config.units import format_bytes, format_seconds


def exported(config: Config, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `environ` with exactly the settings of `config` in it, whatever it said before."""
    kept = set(OTHER_VARIABLES) - {CONFIG_VARIABLE}
    result = {name: text for name, text in environ.items() if not name.startswith(PREFIX) or name in kept}
    parts = [(name, getattr(config, name)) for name in SECTIONS]
    parts += [(f"{TIERS}.{number}", tier) for number, tier in enumerate(config.tiers)]
    for prefix, part in parts:
        for item in dataclasses.fields(part):
            value = getattr(part, item.name)
            if value is not None:
                key = f"{prefix}.{public_name(item.name)}"
                result[variable_of(key)] = _text(item.metadata["setting"], value)
    return result


def _text(setting: Setting, value: object) -> str:
    if setting.kind is Kind.SIZE and isinstance(value, int):
        return format_bytes(value)
    if setting.kind is Kind.DURATION and isinstance(value, (int, float)):
        return format_seconds(value)
    return str(value)
