"""The model's cache as Tiercel keeps it: preallocated K/V buffers of the whole sequence, updated in place.

transformers' own dynamic cache concatenates all past keys for every token and forgets what a sliding window
no longer sees. This one does neither: blocks can be copied out of any layer at any time, and masks stay right
because every layer reports its true length at offset 0. It holds one sequence (batch 1) and never holds store
memory: blocks are copied in and out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from transformers.cache_utils import Cache

from tiercel.attention.layer import CountedLayer
from tiercel.engines.device import copy_in, copy_out
from tiercel.engines.transformers.layout import BlockLayout, Run


class Slab:
    """K and V buffers of a run of layers; grows as a whole, keeping what is already in it."""

    def __init__(self, run: Run, empty: Callable[..., torch.Tensor]) -> None:
        self._run, self._empty = run, empty
        self._parts = self._allocate(0)

    def _allocate(self, capacity: int) -> list[torch.Tensor]:
        shape, layers = self._run.shape, self._run.layers

        if shape.key_dim == shape.value_dim:
            return [self._empty(layers, 2, shape.kv_heads, capacity, shape.key_dim)]
        assert layers == 1
        return [
            self._empty(1, 1, shape.kv_heads, capacity, shape.key_dim),
            self._empty(1, 1, shape.kv_heads, capacity, shape.value_dim),
        ]

    def grow(self, capacity: int, keep: int) -> None:
        """Move to buffers of `capacity` tokens, taking the first `keep` along."""
        bigger = self._allocate(capacity)
        for old, new in zip(self._parts, bigger, strict=True):
            new[..., :keep, :].copy_(old[..., :keep, :])
        self._parts = bigger

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of layer `index` of the run, each [1, kv_heads, capacity, dim]."""
        if len(self._parts) == 2:
            return self._parts[0][0], self._parts[1][0]
        both = self._parts[0][index]
        return both[0:1], both[1:2]

    def tokens(self, start: int, stop: int) -> list[torch.Tensor]:
        """Views of tokens `start..stop-1` in payload order."""
        return [part[..., start:stop, :] for part in self._parts]


