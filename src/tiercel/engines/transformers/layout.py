"""How a block's KV lies in a payload: the byte layout `LKHTD`, version 1.

    payload = for each layer: K then V, each [kv_heads, tokens, head_dim], contiguous, in the KV dtype

Where all layers are alike this is one array [layers, 2, kv_heads, tokens, head_dim]. It never touches bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import torch

from tiercel.codecs.shape import ITEM_BYTES, BlockShape

LAYOUT_VERSION = "transformers/LKHTD/1"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps per token: `kv_heads` keys of `key_dim` and values of `value_dim` elements."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        """Elements per token."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class Run:
    """Layers `first .. first+layers-1`, all of one shape, so that one strided copy moves them together."""

    first: int
    layers: int
    shape: LayerShape


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The layout of one model's blocks of `block_tokens` tokens."""

    shapes: tuple[LayerShape, ...]
    dtype: torch.dtype
    block_tokens: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV in all layers."""
        return sum(shape.elements for shape in self.shapes) * self.dtype.itemsize

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block's payload."""
        return self.token_bytes * self.block_tokens

    def runs(self) -> Iterator[Run]:
        """Neighbouring layers of one shape, in order; a layer whose K and V differ stands alone."""
        first = 0
        for index, shape in enumerate(self.shapes):
            following = self.shapes[index + 1] if index + 1 < len(self.shapes) else None
            if following == shape and shape.key_dim == shape.value_dim:
                continue
            yield Run(first=first, layers=index + 1 - first, shape=shape)
            first = index + 1

    def shape(self) -> BlockShape | None:
        """The payload as codecs see it; None where layers differ, or keys from values."""
        first = self.shapes[0]
        dtype = str(self.dtype).removeprefix("torch.")
        if set(self.shapes) != {first} or first.key_dim != first.value_dim or dtype not in ITEM_BYTES:
            return None
        return BlockShape(dtype, (len(self.shapes), 2, first.kv_heads, self.block_tokens, first.key_dim))

    def digest(self) -> bytes:
        """32 bytes that name these shapes, for models whose geometry has no name of its own."""
        shown = ";".join(f"{shape.kv_heads},{shape.key_dim},{shape.value_dim}" for shape in self.shapes)
        return blake2b(f"probed:{self.dtype}:{shown}".encode(), digest_size=32).digest()
