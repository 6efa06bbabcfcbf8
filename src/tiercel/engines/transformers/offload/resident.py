"""The first tokens of each layer without a window, kept on the device for the sequence that runs.

Host memory holds them too: here is a copy, brought when it is first needed. One sequence has them at a
time; another one that takes a step in between brings its own, which costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.attention.device import Lot
from tiercel.engines.device import copy_rows
from tiercel.engines.transformers.layout import BlockLayout


class Residents:
    """Room for `tokens` tokens of every layer that sees all (no window)."""

    def __init__(self, layout: BlockLayout, windows: Sequence[int | None], lot: Lot, tokens: int) -> None:
        self.tokens = tokens
        self._buffers: list[tuple[Tensor, Tensor] | None] = []
        for shape, window in zip(layout.shapes, windows, strict=True):
            room = tokens if window is None else 0
            self._buffers.append(
                (
                    lot.empty([shape.kv_heads, room, shape.key_dim], layout.dtype),
                    lot.empty([shape.kv_heads, room, shape.value_dim], layout.dtype),
                )
                if room
                else None
            )
        self._owner: object = None
        self._there = [0] * len(self._buffers)

    def covers(self, layer: int, stop: int) -> bool:
        """Whether tokens `0..stop-1` of `layer` have room here."""
        return self._buffers[layer] is not None and stop <= self.tokens

    def own(self, owner: object) -> None:
        """From now on it is `owner`'s."""
        if owner is not self._owner:
            self._owner, self._there = owner, [0] * len(self._buffers)

    def cut(self, owner: object, tokens: int) -> None:
        """Of what is here of `owner`, only the first `tokens` tokens are still what it has."""
        if owner is self._owner:
            self._there = [min(there, tokens) for there in self._there]

    @torch.inference_mode()
    def bring(self, layer: int, stop: int, source: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens `0..stop-1`, [kv_heads, stop, dim]; `source` has them in host memory."""
        buffers, there = self._buffers[layer], self._there[layer]
        assert buffers is not None
        assert stop <= self.tokens, (layer, stop)
        if there < stop:
            for target, whole in zip(buffers, source, strict=True):
                copy_rows(target[:, there:stop], whole[:, there:stop])
            self._there[layer] = stop
        return buffers[0][:, :stop], buffers[1][:, :stop]
