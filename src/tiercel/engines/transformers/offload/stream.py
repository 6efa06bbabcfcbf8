"""Brings pieces of KV from host memory to the device, each while the one before it is computed with.

Two staging pieces take turns: FlexGen's schedule (Sheng et al., arXiv 2303.06865), by layers, in a layer by
sequences and, where one is larger than a piece, by parts of it. The order of a step is known when it begins.
It computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tiercel.attention.device import Lot
from tiercel.engines.device import Arrival, Copier
from tiercel.engines.transformers.layout import BlockLayout, LayerShape
from tiercel.engines.transformers.offload.budget import STAGING_PIECES


class Source(Protocol):
    """One sequence's KV in host memory."""

    def host(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, each [kv_heads, capacity, dim]."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start..stop-1` of one layer of a sequence."""

    source: Source
    layer: int
    start: int
    stop: int


class Stream:
    """One thread's. `copied_bytes` counts what was brought, in `pieces`; `ready` were there in time."""

    def __init__(self, layout: BlockLayout, lot: Lot, copier: Copier, piece_tokens: int) -> None:
        self._shapes, self._piece_tokens, self.copier = layout.shapes, piece_tokens, copier
        elements = piece_tokens * max(shape.elements for shape in layout.shapes)
        self._staging = [lot.empty([elements], layout.dtype) for _ in range(STAGING_PIECES)]
        self._pieces: Sequence[Piece] = ()
        self._next = 0
        self._arrival: Arrival | None = None
        self.copied_bytes = self.pieces = self.ready = 0

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Bring `pieces` in this order from now on; what is left of the last step is forgotten."""
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            arrival.wait()  # a buffer is written until its copy has ended
        self._pieces, self._next = pieces, 0
        self._arrival = self._start(0)

    def take(self) -> tuple[Piece, Tensor, Tensor]:
        """The next piece, with its keys and values [kv_heads, tokens, dim].

        They are valid until the next call, which lets the piece after it overwrite them.
        """
        index, arrival = self._next, self._arrival
        assert arrival is not None
        self._next += 1
        self._arrival = self._start(self._next)
        self.pieces += 1
        self.ready += arrival.done()
        arrival.wait()
        return self._pieces[index], *self._views(index)

    def _start(self, index: int) -> Arrival | None:
        if index == len(self._pieces):
            return None
        piece = self._pieces[index]
        pairs = [
            (target, whole[:, piece.start : piece.stop])
            for target, whole in zip(self._views(index), piece.source.host(piece.layer), strict=True)
        ]
        self.copied_bytes += sum(target.nbytes for target, _ in pairs)
        return self.copier.start(pairs)

    def _views(self, index: int) -> tuple[Tensor, Tensor]:
        piece, flat = self._pieces[index], self._staging[index % STAGING_PIECES]
        shape, tokens = self._shapes[piece.layer], piece.stop - piece.start
        keys, values = _parted(flat, shape, self._piece_tokens)
        return keys[:, :tokens], values[:, :tokens]


def _parted(flat: Tensor, shape: LayerShape, tokens: int) -> tuple[Tensor, Tensor]:
    """A buffer as keys and values of `tokens` tokens."""
    split = shape.kv_heads * tokens * shape.key_dim
    end = shape.kv_heads * tokens * shape.value_dim + split
    return (
        flat[:split].view(shape.kv_heads, tokens, shape.key_dim),
        flat[split:end].view(shape.kv_heads, tokens, shape.value_dim),
    )
