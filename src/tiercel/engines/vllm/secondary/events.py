"""KV events of our tiers in vLLM's terms: which chunks can be had here, for routers.

A chunk is told of as stored once it lies in any of our places, and as removed when it has left the last. Only
chunks that this engine stored or found are told of. A thread asks the store what came and went; the
scheduler's thread only takes out what is ready.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey

from tiercel.blocks import BlockKey, Chain
from tiercel.engines.vllm.threads import leave_pinned_core
from tiercel.store import Event, Store

if TYPE_CHECKING:
    from tiercel.engines.vllm.secondary.prefixes import Run

# Who publishes, beside the medium: vLLM knows but two media.
OWNER = "tiercel"
_POLL_S = 0.25
_CHUNKS_MAX = 1 << 16
_WAITING_MAX = 4096


@dataclass(slots=True)
class _Known:
    key: OffloadKey
    places: set[str] = field(default_factory=set)


class Residence:
    """The thread, and the two queues between it and the others."""

    def __init__(self, store: Store, locality: Locality | None) -> None:
        self._store = store
        self._locality = locality
        self._noted: deque[tuple[Chain, Run]] = deque(maxlen=_WAITING_MAX)
        self._ready: deque[OffloadingEvent] = deque()
        self._known: OrderedDict[BlockKey, _Known] = OrderedDict()
        self._next = 0
        self._again = threading.Event()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tiercel-events", daemon=True)
        self._thread.start()

    def note(self, chain: Chain, run: Run) -> None:
        """Chunks were stored or found: tell of those that are there. Any thread."""
        self._noted.append((chain, run))
        self._wake.set()

    def restart(self) -> None:
        """All names have changed: nothing told of so far can be had any more."""
        self._again.set()
        self._wake.set()

    def waiting(self) -> bool:
        """Whether a step is needed to publish what happened."""
        return bool(self._ready or self._noted)

    def take(self) -> Iterator[OffloadingEvent]:
        """What happened since the last time."""
        for _ in range(len(self._ready)):
            yield self._ready.popleft()

    def close(self) -> None:
        """End the thread. Waits a second at most."""
        self._closing = True
        self._wake.set()
        self._thread.join(1.0)

    # On the thread.

    def _run(self) -> None:
        leave_pinned_core()
        while not self._closing:
            if self._again.is_set():
                self._again.clear()
                self._lose()
            self._poll()
            while self._noted and not self._closing:
                self._learn(*self._noted[0])
                self._noted.popleft()
            self._wake.wait(_POLL_S)
            self._wake.clear()

    def _poll(self) -> None:
        """Ask for what happened since the last time."""
        told = self._store.events(self._next, b"")
        if told.lost:
            self._lose()
        self._next = told.next
        self._apply(told.events)

    def _learn(self, chain: Chain, run: Run) -> None:
        for chunk in range(run.start, run.stop):
            key = chain.keys[chunk]
            known = self._known.pop(key, None) or _Known(OffloadKey(run.key(chunk)))
            self._known[key] = known
        # Looked up now that they are known: what happens from here on is seen by the next poll.
        found = self._store.lookup(chain, 0.0, run.start).sources
        self._apply(
            Event(True, key, place) for key, place in zip(chain.keys[run.start :], found, strict=False)
        )
        while len(self._known) > _CHUNKS_MAX:
            _, oldest = self._known.popitem(last=False)
            self._publish([oldest.key] if oldest.places else [], removed=True)

    def _apply(self, events: Iterable[Event]) -> None:
        """Change the picture; neighbouring changes of one kind are told as one event."""
        kind, keys = False, list[OffloadKey]()
        for event in events:
            known = self._known.get(event.key)
            if known is None:
                continue
            before = bool(known.places)
            (known.places.add if event.stored else known.places.discard)(event.place)
            if bool(known.places) == before:
                continue
            if before != kind:
                self._publish(keys, removed=kind)
                kind, keys = before, []
            keys.append(known.key)
        self._publish(keys, removed=kind)

    def _lose(self) -> None:
        self._publish([one.key for one in self._known.values() if one.places], removed=True)
        self._known.clear()

    def _publish(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if keys:
            self._ready.append(
                OffloadingEvent(
                    keys, Medium.STORAGE, removed, self._locality, ownership=OWNER, removal_expected=True
                )
            )
