"""The KV of single chunks: from the store where that pays, else computed by itself and stored.

A chunk is computed from position 0 behind what the tokenizer puts before every text (a beginning token, or
nothing), so that what serves as an attention sink is not the chunk's own first word where the model has
something better. It is named by its tokens alone, under an identity that says so: nobody who wants exact KV
of a prefix finds it, and chunks find nothing exact. Its last block is filled up with zeros, under a token id
that no vocabulary has. It never places a chunk in a prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tiercel.blocks import Identity
from tiercel.engines.device import wait_for_device
from tiercel.engines.transformers.kv_cache import KVCache
from tiercel.engines.transformers.layout import BlockLayout
from tiercel.engines.transformers.model import LoadedModel
from tiercel.engines.transformers.prefix import PrefixStore, Restored
from tiercel.store import PrefillEstimator, Sight

# The first word is what listings show. The number goes up when chunks are computed otherwise.
MARK = "chunks alone/1"
_FILL = 2**32 - 1
Stop = Callable[[], bool]
# Appends tokens to a cache that ends at a block boundary, block by block.
RunBlocks = Callable[[Sequence[int], KVCache, Stop], object]


def chunk_identity(identity: Identity) -> Identity:
    """The identity of an engine's chunks. No codec that is lossy is applied to them."""
    return replace(identity, lossy=MARK)


def beginning_of_text(model: LoadedModel) -> tuple[int, ...]:
    """The tokens that the model's tokenizer puts before every text."""
    tokenizer = model.tokenizer
    begin = getattr(tokenizer, "bos_token_id", None)
    if tokenizer is None or begin is None or tokenizer("a")["input_ids"][:1] != [begin]:
        return ()
    return (int(begin),)


@dataclass(frozen=True, slots=True)
class Fetched:
    """A chunk's KV: tokens `skip..` of `cache`, until the next is fetched; `restored` came from the store."""

    cache: KVCache
    skip: int
    restored: Restored
    lookup_s: float
    stored_blocks: int


class ChunkCache:
    """One model's chunks. One thread uses it at a time."""

    def __init__(
        self,
        model: LoadedModel,
        layout: BlockLayout,
        run_blocks: RunBlocks,
        cost: PrefillEstimator,
        *,
        load_always: bool,
    ) -> None:
        self._model, self._layout = model, layout
        self._prefix: PrefixStore | None = None
        self._run_blocks, self._cost, self._load_always = run_blocks, cost, load_always
        self._scratch: KVCache | None = None
        self.beginning = beginning_of_text(model)

    def attach(self, prefix: PrefixStore) -> None:
        """Keep chunks there from now on, under the names that it gives: see `chunk_identity`."""
        self._prefix = prefix

    def fetch(
        self, tokens: Sequence[int], salt: str | None, sight: Sight | None, stop: Stop
    ) -> Fetched | None:
        """The KV of a chunk; None where computing it in its prompt is no slower, and exact.

        That is so where it is stored and loading it does not pay, and where it is missing and `sight` None
        says that it is not to be stored. Raises what `run_blocks` does.
        """
        assert self._prefix is not None
        whole = [*self.beginning, *tokens]
        filled = [*whole, *[_FILL] * (-len(whole) % self._layout.block_tokens)]
        chain = self._prefix.chain(filled, salt)
        found = self._prefix.find(chain, len(whole), None if self._load_always else self._cost.cost())
        if not found.load and (found.sources or sight is None):
            return None
        cache = self._empty(len(filled))
        restored = self._prefix.restore(found, cache)
        stored = 0
        if cache.length < len(whole):
            self._compute(whole, cache, stop)
            if sight is not None:
                _fill_up(cache, len(filled))
                stored = self._prefix.save(
                    chain, cache, restored.blocks, len(chain), deadline_s=0.0, sight=sight
                )
        return Fetched(cache, len(self.beginning), restored, found.lookup_s, stored)

    def _compute(self, whole: Sequence[int], cache: KVCache, stop: Stop) -> None:
        context, began_s = cache.length, time.perf_counter()
        self._run_blocks(whole[context:], cache, stop)
        wait_for_device(self._model.device)
        self._cost.observe(len(whole) - context, context, time.perf_counter() - began_s)

    def _empty(self, tokens: int) -> KVCache:
        if self._scratch is None:
            self._scratch = KVCache(self._layout, self._model.device)
        self._scratch.clear()
        self._scratch.reserve(tokens)
        return self._scratch


@torch.inference_mode()
def _fill_up(cache: KVCache, tokens: int) -> None:
    """Complete the last block, so that its bytes depend on the chunk only."""
    for index in range(len(cache.layout.shapes)):
        for buffer in cache.buffers(index):
            buffer[:, :, cache.length : tokens] = 0
    cache.cover(tokens)
