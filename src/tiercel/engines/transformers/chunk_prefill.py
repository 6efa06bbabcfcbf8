"""A prompt with chunks, from the end of its exact prefix to its first token.

    exact prefix | chunk, moved | separator | chunk, moved | question
                   heads computed anew, and what deviates most; all else computed in place

The KV behind the exact prefix is near to exact and stays with this prompt: nothing of it is ever stored. A
chunk that stands where it was computed is neither moved nor computed anew, and then is exact. An exact prefix
that is stored goes before any chunk.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tiercel.blocks import Chain
from tiercel.engines.device import wait_for_device
from tiercel.engines.transformers.account import Account
from tiercel.engines.transformers.answer import Stopped
from tiercel.engines.transformers.blending import compute_at, deviations, rotation_of
from tiercel.engines.transformers.chunk_cache import ChunkCache, Fetched
from tiercel.engines.transformers.chunks import (
    METHOD,
    ChunkReuse,
    Placed,
    Span,
    deviating_count,
    places_that_may_deviate,
    places_to_compute,
)
from tiercel.engines.transformers.kv_cache import KVCache, MakeCache
from tiercel.engines.transformers.layout import BlockLayout
from tiercel.engines.transformers.model import LoadedModel
from tiercel.engines.transformers.prefilled import Prefill
from tiercel.engines.transformers.prefix import PrefixStore, Restored
from tiercel.engines.transformers.request import Request
from tiercel.errors import ModelError
from tiercel.store.policy import Decision, PrefillCost, action_of

Stop = Callable[[], bool]


@dataclass(slots=True)
class Blend:
    """What became of a prompt's chunks: counts of blocks by source, tokens and seconds.

    `reused_tokens` of chunks came from the store and were not computed anew; `alone` chunks were computed by
    themselves, `in_place` ones with the rest of the prompt. `logits` are the last token's.
    """

    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    sources: Counter[str] = field(default_factory=Counter)
    reused_tokens: Counter[str] = field(default_factory=Counter)
    loaded: int = 0
    alone: int = 0
    in_place: int = 0
    stored_blocks: int = 0
    lookup_s: float = 0.0
    load_s: float = 0.0
    compute_s: float = 0.0
    saved_s: float | None = 0.0

    def told(self, before: Decision, tokens: int) -> Decision:
        """The whole prompt's decision, `before` being that of its exact prefix."""
        reused = Counter(before.reused_tokens) + self.reused_tokens
        found = Counter(before.found) + self.sources
        loaded = Counter(before.loaded) + self.sources
        return replace(
            before,
            reason=f"{before.reason}; chunks: {self.loaded} loaded, {self.alone} computed alone, "
            f"{self.in_place} in place; what follows the exact prefix is approximate",
            found=found,
            loaded=loaded,
            reused_tokens=reused,
            computed_tokens=tokens - reused.total(),
            lookup_s=before.lookup_s + self.lookup_s,
            load_s=before.load_s + self.load_s,
            prefill_s=before.prefill_s + self.compute_s,
            action=action_of(found.total(), loaded.total()),
            saved_s=None if before.saved_s is None or self.saved_s is None else before.saved_s + self.saved_s,
            spent_s=before.spent_s + self.lookup_s + self.load_s,
        )


