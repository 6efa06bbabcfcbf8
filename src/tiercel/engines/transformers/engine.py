"""Runs a Hugging Face causal language model, with the KV of its prompts restored from and kept in a store.

    tokens -> longest stored prefix copied into the cache -> rest prefilled block by block -> first token
           -> prompt blocks stored, as far as there is room -> the cache's `prompt_done` -> more tokens
           -> prompt blocks without room before stored -> answer's blocks settled and stored

Splits. A prefill is cut exactly at block boundaries, restored or not: bf16 results depend on how a sequence
is split, so equal splits are what makes an answer with the cache equal one without, bit for bit. At least
one token is always computed, for its logits.

Settling. KV that came from decoding token by token differs in its last bits from KV of a prefill. So a full
block with generated tokens is not stored as it is: after the answer is out, the cache is cut back to the last
block boundary of the prompt and the block's tokens are run again as one prefill step. What is stored is
therefore always what a prefill of these tokens gives. It costs one prefill of the answer, seldom a tenth of
what decoding it took, reported as `settle_s`.

It never waits for the store beyond the load deadline, and a store that fails costs a recompute. One thread
uses an engine at a time; its generators may be interleaved.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tiercel.blocks import Chain, Identity
from tiercel.codecs import marked
from tiercel.codecs.consent import LossyAttention
from tiercel.engines.device import wait_for_device
from tiercel.engines.transformers.account import Account
from tiercel.engines.transformers.answer import Stopped
from tiercel.engines.transformers.answering import ROOM_DEADLINE_S, Answering, Moves, Pause, Step
from tiercel.engines.transformers.batch import Batch, answers
from tiercel.engines.transformers.chunk_cache import ChunkCache, chunk_identity
from tiercel.engines.transformers.chunk_prefill import chunked_prompts
from tiercel.engines.transformers.chunks import ChunkReuse, Span
from tiercel.engines.transformers.identity import model_identity
from tiercel.engines.transformers.kv_cache import KVCache, MakeCache
from tiercel.engines.transformers.layout import BlockLayout
from tiercel.engines.transformers.model import load_model
from tiercel.engines.transformers.offload import Offload
from tiercel.engines.transformers.prefilled import Prefill
from tiercel.engines.transformers.prefix import Found, PrefixStore
from tiercel.engines.transformers.prompts import chat_prompt, check_tokens, cut, encode
from tiercel.engines.transformers.request import Event, Request
from tiercel.engines.transformers.rows import Together
from tiercel.engines.transformers.selective import Selecting, selecting
from tiercel.errors import ModelError, RequestError
from tiercel.store import PrefillEstimator, Sight
from tiercel.store.policy import Decision, Hints, Outcome

if TYPE_CHECKING:
    from tiercel.store import TieredStore

_NO_HINTS = Hints()
_T = TypeVar("_T")


def _never() -> bool:
    return False


def _all_of(work: Generator[Pause, None, _T]) -> _T:
    """What it comes to, without a pause."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


