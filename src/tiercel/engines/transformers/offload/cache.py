"""The cache whose KV lies in host memory, and a layer's attention to it.

    prefill (several new tokens)   pieces on a fixed grid: those that stay on the device from there, others
                                   streamed; then the new tokens themselves
    decoding (one new token)       what stays on the device there; the rest where it lies, in host memory: the
                                   queries go there and a few numbers come back

What is stored of it is all KV of a prefill, and the grid does not depend on what stays on the device, so its
bits do not depend on the budget, as long as the pieces are of one size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tiercel.engines.device import copy_rows, host_empty, wait_for_device
from tiercel.engines.transformers.kv_cache import BufferedLayer, KVCache
from tiercel.engines.transformers.layout import BlockLayout
from tiercel.engines.transformers.offload.partial import Asking, Partial, attend, merged
from tiercel.engines.transformers.offload.stream import Piece

if TYPE_CHECKING:
    from tiercel.engines.transformers.offload.offload import Offload

# What a model's keys carry from the cache to its attention: the layer whose they are.
MARK = "_tiercel_layer"


class OffloadedLayer(BufferedLayer):  # type: ignore[no-untyped-call]  # transformers has no types
    """One layer, whose update gives back the new keys and values only: earlier ones come by `attend`."""

    _owner: OffloadedCache

    def __init__(self, owner: OffloadedCache, slab: Any, index: int, number: int) -> None:
        super().__init__(owner, slab, index)
        self._number = number

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [1, kv_heads, new, dim] to host memory; returns them as they are, marked as this layer's."""
        start, stop = self.length, self.length + key_states.shape[-2]
        self._owner.reserve(stop)
        copy_rows(self._keys[0, :, start:stop], key_states[0])
        copy_rows(self._values[0, :, start:stop], value_states[0])
        self.length = stop
        if self._number == 0:
            self._owner.begin(start, stop - start)
        setattr(key_states, MARK, self)
        return key_states, value_states

    @property
    def window(self) -> int | None:
        """How far back the layer sees (None: all)."""
        return self._owner.window(self._number)

    def host(self) -> tuple[Tensor, Tensor]:
        """Keys and values in host memory, [kv_heads, capacity, dim]."""
        return self._keys[0], self._values[0]

    def attend(self, asking: Asking, keys: Tensor, values: Tensor) -> Partial:
        """Attention of the tokens just appended, whose own `keys` and `values` are [kv_heads, new, dim]."""
        return self._owner.attend(self._number, asking, keys, values)


class OffloadedCache(KVCache):
    """One sequence's KV in host memory. What lies on the device is shared with the engine's other caches."""

    def __init__(self, layout: BlockLayout, device: torch.device, offload: Offload) -> None:
        self._offload = offload
        super().__init__(layout, device)

    def _empty(self, *sizes: int) -> Tensor:
        return host_empty(sizes, self.layout.dtype, self.device)

    def _layer(self, slab: Any, index: int) -> OffloadedLayer:
        return OffloadedLayer(self, slab, index, len(self._buffered))

    def window(self, layer: int) -> int | None:
        """How far back a layer sees (None: all)."""
        return self._offload.windows[layer]

    def host(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer in host memory, [kv_heads, capacity, dim]."""
        buffered = self._buffered[layer]
        assert isinstance(buffered, OffloadedLayer)
        return buffered.host()

    def reserve(self, tokens: int, *, exactly: bool = False) -> None:
        """Make room for `tokens` tokens in all, with some to spare unless `exactly`."""
        if tokens > self.capacity:
            wait_for_device(self.device)  # copies into the buffers that are left behind
        super().reserve(tokens, exactly=exactly)

    def clear(self) -> None:
        """Forget all tokens; the buffers stay."""
        super().clear()
        self._offload.residents.cut(self, 0)

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` tokens; the cache must hold at least as many."""
        super().truncate(tokens)
        self._offload.residents.cut(self, tokens)

    def save_block(self, index: int, payload: memoryview) -> None:
        """Copy block `index`, which must be complete, out into `payload`."""
        wait_for_device(self.device)
        super().save_block(index, payload)

    def begin(self, first: int, new: int) -> None:
        """A step of `new` tokens behind `first` begins: say in which order pieces will be needed."""
        offload = self._offload
        offload.residents.own(self)
        offload.residents.cut(self, first)
        pieces: list[Piece] = []
        if new >= offload.stream_from_tokens:
            for layer in range(len(self._buffered)):
                pieces += [one for one in self._pieces(layer, first) if not self._stays(one)]
        offload.stream.begin(pieces, self.host)

    def attend(self, layer: int, asking: Asking, keys: Tensor, values: Tensor) -> Partial:
        """Attention of new tokens to everything before, by parts, and to themselves."""
        parts = self._streamed if asking.new >= self._offload.stream_from_tokens else self._where_it_lies
        before: Partial | None = None
        for part in parts(layer, asking):
            before = merged(before, part)
        return merged(before, attend(asking, keys, values, asking.first))

    def _streamed(self, layer: int, asking: Asking) -> Iterator[Partial]:
        for piece in self._pieces(layer, asking.first):
            if self._stays(piece):
                keys, values = self._offload.residents.bring(layer, piece.stop, self.host(layer))
                keys, values = keys[:, piece.start :], values[:, piece.start :]
            else:
                arrived, keys, values = self._offload.stream.take()
                assert arrived == piece, (arrived, piece)
            yield attend(asking, keys, values, piece.start)

    def _where_it_lies(self, layer: int, asking: Asking) -> Iterator[Partial]:
        residents = self._offload.residents
        start = asking.seen_from
        if residents.covers(layer, start + 1) and start < asking.first:
            stop = min(residents.tokens, asking.first)
            keys, values = residents.bring(layer, stop, self.host(layer))
            yield attend(asking, keys[:, start:], values[:, start:], start)
            start = stop
        if start < asking.first:
            # `.to` waits for the device, so all that was appended before has arrived in host memory.
            there = replace(asking, rows=asking.rows.to("cpu"))
            keys, values = (whole[:, start : asking.first] for whole in self.host(layer))
            yield attend(there, keys, values, start).to(self.device)

    def _pieces(self, layer: int, first: int) -> list[Piece]:
        """The tokens before `first` that a step there sees in `layer`, cut where all sequences are cut."""
        window, size = self.window(layer), self._offload.piece_tokens
        start = 0 if window is None else max(0, first - window + 1)
        cuts = [start, *range(start // size * size + size, first, size), first]
        return [Piece(layer, *pair) for pair in pairwise(cuts) if pair[0] < pair[1]]

    def _stays(self, piece: Piece) -> bool:
        return self._offload.residents.covers(piece.layer, piece.stop)
