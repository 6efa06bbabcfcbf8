"""The scheduler's side: which prompts to ask for, what to load, what to save, which blocks to hold for it.

Every call answers from memory. Blocks that are being saved are held by one reference more, so nothing that
happens to their request (finish, abort, preemption, a window moving on) can reuse them before all workers
have reported. Nothing here touches a tensor, a file or a socket.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from tiercel.blocks import Identity
from tiercel.engines.vllm.accounts import Accounts, by_place
from tiercel.engines.vllm.asker import Ask, Asker, Left
from tiercel.engines.vllm.hints import read_hints
from tiercel.engines.vllm.jobs import HASH_BYTES, Done, LoadJob, Owner, SaveJob, Step, Table, writable_from
from tiercel.engines.vllm.pace import Pace
from tiercel.engines.vllm.stats import Tally
from tiercel.store.figures import RAM
from tiercel.store.policy import Decision, Hints

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from tiercel.engines.vllm.events import EventSource

# An answer older than this is asked for again: blocks may have gone since.
_ANSWER_KEPT_S = 5.0
_PATIENCE_S = 0.0002
# Saves may hold at most this share of vLLM's blocks.
_HELD_SHARE = 0.5
# Running requests wait this long for blocks that only a save still holds, rather than be preempted.
_FREES_SOON_S = 0.1


@dataclass(frozen=True, slots=True)
class Grid:
    """How tokens fall into blocks. `groups[g]` tokens make an engine block of group g."""

    block_tokens: int
    hash_tokens: int
    groups: tuple[int, ...]

    def per_block(self) -> tuple[int, ...]:
        """Engine blocks of each group in one block."""
        return tuple(self.block_tokens // tokens for tokens in self.groups)


@dataclass(slots=True)
class _Tracked:
    """A request that lives in vLLM."""

    request: Request
    reads: bool
    hints: Hints
    hashes: bytearray = field(default_factory=bytearray)
    saved: int = 0
    ask: Ask | None = None
    asked_at: int = -1
    failed: bool = False
    counted: bool = False
    brought_up: bool = False
    # While the request has been preempted so many times, its blocks belong to names that are void.
    void_at: int = -1
    offered: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class _Held:
    """Blocks of a save under way."""

    request: str
    blocks: list[KVCacheBlock]
    since_s: float
    workers: int = 0
    orphaned: bool = False


class SchedulerSide:
    """Belongs to the scheduler's thread."""

    def __init__(
        self,
        asker: Asker,
        grid: Grid,
        identity: Identity,
        accounts: Accounts,
        *,
        workers: int,
        drops_last: bool,
        tally: Tally,
    ) -> None:
        self.grid = grid
        self.identity = identity
        self._asker = asker
        self._accounts = accounts
        self._workers = workers
        self._drops_last = drops_last
        self._tally = tally
        self._pool: BlockPool | None = None
        self._requests: dict[str, _Tracked] = {}
        self._loads: list[LoadJob] = []
        self._held: dict[int, _Held] = {}
        self._held_blocks = 0
        self._once_saved: list[tuple[set[int], Callable[[], object]]] = []
        self._number = 0
        self._asking = False
        self._pace = Pace()
        self._events: EventSource | None = None

    def bind(self, pool: BlockPool) -> None:
        """Learn vLLM's pool of blocks."""
        self._pool = pool

    def tell(self, events: EventSource) -> None:
        """Describe to `events` what is saved and found."""
        self._events = events

    # Finding.

    def added(self, request: Request) -> None:
        """A request arrived: ask for its prompt at once, while it waits its turn."""
        if request.resumable:
            return  # its last tokens may still be replaced
        hints = read_hints(request.kv_transfer_params, self._tally)
        tracked = _Tracked(request, not request.skip_reading_prefix_cache and hints.load, hints)
        self._requests[request.request_id] = tracked
        self._accounts.began(request)
        if hints.explain:
            self._accounts.explain(request.request_id)
        self._extend(tracked)
        self._ask(tracked)
        self._note_session(tracked)

    def matched(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond `local_tokens` can be loaded; None while that is not known yet."""
        tracked = self._requests.get(request.request_id)
        tokens = self._more(request, tracked, local_tokens)
        if tokens is None:
            self._accounts.waits(request.request_id)
            return None, False
        self._accounts.matched(request.request_id, local_tokens, None if tracked is None else tracked.ask)
        return tokens, tokens > 0

    def _more(self, request: Request, tracked: _Tracked | None, local_tokens: int) -> int | None:
        if tracked is None or not tracked.reads or tracked.failed:
            return 0
        if tracked.ask is None or self._stale(tracked):
            self._extend(tracked)
            self._ask(tracked)
        ask = tracked.ask
        if ask is None:
            return 0
        # One wait a step: of many requests without an answer, each would hold up all that run.
        if ask.hit is None and (self._asking or not ask.answered.wait(_PATIENCE_S)):
            if time.monotonic() < ask.until_s:
                self._asking = True
                return None
            self._tally.add("lookups_timed_out", 1)
            tracked.reads = False
            return 0
        blocks = 0 if ask.hit is None else ask.hit.worth
        if self._drops_last and blocks:
            blocks -= 1  # a drafter's last entry depends on the token after it
        tracked.saved = max(tracked.saved, ask.there)
        tokens = min(blocks * self.grid.block_tokens, self._readable_tokens(request))
        self._found(tracked, tokens - local_tokens)
        if tokens <= local_tokens:
            return 0
        tracked.offered = (local_tokens, tokens - local_tokens)
        return tokens - local_tokens

    def sources(self, request: Request, tokens: int) -> dict[str, int]:
        """Tokens of an accepted offer by the place they lie in."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.ask is None or tracked.ask.hit is None:
            return {}
        return by_place(tracked.ask.hit.sources, self.grid.block_tokens, tracked.offered[0], tokens)

    def allocated(self, request: Request, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """vLLM has made room for `tokens` tokens of an offer: load them with this step's work."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or not tokens:
            return
        size, local = self.grid.block_tokens, tracked.offered[0]
        stop = (local + tokens) // size
        assert tokens <= tracked.offered[1], (tokens, tracked.offered)
        assert (local + tokens) % size == 0, (tokens, tracked.offered)
        assert tracked.ask is not None
        patience_s, compute_s = self._patience(tracked.ask, local, tokens)
        self._loads.append(
            LoadJob(
                request=request.request_id,
                hashes=bytes(tracked.hashes[: stop * HASH_BYTES]),
                start=local // size,
                skip_tokens=local % size,
                tables=tuple(
                    tuple(table[local // of : stop * size // of])
                    for table, of in zip(tables, self.grid.groups, strict=True)
                ),
                owner=tracked.ask.owner,
                patience_s=patience_s,
                compute_s=compute_s,
            )
        )
        tracked.saved = max(tracked.saved, stop)
        self._accounts.loading(request.request_id, tokens)

    def _patience(self, ask: Ask, local: int, tokens: int) -> tuple[float, float]:
        """How long to wait for tokens behind `local` ones, and what computing them takes instead."""
        hit, prompt = ask.hit, ask.prompt
        if hit is None or hit.choice is None or prompt is None:
            return math.inf, 0.0
        first, stop = (at // self.grid.block_tokens for at in (local, local + tokens))
        if set(hit.sources[first:stop]) <= {RAM}:
            return math.inf, 0.0
        # What vLLM has of the prompt is neither loaded nor computed. Tiers work side by side.
        chosen, part = Counter(hit.sources[: hit.worth]), Counter(hit.sources[first:stop])
        share = max(part[place] / chosen[place] for place in part if place != RAM)
        rest = replace(
            hit.choice,
            load_s=share * hit.choice.load_s,
            recompute_s=prompt.cost.seconds(prompt.tokens - local, local),
        )
        return rest.patience_s, prompt.cost.saved(tokens, local)

    # Keeping.

    def step(self, output: SchedulerOutput) -> Step:
        """The work that goes with this step: loads accepted since the last, saves of what it completes."""
        saves: list[SaveJob] = []
        self._look()
        self._begin(output)
        self._accounts.scheduled(output.num_scheduled_tokens)
        state = output.kv_connector_block_state
        if state is not None:
            for request, tokens in output.num_scheduled_tokens.items():
                tracked = self._requests.get(request)
                if tracked is None or not tracked.hints.store:
                    continue
                if tracked.void_at == tracked.request.num_preemptions:
                    continue
                done = self._complete_blocks(tracked, tokens)
                if done > tracked.saved and (tables := state.get_block_ids(request)) is not None:
                    saves += self._save(tracked, done, tables)
        loads, self._loads = tuple(self._loads), []
        waiting = self._asking or (self._events is not None and self._events.waiting())
        self._asking = False
        idle = not output.total_num_scheduled_tokens
        return Step(self.identity, loads, tuple(saves), idle=idle, waiting=waiting)

    def finished(self, request: Request) -> Decision | None:
        """vLLM forgets a request. What is being saved of it stays held. Returns what it wanted to be told."""
        self._accounts.finished(request)
        tracked = self._requests.pop(request.request_id, None)
        if tracked is not None:
            self._extend(tracked)
            self._note_session(tracked)
        for held in self._held.values():
            held.orphaned |= held.request == request.request_id
        return self._accounts.told(request.request_id)

    def ended(self, loaded: Iterable[str] = ()) -> None:
        """The results of a step are in, and these loads are over."""
        self._look()
        self._pace.ended(time.monotonic())
        self._accounts.ended(loaded)

    def reported(self, done: Done) -> None:
        """Workers finished something: let go of what all of them are done with."""
        for request in done.failed:
            if (tracked := self._requests.get(request)) is not None:
                tracked.failed, tracked.saved = True, 0
        for number, workers in done.saves.items():
            held = self._held.get(number)
            if held is None:
                continue
            held.workers += workers
            if held.workers >= self._workers:
                del self._held[number]
                self._held_blocks -= len(held.blocks)
                assert self._pool is not None
                # The last block of a prefix is evicted first.
                self._pool.free_blocks(reversed(held.blocks))
        waiting, self._once_saved = self._once_saved, []
        for saves, call in waiting:
            if saves & self._held.keys():
                self._once_saved.append((saves, call))
            else:
                call()

    def once_saved(self, call: Callable[[], object]) -> None:
        """Call it when all saves that are under way now have been reported; not at all if there are none."""
        if self._held:
            self._once_saved.append((set(self._held), call))

    def saving(self) -> bool:
        """Whether steps are needed: workers have to report a save, or an event is to be published."""
        return bool(self._held) or (self._events is not None and self._events.waiting())

    def frees_soon(self) -> bool:
        """Whether blocks of requests that are gone come free as soon as their save, just begun, has ended."""
        now_s = time.monotonic()
        return any(held.orphaned and now_s - held.since_s < _FREES_SOON_S for held in self._held.values())

    def rename(self, identity: Identity) -> None:
        """Go by another identity from now on: answers under the old one are void."""
        self.identity = identity
        for tracked in self._requests.values():
            tracked.ask, tracked.saved = None, 0
            if tracked.request.num_computed_tokens:
                # Computed or being loaded under the old names: only once computed anew may it be stored.
                tracked.void_at = tracked.request.num_preemptions

    # Inner workings.

    def _look(self) -> None:
        if self._events is not None and self._pool is not None:
            self._events.look(self._pool)

    def _begin(self, output: SchedulerOutput) -> None:
        """Watch a step that does nothing but compute one prompt: that is how prefill is priced."""
        tracked = None
        if len(output.num_scheduled_tokens) == 1:
            ((name, tokens),) = output.num_scheduled_tokens.items()
            tracked = self._requests.get(name)
        if tracked is None:
            self._pace.skipped()
        else:
            self._pace.began(tokens, tracked.request.num_computed_tokens, time.monotonic())

    def _readable_tokens(self, request: Request) -> int:
        """The most tokens that may be loaded: whole blocks, and one token is left to compute."""
        return (request.num_tokens - 1) // self.grid.block_tokens * self.grid.block_tokens

    def _extend(self, tracked: _Tracked) -> None:
        """Take over vLLM's hashes of blocks that have become full."""
        step = self.grid.block_tokens // self.grid.hash_tokens
        known = len(tracked.hashes) // HASH_BYTES
        if len(tracked.request.block_hashes) // step > known:
            tracked.hashes += b"".join(tracked.request.block_hashes[(known + 1) * step - 1 :: step])

    def _ask(self, tracked: _Tracked) -> None:
        request = tracked.request
        lora = request.lora_request
        tracked.asked_at = request.num_preemptions
        if lora is not None and lora.load_inplace:
            tracked.reads, tracked.ask = False, None  # its name outlives its content
            return
        blocks = self._readable_tokens(request) // self.grid.block_tokens if tracked.reads else 0
        if self._drops_last:
            blocks += 1
        if (not blocks and lora is None) or self._asker.stuck():
            tracked.ask = None
            return
        adapter = None if lora is None else (lora.lora_int_id, lora.lora_path)
        price = partial(self._pace.prompt, request.num_tokens, self.grid.block_tokens)
        tracked.ask = Ask(
            request.request_id, bytes(tracked.hashes[: blocks * HASH_BYTES]), adapter, price,
            salt=request.cache_salt, pin_s=tracked.hints.pin_s,
            prefetch=tracked.hints.prefetch and not tracked.brought_up,
        )  # fmt: skip
        tracked.brought_up = True
        self._asker.ask(tracked.ask)

    def _stale(self, tracked: _Tracked) -> bool:
        ask = tracked.ask
        if ask is None or tracked.asked_at != tracked.request.num_preemptions:
            return True
        return ask.hit is not None and time.monotonic() - ask.answered_s > _ANSWER_KEPT_S

    def _found(self, tracked: _Tracked, tokens: int) -> None:
        """Count an answer, once per request, and tell of the blocks found."""
        if tracked.counted:
            return
        tracked.counted = True
        self._tally.add("looked_up_tokens", tracked.request.num_tokens)
        self._tally.add("hit_tokens", max(0, tokens))
        ask = tracked.ask
        if self._events is not None and ask is not None and ask.hit is not None and ask.hit.blocks:
            hashes = ask.hashes[: ask.hit.blocks * HASH_BYTES]
            self._events.note(tracked.request, hashes, ask.owner, 0, found=True)

    def _complete_blocks(self, tracked: _Tracked, tokens: int) -> int:
        """Blocks whose every token is known and computed once this step has run."""
        self._extend(tracked)
        computed = tracked.request.num_computed_tokens + tokens
        return min(len(tracked.hashes) // HASH_BYTES, computed // self.grid.block_tokens)

    def _owner_of(self, tracked: _Tracked) -> Owner | None:
        """Who may see a request's blocks; None while its adapter's digest is not known: none has a name."""
        if tracked.request.lora_request is None:
            return Owner(None, tracked.request.cache_salt)
        return tracked.ask.owner if tracked.ask is not None and tracked.ask.known else None

    def _note_session(self, tracked: _Tracked) -> None:
        """Let what a session has by now be found by its name."""
        owner, session = self._owner_of(tracked), tracked.hints.session
        if session is not None and owner is not None:
            self._asker.remember(Left(tracked.request.request_id, bytes(tracked.hashes), owner, session))

    def _save(self, tracked: _Tracked, done: int, tables: Sequence[Sequence[int]]) -> Iterable[SaveJob]:
        """A job for blocks `tracked.saved..done-1`, or for as many of them as may be held now."""
        owner = self._owner_of(tracked)
        assert self._pool is not None
        per_block = self.grid.per_block()
        room = int(self._pool.num_gpu_blocks * _HELD_SHARE) - self._held_blocks
        there = min(len(table) // count for table, count in zip(tables, per_block, strict=True))
        stop = min(done, there, tracked.saved + room // sum(per_block))
        if owner is None or stop <= tracked.saved:
            self._tally.add("saves_postponed", 1)
            return
        cut: list[Table] = [
            tuple(table[tracked.saved * count : stop * count])
            for table, count in zip(tables, per_block, strict=True)
        ]
        first = writable_from(cut, per_block, stop - tracked.saved)
        start = tracked.saved + first
        tracked.saved = stop
        if first:
            self._tally.add("blocks_not_whole", first)
        if start == stop:
            return
        cut = [table[first * count :] for table, count in zip(cut, per_block, strict=True)]
        blocks = [self._pool.blocks[one] for table in cut for one in table]
        self._pool.touch(blocks)
        self._number += 1
        self._held[self._number] = _Held(tracked.request.request_id, blocks, time.monotonic())
        self._held_blocks += len(blocks)
        hashes = bytes(tracked.hashes[: stop * HASH_BYTES])
        if self._events is not None:
            self._events.note(tracked.request, hashes, owner, start)
        yield SaveJob(
            self._number, tracked.request.request_id, hashes, start, tuple(cut), owner, tracked.hints.sight(),
            tracked.hints.pin_s,
        )  # fmt: skip
