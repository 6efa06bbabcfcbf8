"""What the offloaded caches of one engine share: device memory, stream, and a model made ready for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache

from tiercel.attention.device import DeviceMemory, Lot
from tiercel.engines.device import Copier
from tiercel.engines.transformers.kv_cache import KVCache
from tiercel.engines.transformers.layout import BlockLayout
from tiercel.engines.transformers.model import LoadedModel, sliding_windows
from tiercel.engines.transformers.offload.attention import NAME, OffloadedRows
from tiercel.engines.transformers.offload.budget import divide
from tiercel.engines.transformers.offload.cache import OffloadedCache
from tiercel.engines.transformers.offload.resident import Residents
from tiercel.engines.transformers.offload.stream import Piece, Stream
from tiercel.errors import ModelError

_PROBE_TOKENS = 24
# Half precision rounds otherwise than the model's own kernel; a wrong mask or bias is far beyond that.
_PROBE_ERROR_MAX = 0.05


class Offload:
    """Gives `model` attention that never has more than `budget_bytes` of KV on its device, for good.

    A step of `stream_from_tokens` new tokens or more has KV streamed to the device; with fewer it is computed
    where it lies. What stays on the device is divided among `sequences` that run at once. Raises ModelError
    for a budget that is too small, or a model whose attention is of a kind that cannot be computed by parts.
    """

    def __init__(
        self,
        model: LoadedModel,
        layout: BlockLayout,
        budget_bytes: int,
        *,
        sequences: int = 1,
        stream_from_tokens: int = 2,
    ) -> None:
        self.windows = sliding_windows(model.module)
        division = divide(layout, self.windows, budget_bytes)
        self.piece_tokens, self.stream_from_tokens = division.piece_tokens, stream_from_tokens
        self._block_tokens = layout.block_tokens
        self.memory = DeviceMemory(model.device, budget_bytes)
        lot = Lot(self.memory)
        self.stream = Stream(layout, lot, Copier(model.device), division.piece_tokens)
        resident = division.resident_tokens // sequences
        resident = min(resident, model.context_tokens or resident)
        self.residents = Residents(layout, self.windows, lot, resident, sequences)
        try:
            self._use_our_attention(model, layout)
        except ModelError as error:
            raise ModelError(f"KV of {model.name} cannot be offloaded: {error}") from None

    @property
    def attention(self) -> str:
        """Names what computes KV: how tokens are cut changes its last bits."""
        cut = f"{NAME}/{self.piece_tokens}"
        # Blocks smaller than what is streamed are read as answers are: cut at what stays on the device.
        return cut if self._block_tokens >= self.stream_from_tokens else f"{cut}/{self.residents.tokens}"

    def make_cache(self, layout: BlockLayout, device: torch.device) -> OffloadedCache:
        """A cache of one sequence."""
        return OffloadedCache(layout, device, self)

    def rows(self, caches: Sequence[KVCache]) -> Cache:
        """The cache of a step of several sequences, whose caches are of `make_cache`."""
        mine = [cache for cache in caches if isinstance(cache, OffloadedCache)]
        assert len(mine) == len(caches)
        return Cache(layers=[OffloadedRows(mine, number) for number in range(len(self.windows))])

    def begin(self, caches: Sequence[OffloadedCache], new: int) -> None:
        """A step begins whose `new` tokens lie in the first layer of each by now: say which pieces it needs.

        They come by layers, and in a layer by sequences.
        """
        firsts = [(cache, cache.layer(0).length - new) for cache in caches]
        for cache, first in firsts:
            cache.share().cut(first)
        pieces: list[Piece] = []
        if self.streams(new):
            for layer in range(len(self.windows)):
                for cache, first in firsts:
                    pieces += [one for one in cache.pieces(layer, first) if not self.stays(one)]
        self.stream.begin(pieces)

    def streams(self, new: int) -> bool:
        """Whether a step of `new` tokens has KV streamed to the device."""
        return new >= self.stream_from_tokens

    def stays(self, piece: Piece) -> bool:
        """Whether a piece has room in its sequence's share of the device."""
        return self.residents.covers(piece.layer, piece.stop)

    @torch.inference_mode()
    def _use_our_attention(self, model: LoadedModel, layout: BlockLayout) -> None:
        """Put our attention in, and see that the model still says the same."""
        tokens = min(_PROBE_TOKENS, model.context_tokens or _PROBE_TOKENS)
        ids = ((torch.arange(tokens, device=model.device) + 5) % model.vocab_tokens)[None]
        model.module.set_attn_implementation("eager")  # every model's own words; sdpa leaves soft caps out
        expected = model.module(input_ids=ids, use_cache=False).logits[0, -1].float()
        model.module.set_attn_implementation(NAME)
        if model.module.config._attn_implementation != NAME:
            raise ModelError("its attention cannot be replaced")
        cache = self.make_cache(layout, model.device)
        for part in (ids[:, : tokens - tokens // 3], ids[:, tokens - tokens // 3 :]):
            got = model.module(input_ids=part, past_key_values=cache, use_cache=True).logits[0, -1].float()
        cache.clear()
        error = float((got - expected).norm() / expected.norm().clamp(min=1e-9))
        if not error <= _PROBE_ERROR_MAX:
            raise ModelError(f"its attention by parts says something else (differs by {error:.1%})")