class BufferedLayer(CountedLayer):  # type: ignore[no-untyped-call]  # transformers has no types
    """One layer's view of the buffers, in the form that transformers' models call."""

    is_croppable = True

    def __init__(self, owner: KVCache, slab: Slab, index: int) -> None:
        super().__init__()
        self._owner, self._slab, self._index = owner, slab, index
        self.rebind()

    def rebind(self) -> None:
        """Look the buffers up again after they have grown."""
        self._keys, self._values = self._slab.layer(self._index)

    @property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [1, kv_heads, capacity, dim] each."""
        return self._keys, self._values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [1, kv_heads, new, dim] in place; returns views of everything so far."""
        stop = self.length + key_states.shape[-2]
        self._owner.reserve(stop)
        self._keys[:, :, self.length : stop].copy_(key_states)
        self._values[:, :, self.length : stop].copy_(value_states)
        self.length = stop
        return self._keys[:, :, :stop], self._values[:, :, :stop]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `tokens_to_remove` tokens (transformers passes the count negative)."""
        self.length = max(0, self.length - abs(tokens_to_remove))

    def reset(self) -> None:
        """Forget everything; the buffers stay."""
        self.length = 0


class KVCache(Cache):
    """The KV of one sequence, readable and writable by blocks. Not thread-safe; one owner at a time."""

    # Whether the prompt's exact KV stays at hand, so that an answer's blocks can be settled and stored.
    settles: ClassVar[bool] = True

    # Buffers grow by half, so a token is moved fewer than three times however long the sequence gets.
    _GROWTH = 1.5

    def __init__(self, layout: BlockLayout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.capacity = 0
        self._slabs = [Slab(run, self._empty) for run in layout.runs()]
        self._buffered: list[BufferedLayer] = []
        for slab, run in zip(self._slabs, layout.runs(), strict=True):
            for index in range(run.layers):
                self._buffered.append(self._layer(slab, index))
        super().__init__(layers=list(self._buffered))

    def _empty(self, *sizes: int) -> torch.Tensor:
        """An uninitialised buffer for KV."""
        return torch.empty(sizes, dtype=self.layout.dtype, device=self.device)

    def _layer(self, slab: Slab, index: int) -> BufferedLayer:
        """The next layer, which is number `index` of its run."""
        return BufferedLayer(self, slab, index)

    @property
    def length(self) -> int:
        """Tokens that every layer holds."""
        return min(layer.length for layer in self._buffered)

    @torch.inference_mode()
    def reserve(self, tokens: int, *, exactly: bool = False) -> None:
        """Make room for `tokens` tokens in all, with some to spare unless `exactly`."""
        if tokens <= self.capacity:
            return
        wanted = tokens if exactly else max(tokens, int(self.capacity * self._GROWTH))
        step = self.layout.block_tokens
        capacity = -(-wanted // step) * step
        keep = max(layer.length for layer in self._buffered)
        try:
            for slab in self._slabs:
                slab.grow(capacity, keep)
        finally:  # where memory ran out halfway, there is room for as much as before
            for layer in self._buffered:
                layer.rebind()
        self.capacity = capacity

    def make_room(self) -> None:
        """Make room for one token of an answer in all layers, so that memory does not run out among them."""
        self.reserve(self.length + 1)

    def prompt_begins(self, tokens: Sequence[int]) -> None:
        """What follows is the prefill of `tokens`, restored or computed, and then its answer."""

    def prompt_done(self) -> None:
        """The prompt is complete and saved, as far as there was room; its answer is decoded next.

        Called once, before the first step of decoding. Nothing to do where all KV is kept as it is.
        """

    def clear(self) -> None:
        """Forget all tokens; the buffers stay."""
        for layer in self._buffered:
            layer.length = 0

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` tokens; the cache must hold at least as many."""
        assert tokens <= self.length, (tokens, self.length)
        for layer in self._buffered:
            layer.length = tokens

    @torch.inference_mode()
    def restore_block(self, index: int, payload: memoryview) -> None:
        """Append block `index` by copying `payload` in; the cache must hold exactly the blocks before it."""
        start = index * self.layout.block_tokens
        assert self.length == start, (self.length, start)
        self.reserve(start + self.layout.block_tokens)
        self.put_block(index, payload)
        self.cover(start + self.layout.block_tokens)

    @torch.inference_mode()
    def put_block(self, index: int, payload: memoryview) -> None:
        """Copy block `index` to its place, which must be reserved and unused, without counting it yet.

        May run on another thread than the one that computes the blocks before it.
        """
        stop = (index + 1) * self.layout.block_tokens
        assert self.length < stop <= self.capacity, (self.length, stop, self.capacity)
        copy_in(payload, self._block_parts(index))

    def cover(self, tokens: int) -> None:
        """Count what was put there: the first `tokens` tokens are complete."""
        assert self.length <= tokens <= self.capacity, (self.length, tokens, self.capacity)
        for layer in self._buffered:
            layer.length = tokens

    @torch.inference_mode()
    def save_block(self, index: int, payload: memoryview) -> None:
        """Copy block `index`, which must be complete, out into `payload`."""
        assert (index + 1) * self.layout.block_tokens <= self.length, (index, self.length)
        copy_out(self._block_parts(index), payload)

    def buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, [1, kv_heads, capacity, dim] each, counted or not; until they grow."""
        return self._buffered[layer].buffers

    def _block_parts(self, index: int) -> list[torch.Tensor]:
        start = index * self.layout.block_tokens
        stop = start + self.layout.block_tokens
        return [part for slab in self._slabs for part in slab.tokens(start, stop)]


# How an engine makes the cache of a sequence, from the model's layout and device.
MakeCache = Callable[[BlockLayout, torch.device], KVCache]
