"""KV events for routers: which blocks lie in which of our tiers, published through vLLM in its own terms.

A thread asks the store what came and went; the scheduler's thread only hands in what it saves or finds, and
takes out what is ready. One event per block, as long as ours: a router never expects less than a whole one.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from tiercel.engines.vllm.jobs import HASH_BYTES, Owner
from tiercel.engines.vllm.ledger import Change, Described, Ledger
from tiercel.engines.vllm.naming import Names
from tiercel.engines.vllm.threads import leave_pinned_core
from tiercel.store import Event, Store
from tiercel.store.figures import RAM

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

_POLL_S = 0.1
# After this long without news of a block the engine stops making steps for it.
_NEWS_S = 0.5
_WAITING_MAX = 1 << 14


@dataclass(frozen=True, slots=True)
class _Seen:
    """Blocks of a prompt that the engine saves, or has found."""

    request: str
    hashes: bytes
    owner: Owner
    start: int
    blocks: list[Described]
    found: bool


class EventSource:
    """The thread, and the two queues between it and the scheduler."""

    def __init__(self, store: Store, block_tokens: int) -> None:
        self._store = store
        self._block_tokens = block_tokens
        self._names: Sequence[Names] = ()
        self._seen: deque[_Seen] = deque(maxlen=_WAITING_MAX)
        self._ready: deque[KVCacheEvent] = deque()
        self._expecting_until_s = 0.0
        self._cleared: AllBlocksCleared | None = None
        self._tell_again = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tiercel-events", daemon=True)

    def use(self, names: Sequence[Names]) -> None:
        """Tell of blocks under these names from now on."""
        self._names = names
        if not self._thread.is_alive():
            self._thread.start()

    def note(self, request: Request, hashes: bytes, owner: Owner, start: int, *, found: bool = False) -> None:
        """Describe blocks `start` to the last of `hashes` of a request while it is there. Never blocks."""
        stop = len(hashes) // HASH_BYTES
        if start < stop:
            blocks = [self._describe(request, hashes, block) for block in range(start, stop)]
            self._seen.append(_Seen(request.request_id, hashes, owner, start, blocks, found))
            self._expecting_until_s = time.monotonic() + _NEWS_S

    def look(self, pool: BlockPool) -> None:
        """Notice that vLLM is about to say that its own cache is empty.

        It says so without naming a medium, and routers forget what lies in our tiers as well.
        """
        for event in pool.kv_event_queue:
            if isinstance(event, AllBlocksCleared) and event is not self._cleared:
                self._cleared = event
                self._tell_again.set()
                self._expecting_until_s = time.monotonic() + _NEWS_S

    def waiting(self) -> bool:
        """Whether a step is needed, or soon will be, to publish what happened."""
        return bool(self._ready) or time.monotonic() < self._expecting_until_s

    def take(self) -> list[KVCacheEvent]:
        """What happened since the last time."""
        return [self._ready.popleft() for _ in range(len(self._ready))]

    def close(self) -> None:
        """End the thread. Waits a second at most."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _describe(self, request: Request, hashes: bytes, block: int) -> Described:
        first, lora = block * self._block_tokens, request.lora_request
        stop = first + self._block_tokens
        at = block * HASH_BYTES
        return Described(
            block_hash=hashes[at : at + HASH_BYTES],
            parent_hash=hashes[at - HASH_BYTES : at] if block else None,
            tokens=array("I", request.all_token_ids[first:stop]),
            lora_id=None if lora is None else lora.adapter_id,
            lora_name=None if lora is None else lora.name,
            extra_keys=generate_block_hash_extra_keys(request, first, stop, 0)[0],
        )

    # On the thread.

    def _run(self) -> None:
        leave_pinned_core()
        names: Sequence[Names] = ()
        ledger, next_number = Ledger(0), 0
        while not self._closing.wait(_POLL_S):
            if names is not self._names:
                self._publish(ledger.lost())
                names = self._names
                ledger = Ledger(len(names))
            while self._seen:
                self._learn(ledger, names, self._seen.popleft())
            if self._tell_again.is_set():
                self._tell_again.clear()
                self._publish(ledger.again())
            next_number = self._poll(ledger, next_number)

    def _poll(self, ledger: Ledger, after: int) -> int:
        """Ask for the events since `after`. Returns the number to ask with next."""
        # Of all scopes at once, for every salt has its own; the ledger knows which blocks are ours.
        told = self._store.events(after, b"")
        if told.lost:
            self._publish(ledger.lost())
        self._publish(ledger.happened(told.events))
        return told.next

    def _learn(self, ledger: Ledger, names: Sequence[Names], seen: _Seen) -> None:
        chains = [one.chain(seen.request, seen.hashes, seen.owner) for one in names]
        for number, block in enumerate(seen.blocks):
            keys = tuple(chain.keys[seen.start + number] for chain in chains)
            self._publish(ledger.note(keys, block))
        if not seen.found:
            return
        for chain in chains:
            # Looked up anew: what left since the engine asked was maybe told of already, what leaves from
            # now on will be.
            there = zip(chain.keys, self._store.lookup(chain, 0.0).sources, strict=False)
            self._publish(ledger.happened([Event(True, key, place) for key, place in there]))

    def _publish(self, changes: Iterator[Change]) -> None:
        for change in changes:
            self._ready.append(self._event(change))

    def _event(self, change: Change) -> KVCacheEvent:
        block = change.block
        medium = MEDIUM_CPU if change.place == RAM else change.place
        hashes = [maybe_convert_block_hash(BlockHash(block.block_hash))]
        if not change.stored:
            return BlockRemoved(block_hashes=hashes, medium=medium)
        parent = block.parent_hash
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if parent is None else maybe_convert_block_hash(BlockHash(parent)),
            token_ids=list(block.tokens),
            block_size=self._block_tokens,
            lora_id=block.lora_id,
            medium=medium,
            lora_name=block.lora_name,
            extra_keys=to_event_extra_keys([block.extra_keys]),
        )
