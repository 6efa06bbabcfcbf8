"""The codecs there are, by what they are called in settings and by their number in record headers."""

from __future__ import annotations

from functools import cache

from tiercel.codecs.base import Codec
from tiercel.codecs.fp8 import Fp8
from tiercel.codecs.int4 import Int4
from tiercel.codecs.int8 import Int8
from tiercel.errors import ConfigError

# What is kept is nearly what was stored; see docs/codecs.md for how nearly.
LOSSY: dict[str, Codec] = {one.name: one for one in (Int8(), Fp8(), Int4())}
_LOSSLESS, _LOSSLESS_NUMBER = "lossless", 1


def codec_of(setting: str) -> Codec | None:
    """The codec that a tier's setting names; None for `none`. Raises ConfigError as `codec_named` does."""
    return None if setting == "none" else codec_named(setting)


def codec_named(name: str) -> Codec:
    """The codec of a setting. Raises ConfigError where the package it needs is not installed."""
    return LOSSY[name] if name in LOSSY else _lossless()


def codec_numbered(number: int) -> Codec | None:
    """The codec of a record; None for one that is not known, or cannot be used, here."""
    if number == _LOSSLESS_NUMBER:
        try:
            return _lossless()
        except ConfigError:
            return None
    return next((one for one in LOSSY.values() if one.number == number), None)


@cache
def _lossless() -> Codec:
    try:
        from tiercel.codecs.lossless import Lossless
    except ImportError as fault:
        raise ConfigError(
            f"codec '{_LOSSLESS}' needs the package '{fault.name}', which is not installed; "
            "accepted: pip install 'tiercel[codecs]'"
        ) from None
    return Lossless()
