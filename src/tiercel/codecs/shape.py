"""What numbers a payload holds, as far as codecs need to know.

    bfloat16:30,2,3,256,64     [layers, K and V, kv_heads, tokens, head_dim], as transformers' engine has it
    bfloat16/htsc:3,16,64      parts of (kv_heads, tokens, head_dim) that follow each other; in each the axes,
                               outermost first: heads, tokens, sides (K, then V), channels
    bfloat16:64                rows of head_dim numbers, one per token and head, in any order

It stands as text in a block's identity, and so in its record, where whoever encodes and decodes finds it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy.typing as npt

# Bytes of one number, by its name in identities.
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Of a part: head by head or token by token with K and V side by side; or of a head first all K, the tokens of
# one channel after those of the other, then all V, token by token.
BY_HEAD, BY_TOKEN, KEYS_BY_CHANNEL = "htsc", "thsc", "hsct"
_ORDERS = (BY_HEAD, BY_TOKEN, KEYS_BY_CHANNEL)
_TEXT = re.compile(r"([a-z0-9]+)(?:/([a-z]+))?:([1-9][0-9]{0,8}(?:,[1-9][0-9]{0,8}){0,4})", re.ASCII)
_BLOCK, _PART, _ROW = 5, 3, 1

# Numbers of a payload as numpy has them, in any form.
Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class BlockShape:
    """`dtype` is one of `ITEM_BYTES`; `sizes` five numbers for a whole block, three for a part of it with the
    `order` of its axes, or one, a row's.
    """

    dtype: str
    sizes: tuple[int, ...]
    order: str = ""

    def __post_init__(self) -> None:
        wanted = (_PART,) if self.order in _ORDERS else () if self.order else (_ROW, _BLOCK)
        if self.dtype not in ITEM_BYTES or len(self.sizes) not in wanted or min(self.sizes) < 1:
            raise ValueError(f"{self} is no shape of a block")
        if len(self.sizes) == _BLOCK and self.sizes[1] != 2:
            raise ValueError(f"{self}: a block has keys and values")

    @property
    def row(self) -> int:
        """Numbers in a row: head_dim."""
        return self.sizes[-1]

    @property
    def tokens(self) -> int | None:
        """Tokens that lie together in one part, where that is known."""
        return None if len(self.sizes) == _ROW else self.sizes[-2]

    @property
    def item_bytes(self) -> int:
        """Bytes of one number."""
        return ITEM_BYTES[self.dtype]

    def as_rows(self) -> BlockShape | None:
        """The shape that says less: only rows; None where a token's channels do not lie side by side."""
        return None if self.order == KEYS_BY_CHANNEL else BlockShape(self.dtype, (self.row,))

    def covers(self, payload_bytes: int) -> bool:
        """Whether a payload of so many bytes has this shape."""
        unit = math.prod(self.sizes) * self.item_bytes * (2 if self.order else 1)
        if len(self.sizes) == _BLOCK:
            return payload_bytes == unit
        return payload_bytes % unit == 0 < payload_bytes

    def sides(self, numbers: Numbers) -> tuple[Numbers, Numbers] | None:
        """Keys and values as views [parts, kv_heads, tokens, head_dim]; None where only rows are known.

        `numbers` are those of a payload that this shape covers, one after the other.
        """
        if len(self.sizes) == _ROW:
            return None
        if len(self.sizes) == _BLOCK:
            block = numbers.reshape(self.sizes)
            return block[:, 0], block[:, 1]
        heads, tokens, width = self.sizes
        if self.order == KEYS_BY_CHANNEL:
            keys = numbers.reshape(-1, heads, 2, width, tokens)[:, :, 0].swapaxes(2, 3)
            return keys, numbers.reshape(-1, heads, 2, tokens, width)[:, :, 1]
        if self.order == BY_HEAD:
            parts = numbers.reshape(-1, heads, tokens, 2, width)
            return parts[:, :, :, 0], parts[:, :, :, 1]
        parts = numbers.reshape(-1, tokens, heads, 2, width).swapaxes(1, 2)
        return parts[:, :, :, 0], parts[:, :, :, 1]

    def panels(self, numbers: Numbers, at_once: int) -> Iterator[tuple[Numbers, bool]]:
        """Views [parts, kv_heads, tokens, head_dim] of whole heads, about `at_once` numbers each, and whether
        they are keys; only where that is known. No view has more numbers than the first.
        """
        sides = self.sides(numbers)
        assert sides is not None
        count, heads, tokens, width = sides[0].shape
        step = max(1, at_once // (tokens * width))
        together = max(1, step // heads)
        for first in range(0, count, together):
            for side, keys in zip(sides, (True, False), strict=True):
                for at in range(0, heads, step):
                    yield side[first : first + together, at : at + step], keys

    def rows(self, numbers: Numbers, at_once: int) -> list[Numbers]:
        """All rows as views whose last axis is a token's channels of one head, about `at_once` numbers each.

        No view has more rows than the first; their order is the same, however many are taken at once.
        """
        if self.order != KEYS_BY_CHANNEL:
            lines = numbers.reshape(-1, self.row)
            step = max(1, at_once // self.row)
            return [lines[at : at + step] for at in range(0, len(lines), step)]
        sides = self.sides(numbers)
        assert sides is not None
        step = max(1, at_once // math.prod(self.sizes))
        return [side[at : at + step] for side in sides for at in range(0, len(side), step)]

    def __str__(self) -> str:
        return f"{self.dtype}{'/' if self.order else ''}{self.order}:{','.join(map(str, self.sizes))}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The shape that a text names; None for any other text."""
        found = _TEXT.fullmatch(text)
        if found is None:
            return None
        try:
            return cls(found[1], tuple(map(int, found[3].split(","))), found[2] or "")
        except ValueError:
            return None
