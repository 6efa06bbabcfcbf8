"""The places that `tiercel cache` is told to look at: a directory, a URL, or a tier of the configuration.

Nothing is made here: a directory that is not a cache, or a place that does not answer, is one line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tiercel.config import Config, TierConfig
from tiercel.config.schema import FILES, MEMORY
from tiercel.config.tiers import tier_kinds
from tiercel.config.values import masked
from tiercel.errors import ConfigError, TierError
from tiercel.store.inspect import CachePlace
from tiercel.tiers.registry import open_tier, tier_names

# Which kind of tier a URL names; any other scheme is the name of a kind, ours or another package's.
_KINDS = {
    "valkeys": "valkey",
    "redis": "valkey",
    "rediss": "valkey",
    "s3": "objects",
    "gs": "objects",
    "az": "objects",
}
# Room for any block, where the configuration does not say how long ours are.
_SLOT_BYTES = 64 << 20


def configured(config: Config) -> dict[str, TierConfig]:
    """The tiers of a configuration by the names they have in figures and logs."""
    return dict(zip(tier_names([tier.kind for tier in config.tiers]), config.tiers, strict=True))


def tier_of(text: str, config: Config) -> TierConfig:
    """What `text` names: a tier of `config` by name or number (from 0), a URL, or else a directory."""
    tiers = configured(config)
    if text in tiers:
        return tiers[text]
    if text.isdecimal() and not Path(text).exists():
        if int(text) < len(config.tiers):
            return config.tiers[int(text)]
        raise ConfigError(
            f"no tier {text} in the configuration; accepted: a directory, a URL, or of the configured tiers "
            f"{', '.join(f'{at} ({name})' for at, name in enumerate(tiers)) or 'none'}"
        )
    if "://" in text:
        scheme = text.partition("://")[0].lower()
        kind = _KINDS.get(scheme, scheme)
        if kind not in tier_kinds() or kind == FILES:
            raise ConfigError(
                f"'{masked(text)}': '{scheme}' is no kind of tier; accepted: a directory or a URL"
            )
        return TierConfig(kind=kind, url=text)
    return TierConfig(kind=FILES, path=Path(text))


def open_place(tier: TierConfig, config: Config, *, create: bool = False) -> CachePlace:
    """Open a tier to look at it, or with `create` to write to it. Raises `TierError`, one line."""
    if tier.kind == MEMORY:
        raise TierError(
            f"a tier of kind '{MEMORY}' lies in the process that uses it: there is nothing to look at from "
            "outside; accepted: a tier of another kind (`tiercel top` shows what a running one holds)"
        )
    # What does not answer now is no tier to look at.
    asked = dataclasses.replace(tier, required=True)
    slot_bytes = config.ram.slot_bytes or _SLOT_BYTES
    shown = str(tier.path) if tier.kind == FILES else masked(tier.url or tier.kind)
    return CachePlace(open_tier(asked, shown, slot_bytes, create=create), shown)


def open_places(texts: Sequence[str], config: Config, stack: ExitStack) -> list[CachePlace]:
    """Open every place named, or without names every tier of the configuration; closed with `stack`.

    Of those not named, tiers in the memory of another process are passed over, if there are others.
    """
    outside = [tier for tier in config.tiers if tier.kind != MEMORY] or config.tiers
    tiers = [tier_of(text, config) for text in dict.fromkeys(texts)] if texts else outside
    if not tiers:
        raise ConfigError("no cache named: give a directory or a URL, or a configuration with tiers")
    places = []
    # All of them before anything is done to one.
    for tier in tiers:
        place = open_place(tier, config)
        stack.callback(place.close)
        places.append(place)
    return places
