"""The first tokens of each layer without a window, kept on the device for the sequences that run.

Host memory holds them too: here are copies, brought when they are first needed. There is a share for each of
the sequences that run at once; one more that takes a step in between takes over the share that was used
longest ago, which costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.attention.device import Lot
from tiercel.engines.device import copy_rows
from tiercel.engines.transformers.layout import BlockLayout


class Share:
    """Room for `tokens` tokens of one sequence, of every layer that sees all (no window)."""

    def __init__(self, layout: BlockLayout, windows: Sequence[int | None], lot: Lot, tokens: int) -> None:
        self.buffers: list[tuple[Tensor, Tensor] | None] = []
        for shape, window in zip(layout.shapes, windows, strict=True):
            room = tokens if window is None else 0
            self.buffers.append(
                (
                    lot.empty([shape.kv_heads, room, shape.key_dim], layout.dtype),
                    lot.empty([shape.kv_heads, room, shape.value_dim], layout.dtype),
                )
                if room
                else None
            )
        self._there = [0] * len(self.buffers)

    def cut(self, tokens: int) -> None:
        """Of what is here, only the first `tokens` tokens are still what the sequence has."""
        self._there = [min(there, tokens) for there in self._there]

    @torch.inference_mode()
    def bring(self, layer: int, stop: int, source: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens `0..stop-1`, [kv_heads, stop, dim]; `source` has them in host memory."""
        buffers, there = self.buffers[layer], self._there[layer]
        assert buffers is not None
        assert stop <= buffers[0].shape[1], (layer, stop)
        if there < stop:
            for target, whole in zip(buffers, source, strict=True):
                copy_rows(target[:, there:stop], whole[:, there:stop])
            self._there[layer] = stop
        return buffers[0][:, :stop], buffers[1][:, :stop]


class Residents:
    """`shares` of `tokens` tokens each."""

    def __init__(
        self, layout: BlockLayout, windows: Sequence[int | None], lot: Lot, tokens: int, shares: int = 1
    ) -> None:
        self.tokens = tokens
        self._sees_all = [window is None for window in windows]
        self.shares = [Share(layout, windows, lot, tokens) for _ in range(shares)]
        self._free = list(self.shares)
        self._owned: dict[object, Share] = {}  # what was used longest ago comes first

    def covers(self, layer: int, stop: int) -> bool:
        """Whether tokens `0..stop-1` of `layer` have room in a share."""
        return self._sees_all[layer] and 0 < stop <= self.tokens

    def of(self, owner: object) -> Share:
        """The share that is `owner`'s from now on."""
        share = self._owned.pop(owner, None)
        if share is None:
            share = self._free.pop() if self._free else self._owned.pop(next(iter(self._owned)))
            share.cut(0)
        self._owned[owner] = share
        return share

    def cut(self, owner: object, tokens: int) -> None:
        """Of what is here of `owner`, only the first `tokens` tokens are still what it has."""
        if (share := self._owned.get(owner)) is not None:
            share.cut(tokens)

    def give_back(self, owner: object) -> None:
        """`owner` runs no longer."""
        if (share := self._owned.pop(owner, None)) is not None:
            self._free.append(share)
