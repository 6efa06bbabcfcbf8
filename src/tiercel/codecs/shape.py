"""What numbers a payload holds, as far as codecs need to know.

    bfloat16:30,2,3,256,64     [layers, K and V, kv_heads, tokens, head_dim], as transformers' engine has it
    bfloat16:64                rows of head_dim numbers, one per token and head, in any order

It stands as text in a block's identity, and so in its record, where whoever encodes and decodes finds it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Self

# Bytes of one number, by its name in identities.
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_TEXT = re.compile(r"([a-z0-9]+):([1-9][0-9]{0,8}(?:,[1-9][0-9]{0,8}){0,4})", re.ASCII)
_FULL = 5


@dataclass(frozen=True, slots=True)
class BlockShape:
    """`dtype` is one of `ITEM_BYTES`; `sizes` five numbers for a whole block, or one, a row's."""

    dtype: str
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES or len(self.sizes) not in (1, _FULL) or min(self.sizes) < 1:
            raise ValueError(f"{self} is no shape of a block")

    @property
    def row(self) -> int:
        """Numbers in a row: head_dim."""
        return self.sizes[-1]

    @property
    def full(self) -> tuple[int, int, int, int, int] | None:
        """(layers, 2, kv_heads, tokens, head_dim), where that is known."""
        if len(self.sizes) != _FULL:
            return None
        layers, sides, heads, tokens, width = self.sizes
        return layers, sides, heads, tokens, width

    @property
    def item_bytes(self) -> int:
        """Bytes of one number."""
        return ITEM_BYTES[self.dtype]

    def covers(self, payload_bytes: int) -> bool:
        """Whether a payload of so many bytes has this shape."""
        unit = math.prod(self.sizes) * self.item_bytes
        return (
            payload_bytes == unit if len(self.sizes) == _FULL else payload_bytes % unit == 0 < payload_bytes
        )

    def __str__(self) -> str:
        return f"{self.dtype}:{','.join(map(str, self.sizes))}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The shape that a text names; None for any other text."""
        found = _TEXT.fullmatch(text)
        if found is None:
            return None
        try:
            return cls(found[1], tuple(map(int, found[2].split(","))))
        except ValueError:
            return None