class TransformersEngine:
    """One loaded model, generating for one request after another, with or without a store.

    `store` None never reuses anything across requests. `adapter` is the digest of whatever changes the
    weights after loading (a merged adapter). What is stored is loaded where that is expected to be faster
    than computing it, or `load_always`. With `kv_device_bytes` no more KV than that lies on the device at a
    time, the rest in host memory. A `policy` changes answers: they read of their prompt what it keeps. Up to
    `batch` answers are generated together, see `batch.Batch`; more than 1 shares the budget out among them.
    Loading blocks; raises ModelError, and EngineError for a policy that was not judged for the model.
    """

    def __init__(
        self,
        model_dir: str | Path,
        store: TieredStore | None = None,
        *,
        dtype: str = "auto",
        device: str = "auto",
        block_tokens: int = 256,
        attention: str | None = None,
        adapter: bytes | None = None,
        load_deadline_s: float = 5.0,
        load_always: bool = False,
        kv_device_bytes: int | None = None,
        policy: LossyAttention | None = None,
        chunks: ChunkReuse | None = None,
        batch: int = 1,
    ) -> None:
        for name, given in (("block_tokens", block_tokens), ("batch", batch)):
            if given < 1:
                raise ModelError(f"{name} is {given}; accepted is 1 or more")
        self.model = load_model(model_dir, dtype=dtype, device=device, attention=attention)
        self.layout = BlockLayout(self.model.shapes, self.model.kv_dtype, block_tokens)
        self.selecting: Selecting | None = None
        self.offload: Offload | None = None
        if policy is not None:
            self.selecting = selecting(self.model, self.layout, policy, kv_device_bytes)
        elif kv_device_bytes is not None:
            self.offload = Offload(self.model, self.layout, kv_device_bytes, sequences=batch)
            self.model = replace(self.model, attention=self.offload.attention)
        self.identity = model_identity(self.model, self.layout)
        self.prefix: PrefixStore | None = None
        self._adapter, self._load_deadline_s = adapter, load_deadline_s
        maker = self.selecting or self.offload
        self._make_cache: MakeCache = KVCache if maker is None else maker.make_cache
        self._idle_caches: list[KVCache] = []
        self.batch_size, self._together = batch, self._ready_for(batch)
        # A cache that shares the device with others is not left half read.
        self._pauses = batch > 1 and maker is None
        self.cost = PrefillEstimator()
        self._load_always = load_always
        alone = ChunkCache(self.model, self.layout, self.run_blocks, self.cost, load_always=load_always)
        self.chunks = chunked_prompts(self.model, self.layout, chunks, self._make_cache, alone)
        if store is not None:
            self.attach(store)

    def _ready_for(self, batch: int) -> Together | None:
        if batch == 1:
            return None
        # A policy begins where a prompt ends; without one its attention is the exact one, by rows as well.
        make_cache = KVCache if self.selecting is not None else self._make_cache
        make_rows = None if self.offload is None else self.offload.rows
        return Together(self.model, self.layout, make_cache, make_rows)

    def attach(self, store: TieredStore) -> None:
        """Reuse and keep blocks in `store` from now on; its slots must hold `layout.payload_bytes`.

        Raises EngineError where the store's tiers have a lossy codec that does not go with this model.
        """
        self.identity = marked(
            replace(self.identity, lossy=None), store.lossy, self.layout.shape(), self.layout.payload_bytes
        )
        self.prefix = self._named(store, self.identity)
        if self.chunks is not None:
            self.chunks.attach(self.prefix, self._named(store, chunk_identity(self.identity)))

    def _named(self, store: TieredStore, identity: Identity) -> PrefixStore:
        return PrefixStore(store, identity, adapter=self._adapter, load_deadline_s=self._load_deadline_s)

    @property
    def lossy(self) -> tuple[str, ...]:
        """What makes answers other than exact, beside the store's codecs."""
        return tuple(str(one) for one in (self.selecting, self.chunks) if one is not None)

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self.layout.block_tokens

    # --- text ---

    def encode(self, text: str) -> list[int]:
        """Token ids of plain `text`. Raises ModelError when the model folder has no tokenizer."""
        return encode(self.model, text)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's next answer, by the model's chat template.

        With a template that only appends, the next prompt of a conversation begins with its last prompt and
        answer, so all their full blocks are reused.
        Raises RequestError for messages that the template refuses, ModelError without a template.
        """
        return chat_prompt(self.model, messages)

    def cut(
        self, prompt: str | Sequence[Mapping[str, Any]], separator: str
    ) -> tuple[list[int], tuple[Span, ...]]:
        """Token ids of a text or a conversation, and its chunks: see `prompts.cut`."""
        return cut(self.model, prompt, separator)

    # --- prompts ---

    def prefill_logits(
        self,
        tokens: Sequence[int],
        *,
        use_cache: bool = True,
        store_blocks: bool = True,
        salt: str | None = None,
    ) -> Prefill:
        """Prefill `tokens` and return the last token's logits, storing its full blocks if asked to."""
        check_tokens(self.model, tokens, room=0)
        chain = self.chain(tokens, salt) if use_cache else None
        cache, account = self.take_cache(len(tokens)), self._account(tokens, chain)
        try:
            with self._accounted(account, cache):
                prefilled = self._prefill(tokens, chain, cache, account)
            prefilled = replace(prefilled, decision=self.report(prefilled.decision))
            if store_blocks:
                blocks = len(tokens) // self.block_tokens
                # Asked for by name, not by traffic: there need not be a second time.
                self.save(chain, cache, prefilled.restored.blocks, blocks, ROOM_DEADLINE_S, sight=Sight.SURE)
            return prefilled
        finally:
            self.give_back(cache)

    def explain(self, tokens: Sequence[int], *, salt: str | None = None) -> Decision:
        """What would be done with a prompt now, and why; loads and computes nothing. May run beside answers.

        Counts as a use of what it finds.
        """
        check_tokens(self.model, tokens, room=0)
        chain = self.chain(tokens, salt)
        account = self._account(tokens, chain)
        account.found = self._find(tokens, chain, _NO_HINTS)
        return account.looked()

    def _find(self, tokens: Sequence[int], chain: Chain | None, hints: Hints) -> Found | None:
        # The last token is always computed, for its logits.
        loadable = len(tokens) - 1
        if self.selecting is not None:
            loadable = self.selecting.loadable_tokens(len(tokens))
        reusable = loadable // self.block_tokens
        if self.prefix is None or chain is None or not hints.load or not reusable:
            return None
        cost = None if self._load_always else self.cost.cost()
        return self.prefix.find(chain[:reusable], len(tokens), cost)

    def _prefill(
        self,
        tokens: Sequence[int],
        chain: Chain | None,
        cache: KVCache,
        account: Account,
        stop: Callable[[], bool] = _never,
        hints: Hints = _NO_HINTS,
    ) -> Prefill:
        return _all_of(self._prefilling(tokens, chain, cache, account, stop, hints))

    def _prefilling(
        self,
        tokens: Sequence[int],
        chain: Chain | None,
        cache: KVCache,
        account: Account,
        stop: Callable[[], bool],
        hints: Hints,
    ) -> Generator[Pause, None, Prefill]:
        account.found = found = self._find(tokens, chain, hints)
        if self.prefix is not None and found is not None:
            account.restored = self.prefix.restore(found, cache)
            account.loaded = Counter(account.restored.sources)
        started = time.perf_counter()
        if found is not None and found.meet:
            self._meet(tokens, found, account, cache, stop)
        context = cache.length
        logits, paused_s = yield from self.blocks(tokens[context:], cache, stop)
        wait_for_device(self.model.device)
        account.prefill_s = time.perf_counter() - started - paused_s
        reused = account.reused_blocks * self.block_tokens
        account.computed_tokens = len(tokens) - reused
        account.cost = self.cost.cost() if reused else None
        if found is None or not found.meet:
            self.cost.observe(len(tokens) - context, context, account.prefill_s)
        decision = account.done("answered")
        return Prefill(
            logits, account.restored, reused, decision.lookup_s, account.prefill_s, decision, len(tokens)
        )

    def prefill(
        self,
        request: Request,
        chain: Chain | None,
        cache: KVCache,
        account: Account,
        stop: Callable[[], bool],
    ) -> Generator[Pause, None, Prefill]:
        """Prefill a request's prompt, with the KV of its chunks where the engine is set to and that pays.

        Raises Stopped, also when it is closed.
        """
        chunks, tokens = self.chunks, request.tokens
        spans = () if chunks is None else chunks.spans(request, chain)
        if chunks is None or chain is None or not spans:
            return (yield from self._prefilling(tokens, chain, cache, account, stop, request.hints))
        if exact := spans[0][0]:
            before = chain[: exact // self.block_tokens]
            self._prefill(tokens[:exact], before, cache, account, stop, request.hints)
        return chunks.prefill(request, spans, cache, account, stop, self.cost.cost())

    def _account(self, tokens: Sequence[int], chain: Chain | None, hints: Hints = _NO_HINTS) -> Account:
        unasked = None
        if self.prefix is None:
            unasked = "all is computed: there is no store"
        elif chain is None or not hints.load:
            unasked = "all is computed: the request asks to load nothing"
        return Account(len(tokens), self.block_tokens, unasked)

    @contextmanager
    def _accounted(self, account: Account, cache: KVCache) -> Iterator[None]:
        """Report a prompt that gets no first token."""
        outcome: Outcome = "failed"
        try:
            yield
            outcome = "answered"
        except Stopped:
            outcome = "cancelled"
            raise
        finally:
            if outcome != "answered":
                account.computed_tokens = max(0, cache.length - account.restored.blocks * self.block_tokens)
                self.report(account.done(outcome))

    def report(self, decision: Decision) -> Decision:
        """Tell the store, if there is one, what became of a prompt; returns the decision as it is kept."""
        return decision if self.prefix is None else self.prefix.report(decision)

    def _meet(
        self,
        tokens: Sequence[int],
        found: Found,
        account: Account,
        cache: KVCache,
        stop: Callable[[], bool],
    ) -> None:
        """Compute what was found and not restored, while it is loaded from its end."""
        assert self.prefix is not None
        size, cost, restored = self.block_tokens, self.cost.cost(), account.restored
        assert cost is not None
        cache.reserve(len(found.chain) * size)
        meeting = self.prefix.meeting(found, restored.blocks, cache, self.model.device)
        with meeting.running():
            for index in range(restored.blocks, len(found.chain)):
                with account.waiting():
                    claimed = meeting.claim(index, cost.seconds(size, index * size))
                if not claimed:
                    break
                self.run_blocks(tokens[index * size : (index + 1) * size], cache, stop)
        loaded = len(found.chain) - max(meeting.loaded_from, cache.length // size)
        if loaded:
            cache.cover(len(found.chain) * size)
            restored.sources.update(meeting.sources)
        self.prefix.faults += meeting.failed

    def run_blocks(
        self, tokens: Sequence[int], cache: KVCache, stop: Callable[[], bool] = _never
    ) -> torch.Tensor:
        """Append `tokens` to `cache`, which ends at a block boundary, a block at a time. Raises Stopped."""
        return _all_of(self.blocks(tokens, cache, stop))[0]

    def blocks(
        self, tokens: Sequence[int], cache: KVCache, stop: Callable[[], bool] = _never
    ) -> Generator[Pause, None, tuple[torch.Tensor, float]]:
        """The same, with pauses between blocks; returns the last logits, and the seconds it was paused."""
        assert tokens
        assert cache.length % self.block_tokens == 0, cache.length
        paused_s = 0.0
        for start in range(0, len(tokens), self.block_tokens):
            if start and self._pauses:
                wait_for_device(self.model.device)
                begun = time.perf_counter()
                try:
                    yield Pause()
                except GeneratorExit:
                    raise Stopped from None
                paused_s += time.perf_counter() - begun
            if stop():
                raise Stopped
            logits = self._forward(tokens[start : start + self.block_tokens], cache)
        return logits, paused_s

    @torch.inference_mode()
    def _forward(self, tokens: Sequence[int], cache: KVCache) -> torch.Tensor:
        """Run one step; returns the last token's logits, shape [vocabulary]."""
        ids = torch.tensor([list(tokens)], dtype=torch.long, device=self.model.device)
        extra = {"logits_to_keep": 1} if self.model.keeps_last_logits else {}
        output = self.model.module(input_ids=ids, past_key_values=cache, use_cache=True, **extra)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    # --- answers ---

    def generate(self, request: Request, stop: Callable[[], bool] = _never) -> Iterator[Event]:
        """Answer `request`: a `Delta` per token, then one `Result`.

        `stop` is asked before every block of the prefill; once it says yes the iterator ends there, without a
        Result, and what was prefilled is stored.

        Raises RequestError at once if the request cannot be served. Closing the iterator early stops the
        answer; what was prefilled is stored, nothing is leased. Take the iterator to its end for the
        answer's own blocks to be stored.
        """
        return self._alone(self.answering(request, stop))

    def batch(self) -> Batch:
        """Answer several requests at once, up to as many as the engine was made for, by whoever steps it."""
        return Batch(self, self.batch_size)

    def generate_together(self, requests: Iterable[Request]) -> Iterator[tuple[int, Event]]:
        """Answer `requests`, several at once: see `batch.answers`.

        Raises RequestError at once if one of them cannot be served.
        """
        known = list(requests)
        for request in known:
            self._check(request)
        return answers(self.batch(), known)

    def answering(
        self, request: Request, stop: Callable[[], bool] = _never, alone: Callable[[], bool] = lambda: True
    ) -> Moves:
        """An answer as a coroutine, see `answering`: for who runs the tokens of several together.

        Storing waits for room only where `alone` says that nobody else is kept waiting.
        Raises RequestError at once if the request cannot be served.
        """
        self._check(request)
        chain = self.chain(request.tokens, request.salt) if request.use_cache else None
        return Answering(self, request, chain, stop, alone).moves()

    def _check(self, request: Request) -> None:
        check_tokens(self.model, request.tokens, room=1)
        if request.stop and self.model.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and the model folder has none")

    def run_together(self, steps: Sequence[Step]) -> list[torch.Tensor]:
        """Run a token of each of several answers; the logits of each, [vocabulary]."""
        if self._together is None or len(steps) == 1:
            return [self._forward([step.token], step.cache) for step in steps]
        return self._together.run(steps)

    def _alone(self, moves: Moves) -> Iterator[Event]:
        with closing(moves):
            for move in moves:
                while isinstance(move, Step):
                    move = moves.send(self._forward([move.token], move.cache))
                if isinstance(move, Pause):
                    continue
                yield move

    @contextmanager
    def reading(self, request: Request, chain: Chain | None, cache: KVCache) -> Iterator[Account]:
        """The account of a request whose prompt is read, and its first token picked, inside.

        A prompt that gets none is reported.
        """
        account = self._account(request.tokens, chain, request.hints)
        cache.prompt_begins(request.tokens)
        with self._accounted(account, cache):
            yield account

    # --- bookkeeping ---

    def chain(self, tokens: Sequence[int], salt: str | None = None) -> Chain | None:
        """Names of the full blocks of `tokens`, for the store's calls; None without a store."""
        return None if self.prefix is None else self.prefix.chain(tokens, salt)

    def save(
        self,
        chain: Chain | None,
        cache: KVCache,
        start: int,
        stop: int,
        deadline_s: float,
        *,
        sight: Sight = Sight.NEW,
    ) -> int:
        """Store blocks `start..stop-1` of `cache`, if there is a store: see `PrefixStore.save`."""
        if self.prefix is None or chain is None:
            return 0
        return self.prefix.save(chain, cache, start, stop, deadline_s=deadline_s, sight=sight)

    def take_cache(self, tokens: int) -> KVCache:
        """An empty cache with room for `tokens`: an idle one, whose pages are touched, where there is one."""
        idle = self._idle_caches
        cache = idle.pop() if idle else self._make_cache(self.layout, self.model.device)
        cache.reserve(tokens, exactly=True)
        return cache

    def give_back(self, cache: KVCache) -> None:
        """`cache` is no longer needed for what it holds."""
        cache.clear()
        if len(self._idle_caches) < self.batch_size:
            self._idle_caches.append(cache)
