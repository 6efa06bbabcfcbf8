"""The cache whose KV lies in host memory, and how it is cut for a device that holds little of it.

What is stored of it is all KV of a prefill, and the grid of its pieces does not depend on what stays on the
device, so its bits do not depend on the budget, as long as the pieces are of one size.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tiercel.engines.device import copy_rows, host_empty, wait_for_device
from tiercel.engines.transformers.kv_cache import BufferedLayer, KVCache
from tiercel.engines.transformers.layout import BlockLayout
from tiercel.engines.transformers.offload.partial import Asking
from tiercel.engines.transformers.offload.resident import Share
from tiercel.engines.transformers.offload.stream import Piece

if TYPE_CHECKING:
    from tiercel.engines.transformers.offload.offload import Offload

# What a model's keys carry from the cache to its attention: the layer whose they are.
MARK = "_tiercel_layer"


class OffloadedLayer(BufferedLayer):  # type: ignore[no-untyped-call]  # transformers has no types
    """One layer, whose update gives back the new keys and values only."""

    _owner: OffloadedCache

    def __init__(self, owner: OffloadedCache, slab: Any, index: int, number: int) -> None:
        super().__init__(owner, slab, index)
        self.number = number

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [1, kv_heads, new, dim] to host memory; returns them as they are, marked as this layer's."""
        self.append(key_states[0], value_states[0])
        if self.number == 0:
            self.cache.shared.begin([self.cache], key_states.shape[-2])
        setattr(key_states, MARK, self)
        return key_states, value_states

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append [kv_heads, new, dim] to host memory."""
        start, stop = self.length, self.length + keys.shape[1]
        self._owner.reserve(stop)
        copy_rows(self._keys[0, :, start:stop], keys)
        copy_rows(self._values[0, :, start:stop], values)
        self.length = stop

    @property
    def cache(self) -> OffloadedCache:
        """The cache whose layer it is."""
        return self._owner

    @property
    def window(self) -> int | None:
        """How far back the layer sees (None: all)."""
        return self._owner.shared.windows[self.number]

    def host(self) -> tuple[Tensor, Tensor]:
        """Keys and values in host memory, [kv_heads, capacity, dim]."""
        return self._keys[0], self._values[0]


class OffloadedCache(KVCache):
    """One sequence's KV in host memory. What lies on the device is shared with the engine's other caches."""

    def __init__(self, layout: BlockLayout, device: torch.device, offload: Offload) -> None:
        self.shared = offload
        super().__init__(layout, device)

    def _empty(self, *sizes: int) -> Tensor:
        return host_empty(sizes, self.layout.dtype, self.device)

    def _layer(self, slab: Any, index: int) -> OffloadedLayer:
        return OffloadedLayer(self, slab, index, len(self._buffered))

    def layer(self, number: int) -> OffloadedLayer:
        """One of its layers."""
        layer = self._buffered[number]
        assert isinstance(layer, OffloadedLayer)
        return layer

    def host(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer in host memory, [kv_heads, capacity, dim]."""
        return self.layer(layer).host()

    def reserve(self, tokens: int, *, exactly: bool = False) -> None:
        """Make room for `tokens` tokens in all, with some to spare unless `exactly`."""
        if tokens > self.capacity:
            wait_for_device(self.device)  # copies into the buffers that are left behind
        super().reserve(tokens, exactly=exactly)

    def clear(self) -> None:
        """Forget all tokens; the buffers stay, but for the share of the device."""
        super().clear()
        self.shared.residents.give_back(self)

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` tokens; the cache must hold at least as many."""
        super().truncate(tokens)
        self.shared.residents.cut(self, tokens)

    def save_block(self, index: int, payload: memoryview) -> None:
        """Copy block `index`, which must be complete, out into `payload`."""
        wait_for_device(self.device)
        super().save_block(index, payload)

    def share(self) -> Share:
        """What of the device is this sequence's."""
        return self.shared.residents.of(self)

    def pieces(self, layer: int, first: int) -> list[Piece]:
        """The tokens before `first` that a step there sees in `layer`, cut where all sequences are cut."""
        window, size = self.shared.windows[layer], self.shared.piece_tokens
        start = 0 if window is None else max(0, first - window + 1)
        cuts = [start, *range(start // size * size + size, first, size), first]
        return [Piece(self, layer, *pair) for pair in pairwise(cuts) if pair[0] < pair[1]]

    def stays_until(self, layer: int, asking: Asking) -> int:
        """The token before which all that `asking` sees before itself is in the share, or may be brought."""
        residents, start = self.shared.residents, asking.seen_from
        if not residents.covers(layer, start + 1):
            return start
        return max(start, min(residents.tokens, asking.first))
