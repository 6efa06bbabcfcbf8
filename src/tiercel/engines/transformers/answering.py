"""One request's answer as a coroutine: what its client gets, and which token it needs run next.

    moves = Answering(engine, request, chain, stop).moves()
    move = next(moves)           # an event, of which the client is told; resume with `next`
    move = next(moves)           # or a step of decoding, which whoever drives it runs
    move = moves.send(logits)    # the event that came of it

Between two blocks of its prompt, or of what it settles, it may say `Pause`, so that others take a step. An
answer does not know whether its tokens are run alone or with those of others. It reads the prompt, and
settles and stores, by itself. Closing it gives back what it holds; what was prefilled is stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tiercel.blocks import Chain
from tiercel.engines.transformers.answer import Answer, Stopped
from tiercel.engines.transformers.kv_cache import KVCache
from tiercel.engines.transformers.request import Event, Request, Result, Timing
from tiercel.engines.transformers.sampling import Sampler
from tiercel.engines.transformers.text import StreamDecoder
from tiercel.store import Sight

if TYPE_CHECKING:
    from tiercel.engines.transformers.engine import TransformersEngine

# How long storing may wait for RAM that is still being written down, once the answer is out.
ROOM_DEADLINE_S = 2.0
# Reserved beyond the prompt at once; longer answers grow the buffers.
_ANSWER_TOKENS_RESERVED = 256


@dataclass(frozen=True, slots=True)
class Step:
    """`token` is to be run behind what `cache` holds; the answer goes on with its logits, [vocabulary]."""

    token: int
    cache: KVCache


class Pause:
    """More is to be computed for this answer alone; others may go first."""


Moves = Generator[Event | Step | Pause, torch.Tensor | None, None]


class Answering:
    """The answer of `engine` to one request whose prompt is named by `chain` (None: nothing is reused)."""

    def __init__(
        self,
        engine: TransformersEngine,
        request: Request,
        chain: Chain | None,
        stop: Callable[[], bool],
        alone: Callable[[], bool],
    ) -> None:
        self._engine, self._request, self._chain, self._stop = engine, request, chain, stop
        self._alone = alone
        self._keep = chain if request.hints.store else None
        model, self._tokens_max = engine.model, self._answer_tokens_max()
        self._answer = Answer(model.eos_ids, StreamDecoder(model.tokenizer, request.stop), self._tokens_max)

    def moves(self) -> Moves:
        """A `Step` for every token but the first, a `Delta` after each, then one `Result`.

        Once `stop` says yes during the prefill it ends there, without a Result.
        """
        engine, request, keep, answer = self._engine, self._request, self._keep, self._answer
        cache = engine.take_cache(len(request.tokens) + min(self._tokens_max, _ANSWER_TOKENS_RESERVED))
        sampler = Sampler(request, engine.model.device)
        sight = request.hints.sight()
        try:
            started = time.perf_counter()
            with engine.reading(request, self._chain, cache) as account:
                prefilled = yield from engine.prefill(request, self._chain, cache, account, self._stop)
                answer.reused_tokens = prefilled.reused_tokens
                delta = answer.add(sampler.pick(prefilled.logits))
            first_token = time.perf_counter()
            exact, stored = prefilled.exact_tokens, prefilled.stored_blocks
            decision = engine.report(replace(prefilled.decision, ttft_s=first_token - started))
            delta = replace(delta, decision=decision)
            try:
                yield delta
            finally:  # also when the client has gone: the prefill is paid for
                saving = time.perf_counter()
                blocks = exact // engine.block_tokens
                stored += engine.save(keep, cache, prefilled.restored.blocks, blocks, 0.0, sight=sight)
                self._pin(request.tokens)
                store_s = time.perf_counter() - saving
            if answer.finish_reason is None:
                cache.prompt_done()
            decode_s = 0.0
            while answer.finish_reason is None:
                begun = time.perf_counter()
                logits = yield Step(answer.tokens[-1], cache)
                assert logits is not None
                delta = answer.add(sampler.pick(logits))
                decode_s += time.perf_counter() - begun
                yield delta
            saving = time.perf_counter()
            stored += self._save_rest(exact, cache)
            settling = time.perf_counter()
            store_s += settling - saving
            settled, paused_s = yield from self._settle(exact, cache)
            stored += settled
            self._pin([*request.tokens, *answer.tokens])
            settle_s = time.perf_counter() - settling - paused_s
            timing = Timing(
                ttft_s=first_token - started,
                lookup_s=prefilled.lookup_s,
                load_s=prefilled.restored.load_s,
                prefill_s=prefilled.prefill_s,
                decode_s=decode_s,
                store_s=store_s,
                settle_s=settle_s,
            )
            yield Result(
                tokens=tuple(answer.tokens),
                text=answer.decoder.text,
                finish_reason=answer.finish_reason,
                prompt_tokens=len(request.tokens),
                reused_tokens=prefilled.reused_tokens,
                stored_blocks=stored,
                sources=dict(prefilled.restored.sources),
                decision=decision,
                timing=timing,
            )
        except Stopped:
            engine.save(keep, cache, 0, cache.length // engine.block_tokens, 0.0, sight=sight)
        finally:
            engine.give_back(cache)

    def _save_rest(self, exact: int, cache: KVCache) -> int:
        """Store the prompt's blocks that found no room at once, now that nobody waits for the next token."""
        engine, chain = self._engine, self._keep
        blocks = exact // engine.block_tokens
        if engine.prefix is None or chain is None or not cache.settles:
            return 0
        if (held := engine.prefix.stored_blocks(chain)) >= blocks:
            return 0
        sight = self._request.hints.sight(Sight.AGAIN)
        return engine.save(chain, cache, held, blocks, self._room_deadline_s(), sight=sight)

    def _pin(self, tokens: Sequence[int]) -> None:
        """Keep what is stored of these tokens, if the request asks for it."""
        engine, request = self._engine, self._request
        chain = engine.chain(tokens, request.salt) if request.use_cache and request.hints.pin_s else None
        if engine.prefix is not None and chain is not None:
            engine.prefix.pin(chain, request.hints.pin_s)

    def _settle(self, exact: int, cache: KVCache) -> Generator[Pause, None, tuple[int, float]]:
        """Recompute and store the full blocks that hold generated tokens.

        Returns how many were stored, and the seconds it was paused. Raises Stopped when it is closed.
        """
        engine, request = self._engine, self._request
        if self._keep is None or exact != len(request.tokens):
            return 0, 0.0
        tokens, size = [*request.tokens, *self._answer.tokens], engine.block_tokens
        first, last = len(request.tokens) // size, len(tokens) // size
        if engine.prefix is None or first == last or not cache.settles:
            return 0, 0.0
        chain = engine.chain(tokens, request.salt)
        assert chain is not None
        held = engine.prefix.stored_blocks(chain)
        if held < first or held == last:  # unreachable without its prefix, or already there
            return 0, 0.0
        cache.truncate(first * size)
        try:
            _, paused_s = yield from engine.blocks(tokens[first * size : last * size], cache)
        except Stopped:  # the prompt's blocks had their turn, the answer's are given up
            cache.clear()
            raise
        # The work is done, and its prompt was worth keeping.
        sight = request.hints.sight(Sight.SURE)
        return engine.save(chain, cache, first, last, self._room_deadline_s(), sight=sight), paused_s

    def _room_deadline_s(self) -> float:
        """Others wait for their tokens on the thread that would wait for room."""
        return ROOM_DEADLINE_S if self._alone() else 0.0

    def _answer_tokens_max(self) -> int:
        context, request = self._engine.model.context_tokens, self._request
        room = request.max_new_tokens if context is None else context - len(request.tokens)
        return min(request.max_new_tokens, room)