class ChunkedPrompts:
    """Reuse of chunks for one model. Raises ModelError if its KV cannot be moved. One thread at a time."""

    def __init__(
        self, model: LoadedModel, layout: BlockLayout, reuse: ChunkReuse, chunks: ChunkCache
    ) -> None:
        self._model, self._step, self._chunks = model, layout.block_tokens, chunks
        self._prefix: PrefixStore | None = None
        self.reuse = reuse
        self.rotate = rotation_of(model, layout)

    def __str__(self) -> str:
        return f"{METHOD}-{self.reuse}"

    def attach(self, exact: PrefixStore, chunks: PrefixStore) -> None:
        """Keep chunks in a store, under the names that `chunks` gives; `exact` knows its prefixes."""
        self._prefix = exact
        self._chunks.attach(chunks)

    def spans(self, request: Request, chain: Chain | None) -> tuple[Span, ...]:
        """The chunks of a request that are to be reused, behind the exact prefix that is stored of it."""
        if self._prefix is None or chain is None or not request.chunks or not request.hints.load:
            return ()
        exact = self._prefix.stored_blocks(chain) * self._step
        return tuple(
            span for span in request.chunks if span[1] > exact and self.reuse.worth(span, self._step)
        )

    def prefill(
        self,
        request: Request,
        spans: Sequence[Span],
        cache: KVCache,
        account: Account,
        stop: Stop,
        cost: PrefillCost | None,
    ) -> Prefill:
        """Go on behind the exact prefix, which `cache` holds and `account` tells of. Raises Stopped."""
        if not (exact := cache.length):
            account.unasked = "nothing stands before the first chunk"
        blend = self.blend(request, spans, cache, stop, cost)
        decision = blend.told(account.done("answered"), len(request.tokens))
        before = account.restored
        return Prefill(
            logits=blend.logits,
            restored=Restored(before.blocks, before.sources + blend.sources, decision.load_s),
            reused_tokens=sum(decision.reused_tokens.values()),
            lookup_s=decision.lookup_s,
            prefill_s=decision.prefill_s,
            decision=decision,
            exact_tokens=exact,
            stored_blocks=blend.stored_blocks,
        )

    def blend(
        self, request: Request, spans: Sequence[Span], cache: KVCache, stop: Stop, cost: PrefillCost | None
    ) -> Blend:
        """Bring the rest of a prompt into `cache`, which holds it up to the first chunk. Raises Stopped.

        Until all of it is there, the cache counts the exact prefix only.
        """
        tokens, first = request.tokens, cache.length
        cache.reserve(len(tokens), exactly=True)
        blend, placed = Blend(), []
        sight = request.hints.sight() if request.hints.store else None
        for start, end in spans:
            began_s = time.perf_counter()
            fetched = self._chunks.fetch(tokens[start:end], request.salt, sight, stop)
            if fetched is None:
                blend.in_place += 1
                continue
            placed.append(self._place(fetched, tokens, (start, end), cache))
            self._note(blend, fetched, placed[-1], time.perf_counter() - began_s, cost)
        began_s = time.perf_counter()
        places = places_to_compute(first, len(tokens), placed, self.reuse)
        if self.reuse.ratio:
            places = sorted([*places, *self._deviating(tokens, first, placed, places, cache, stop)])
        for at in range(0, len(places), self._step):
            if stop():
                raise Stopped
            blend.logits = compute_at(self._model, cache, tokens, places[at : at + self._step])
        wait_for_device(self._model.device)
        cache.cover(len(tokens))
        blend.compute_s += time.perf_counter() - began_s
        return blend

    @torch.inference_mode()
    def _place(self, fetched: Fetched, tokens: Sequence[int], span: Span, cache: KVCache) -> Placed:
        """Copy a chunk's KV to where it stands, its keys moved there."""
        (start, stop), skip = span, fetched.skip
        at_home = tuple(tokens[:start]) == self._chunks.beginning
        for index, shape in enumerate(cache.layout.shapes):
            keys, values = (one[:, :, skip : skip + stop - start] for one in fetched.cache.buffers(index))
            if not at_home:
                by = torch.full((1, shape.kv_heads), start - skip, device=keys.device)
                keys = self.rotate(keys, by)
            for source, target in zip((keys, values), cache.buffers(index), strict=True):
                target[:, :, start:stop].copy_(source)
        return Placed(start, stop, at_home)

    def _deviating(
        self,
        tokens: Sequence[int],
        first: int,
        placed: Sequence[Placed],
        computed: Sequence[int],
        cache: KVCache,
        stop: Stop,
    ) -> list[int]:
        """The places of moved chunks whose values are off most."""
        eligible = places_that_may_deviate(placed, computed)
        if not eligible:
            return []
        at_home = {place for one in placed if one.at_home for place in range(one.start, one.stop)}
        seen = [place for place in range(first, placed[-1].stop) if place not in at_home]
        moved = torch.zeros(placed[-1].stop, device=self._model.device)
        for at in range(0, len(seen), self._step):
            if stop():
                raise Stopped
            places = seen[at : at + self._step]
            moved[places] = deviations(self._model, cache, tokens, places)
        count = min(len(eligible), deviating_count(placed, self.reuse))
        return [eligible[at] for at in moved[eligible].topk(count).indices.tolist()]

    def _note(
        self, blend: Blend, fetched: Fetched, placed: Placed, took_s: float, cost: PrefillCost | None
    ) -> None:
        sources = fetched.restored.sources
        blend.loaded += bool(sources)
        blend.alone += not sources
        blend.sources += sources
        blend.stored_blocks += fetched.stored_blocks
        blend.lookup_s += fetched.lookup_s
        blend.load_s += fetched.restored.load_s
        blend.compute_s += max(0.0, took_s - fetched.lookup_s - fetched.restored.load_s)
        anew = 0 if placed.at_home else self.reuse.head_tokens
        length = placed.stop - placed.start
        left = reused = max(0, min(fetched.restored.blocks * self._step - fetched.skip, length) - anew)
        for place, blocks in sources.items():
            taken = min(left, blocks * self._step)
            blend.reused_tokens[place] += taken
            left -= taken
        if cost is None and reused:
            blend.saved_s = None
        elif cost is not None and blend.saved_s is not None:
            blend.saved_s += cost.saved(reused, placed.start)


def chunked_prompts(
    model: LoadedModel,
    layout: BlockLayout,
    reuse: ChunkReuse | None,
    make_cache: MakeCache,
    alone: ChunkCache,
) -> ChunkedPrompts | None:
    """Reuse of chunks as an engine is set to; None: not at all. Raises ModelError where it cannot be."""
    if reuse is None:
        return None
    if make_cache is not KVCache:
        raise ModelError(
            "chunks are moved where all KV is at hand; accepted: attention.chunks = no, or neither a policy "
            "of attention nor a budget of KV"
        )
    return ChunkedPrompts(model, layout, reuse, alone)
