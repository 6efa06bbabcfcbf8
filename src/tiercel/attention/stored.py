"""KV that was stored by a lossy codec and restored: what a tier with that codec gives back, as a policy.

Everything is read, nothing is chosen; the budget means nothing. The block that is coded is the whole context
of one layer and row, which differs from a tier's blocks only where a codec looks at several tokens at once.
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
    """The context's keys (post-RoPE) and values after `codec`; tokens that come later are exact.

    On the device they are as large as ever: what gets smaller is what is kept in the tier.
    """

    codec: Codec
    drops: bool = False

    @property
    def name(self) -> str:
        return self.codec.name

    def prepare(self, context: LayerContext, budget: Tensor, seen: Observer | None) -> Fixed:
        keys, values = context.keys.clone(), context.values.clone()
        stored = 0
        for row, real in enumerate(context.real):
            begin = int(real.shape[0] - real.sum())
            pair = [context.keys[row, :, begin:], context.values[row, :, begin:]]
            (keys[row, :, begin:], values[row, :, begin:]), size = self._roundtrip(*pair)
            stored += size
        keep = context.real[:, None].expand(context.heads_shape)
        device = float(keep.sum()) * token_bytes(context)
        return Fixed(keys, values, keep, Bytes(device=device, host=float(stored)))

    def _roundtrip(self, keys: Tensor, values: Tensor) -> tuple[tuple[Tensor, Tensor], int]:
        """Keys and values [kv_heads, tokens, dim] as they come back, and the bytes they were."""
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
            return (keys, values), payload.nbytes
        back = torch.empty_like(block)
        restored = back.view(torch.uint8).flatten().numpy().data
        if not self.codec.decode(into.data[:size], restored, shape):
            raise ModelError(f"codec {self.name}: does not read what it wrote")
        both = back[0].to(keys.device)
        return (both[0], both[1]), size
