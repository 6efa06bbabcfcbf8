"""Sizes and durations as people write them: `4GiB`, `500MB`, `10s`, `250ms`.

A number without a unit is never guessed at: half of all readers would guess wrong. Parsing is exact
(decimal arithmetic), and formatting gives a text that parses back to the same value.
"""

from __future__ import annotations

import re
from decimal import Decimal

from tiercel.errors import ConfigError

_BYTE_UNITS: dict[str, int] = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SECOND_UNITS: dict[str, Decimal] = {
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
# What people also write, and what they most likely mean by it.
_MEANT = {
    "k": "KiB", "kb": "kB", "ki": "KiB", "m": "MiB", "mi": "MiB", "g": "GiB", "gi": "GiB", "t": "TiB",
    "ti": "TiB", "byte": "B", "bytes": "B",
    "msec": "ms", "millis": "ms", "sec": "s", "secs": "s", "second": "s", "seconds": "s", "min": "m",
    "mins": "m", "minute": "m", "minutes": "m", "hr": "h", "hour": "h", "hours": "h",
    "day": "d", "days": "d",
}  # fmt: skip
_NUMBER = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)", re.ASCII)

SIZE_ACCEPTED = "a size with a unit, such as 4GiB or 500MB"
DURATION_ACCEPTED = "a duration with a unit, such as 10s, 5m or 250ms"


def parse_bytes(text: str) -> int:
    """Return the bytes that `text` names, such as `4GiB` or `1.5MB`. Raises ConfigError."""
    number, unit = _split(text, _BYTE_UNITS, "GiB", SIZE_ACCEPTED)
    exact = number * _BYTE_UNITS[unit]
    if exact != exact.to_integral_value():
        raise ConfigError(f"'{text}' is not a whole number of bytes; accepted: {SIZE_ACCEPTED}")
    return int(exact)


def parse_seconds(text: str) -> float:
    """Return the seconds that `text` names, such as `10s` or `250ms`. Raises ConfigError."""
    number, unit = _split(text, _SECOND_UNITS, "s", DURATION_ACCEPTED)
    return float(number * _SECOND_UNITS[unit])


def format_bytes(size_bytes: int) -> str:
    """Return the shortest exact text for `size_bytes`: `parse_bytes(format_bytes(n)) == n`."""
    if size_bytes < 0:
        raise ValueError(f"size_bytes is negative: {size_bytes}")
    exact = [f"{size_bytes // scale}{unit}" for unit, scale in _BYTE_UNITS.items() if size_bytes % scale == 0]
    return f"{size_bytes}B" if size_bytes == 0 else min(exact, key=len)


def format_seconds(duration_s: float) -> str:
    """Return a text with `parse_seconds(format_seconds(t)) == t`, in whole units where there are such.

    Exact for 0 and for everything from a nanosecond up.
    """
    if not 0 <= duration_s < float("inf"):
        raise ValueError(f"duration_s is not a duration: {duration_s}")
    seconds = Decimal(repr(float(duration_s)))
    texts = [f"{seconds.normalize():f}s"]
    for unit, scale in _SECOND_UNITS.items():
        whole = seconds / scale
        if whole and whole == whole.to_integral_value() and float(whole * scale) == duration_s:
            texts.append(f"{whole:.0f}{unit}")
    return min(texts, key=lambda text: ("." in text, len(text)))


def human_bytes(size_bytes: float) -> str:
    """Return `size_bytes` rounded for a person to read, such as `175.8 MiB`; not exact, not for files."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(size_bytes) >= _BYTE_UNITS[unit]:
            return f"{size_bytes / _BYTE_UNITS[unit]:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def _split(
    text: str, units: dict[str, int] | dict[str, Decimal], usual: str, accepted: str
) -> tuple[Decimal, str]:
    """Return number and unit of `text`, or raise ConfigError with the spelling that was likely meant."""
    stripped = text.strip()
    match = _NUMBER.fullmatch(stripped)
    if match is None:
        why = "is negative" if stripped.startswith("-") else "is not understood"
        raise ConfigError(f"'{text}' {why}; accepted: {accepted}")
    number, unit = match.groups()
    if unit in units:
        return Decimal(number), unit
    if not unit:
        raise ConfigError(f"'{text}' has no unit; did you mean '{number}{usual}'? accepted: {accepted}")
    meant = next((u for u in units if u.casefold() == unit.casefold()), _MEANT.get(unit.casefold(), ""))
    hint = f"did you mean '{number}{meant}'? " if meant in units else ""
    raise ConfigError(f"'{text}' has the unknown unit '{unit}'; {hint}accepted: {accepted}")
