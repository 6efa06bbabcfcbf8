"""Read what people type about machines: tiers, prices, measured prefill times. Errors name flag and value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from datetime import date
from typing import TypeVar

from tiercel.config import parse_bytes, parse_seconds
from tiercel.errors import ConfigError
from tiercel.plan.simulate.costs import PrefillCost, Prices, TierSpec

T = TypeVar("T")

TIER_ACCEPTED = "NAME=SIZE,BANDWIDTH/s[,LATENCY][,shared], such as ssd=8TB,25GB/s,0.2ms"
PREFILL_ACCEPTED = "TOKENS=TIME, such as 8192=0.9s"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,30}")


def parse_tier(text: str) -> TierSpec:
    """Return the tier of `--tier NAME=SIZE,BANDWIDTH/s[,LATENCY][,shared]`."""
    name, parts = _named("--tier", text, TIER_ACCEPTED)
    shared = parts[-1] == "shared"
    if shared:
        parts = parts[:-1]
    if not 2 <= len(parts) <= 3 or not parts[1].endswith("/s"):
        raise ConfigError(f"--tier: '{text}' is not understood; accepted: {TIER_ACCEPTED}")
    capacity = _part("--tier", text, parse_bytes, parts[0])
    rate = _part("--tier", text, parse_bytes, parts[1].removesuffix("/s"))
    latency_s = _part("--tier", text, parse_seconds, parts[2]) if len(parts) == 3 else 0.0
    return TierSpec(name, capacity, float(rate), latency_s, shared)


def parse_sizes(flag: str, text: str) -> list[int]:
    """Return the bytes of a list such as `1TB,2TB`."""
    return [_part(flag, text, parse_bytes, part) for part in text.split(",")]


def parse_prices(texts: Sequence[str], as_of: str | None) -> Prices | None:
    """Return the prices of `--price gpu-hour=3.5 --price ssd=0.2`, None if there are none.

    `gpu-hour` is per GPU; any other name is a tier's, per GB (1e9 bytes) and month.
    """
    if not texts:
        return None
    if as_of is None:
        raise ConfigError("--price needs --prices-as-of, the day they held, such as 2026-11-30")
    try:
        date.fromisoformat(as_of)
    except ValueError:
        raise ConfigError(f"--prices-as-of: '{as_of}' is not a date; accepted: such as 2026-11-30") from None
    prices: dict[str, float] = {}
    for text in texts:
        name, parts = _named("--price", text, "NAME=AMOUNT, such as gpu-hour=3.50 or ssd=0.20")
        prices[name] = _amount("--price", text, ",".join(parts))
    if "gpu-hour" not in prices:
        raise ConfigError("--price: gpu-hour is missing; accepted: gpu-hour=AMOUNT beside the tiers'")
    return Prices(as_of, prices.pop("gpu-hour"), prices)


def parse_endurance(texts: Sequence[str]) -> dict[str, int]:
    """Return rated bytes written per tier, of `--endurance ssd=14000TB`."""
    rated = {}
    for text in texts:
        name, parts = _named("--endurance", text, "NAME=SIZE, such as ssd=14000TB")
        rated[name] = _part("--endurance", text, parse_bytes, ",".join(parts))
    return rated


def fit_prefill(texts: Sequence[str]) -> PrefillCost:
    """Return the cost through measured points `--prefill 8192=0.9s --prefill 32768=4.4s`.

    One point: all linear. More: least squares of `a * n + b * n^2 / 2`, neither below zero.
    """
    points: list[tuple[int, float]] = []
    for text in texts:
        tokens, equals, seconds = text.partition("=")
        if not equals or not tokens.isdecimal() or int(tokens) < 1:
            raise ConfigError(f"--prefill: '{text}' is not understood; accepted: {PREFILL_ACCEPTED}")
        points.append((int(tokens), _part("--prefill", text, parse_seconds, seconds)))
    # Relative errors count: each point is divided by its own time.
    rows = [(n / t, n * n / 2 / t) for n, t in points if t > 0]
    if len(rows) < len(points):
        raise ConfigError(f"--prefill: a time of 0 in {', '.join(texts)}; accepted: {PREFILL_ACCEPTED}")
    xx, xy, yy = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = sum(r[0] for r in rows), sum(r[1] for r in rows)
    determinant = xx * yy - xy * xy
    if len({n for n, _ in points}) < 2 or determinant <= 1e-12 * xx * yy:
        return PrefillCost(x / xx)
    linear, quadratic = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
    if linear < 0:
        return PrefillCost(0.0, y / yy)
    return PrefillCost(linear, quadratic) if quadratic >= 0 else PrefillCost(x / xx)


def _named(flag: str, text: str, accepted: str) -> tuple[str, list[str]]:
    name, equals, rest = text.partition("=")
    if not equals or not _NAME.fullmatch(name) or not rest:
        raise ConfigError(f"{flag}: '{text}' is not understood; accepted: {accepted}")
    return name, [part.strip() for part in rest.split(",")]


def _part(flag: str, text: str, parse: Callable[[str], T], part: str) -> T:
    try:
        return parse(part)
    except ConfigError as error:
        raise ConfigError(f"{flag} {text}: {error}") from None


def _amount(flag: str, text: str, part: str) -> float:
    try:
        amount = float(part)
    except ValueError:
        amount = math.nan
    if not math.isfinite(amount) or amount < 0:
        raise ConfigError(f"{flag}: '{text}' is no amount; accepted: 0 or more, such as 3.50")
    return amount
