"""KV that was stored by a lossy codec and restored: what a tier with that codec gives back, as a policy.

Everything is read, nothing is chosen; the budget means nothing. As a tier does, it codes whole blocks; what
is left at the end of the prompt is not stored there and stays exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.attention.policy import Blind, Bytes, Fixed, LayerContext, Observer, token_bytes
from tiercel.codecs.base import Codec
from tiercel.codecs.shape import BlockShape
from tiercel.errors import ModelError

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@dataclass(frozen=True, slots=True)
class Stored(Blind):
    """The keys (post-RoPE) and values of each whole block of `block_tokens` after `codec`; later ones are
    exact.

    On the device they are as large as ever: what gets smaller is what is kept in the tier.
    """

    codec: Codec
    block_tokens: int = 256
    drops: bool = False

    @property
    def name(self) -> str:
        return self.codec.name

    def prepare(self, context: LayerContext, budget: Tensor, seen: Observer | None) -> Fixed:
        keys, values = context.keys.clone(), context.values.clone()
        keep = context.real[:, None].expand(context.heads_shape)
        full_bytes = float(keep.sum()) * token_bytes(context)
        stored_bytes = full_bytes
        for row, real in enumerate(context.real):
            end = real.shape[0]
            begin = end - int(real.sum())
            for at in range(begin, end - self.block_tokens + 1, self.block_tokens):
                part = (row, slice(None), slice(at, at + self.block_tokens))
                keys[part], values[part], saved = self._roundtrip(context.keys[part], context.values[part])
                stored_bytes -= saved
        return Fixed(keys, values, keep, Bytes(device=full_bytes, host=stored_bytes))

    def _roundtrip(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, int]:
        """Keys and values [kv_heads, tokens, dim] as they come back, and the bytes that coding saves."""
        if keys.shape != values.shape or keys.dtype not in _DTYPES:
            raise ModelError(
                f"codec {self.name}: cannot keep keys {tuple(keys.shape)} and values {tuple(values.shape)}"
            )
        block = torch.stack([keys, values])[None].contiguous().cpu()
        shape = BlockShape(_DTYPES[block.dtype], tuple(block.shape))
        payload = block.view(torch.uint8).flatten().numpy()
        if not self.codec.fits(shape, payload.nbytes):
            raise ModelError(f"codec {self.name}: cannot keep blocks of shape {shape}")
        into = torch.zeros(payload.nbytes, dtype=torch.uint8).numpy()
        size = self.codec.encode(payload.data, into.data, shape)
        if size is None:  # kept as it is
            return keys, values, 0
        back = torch.empty_like(block)
        if not self.codec.decode(into.data[:size], back.view(torch.uint8).flatten().numpy().data, shape):
            raise ModelError(f"codec {self.name}: does not read what it wrote")
        both = back[0].to(keys.device)
        return both[0], both[1], payload.nbytes - size
