"""How blocks are kept where they need not lie as the engine has them: smaller, exactly or nearly.

Turns a payload into fewer bytes and back. Knows no tier, no key and no checksum; which codec a tier uses, and
that only marked blocks go through a lossy one, is `tiercel.tiers.coded`'s.
"""

from __future__ import annotations

from tiercel.codecs.base import Codec
from tiercel.codecs.mark import LossyTiers, Mark, marked
from tiercel.codecs.names import LOSSY, codec_named, codec_numbered, codec_of
from tiercel.codecs.shape import BlockShape

__all__ = [
    "LOSSY",
    "BlockShape",
    "Codec",
    "LossyTiers",
    "Mark",
    "codec_named",
    "codec_numbered",
    "codec_of",
    "marked",
]
