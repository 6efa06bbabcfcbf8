"""Pages between SGLang's memory and the store, on the thread that asks, within a deadline.

No call raises for a fault of the store, and none waits much longer than its deadline: what cannot be had is
a miss from there on, what cannot be kept is told as not kept. A page counts only when all of its bytes are
there, verified. What was to be cleared while the store was away is not served until it is cleared.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from tiercel.engines.sglang.naming import Named
from tiercel.engines.sglang.pages import Run, copy_in, copy_out
from tiercel.service import RemoteStore

Runs = Sequence[Run]
_SAVE_S = 5.0
_CLEAR_S = 10.0
# Asking places that others may write to, before a prefix is taken for missing.
_PROBE_S = 0.25
# Finding out about single pages far apart; what is not known by then counts as missing.
_SEARCH_S = 1.0
_RETRY_S = 1.0
# Pages asked for at once: their keys must fit one message.
_KEYS_MAX = 4096
# Blocks per question to the store: few enough to start copying early, enough to keep questions rare.
_BATCH_BYTES = 32 << 20


class Transfer:
    """Copies on the caller's thread. Thread-safe: each call has a lease of its own."""

    def __init__(self, store: RemoteStore, load_deadline_s: float) -> None:
        self._store = store
        self._load_deadline_s = load_deadline_s
        self._lock = threading.Lock()
        self._owed: set[bytes] = set()
        self._retry_s = 0.0

    def count(self, named: Named, before: Sequence[str], keys: Sequence[str]) -> int:
        """How many of the pages `keys`, in a row, are there."""
        found = 0
        while found < len(keys) and self._clean():
            asked = keys[found : found + _KEYS_MAX]
            chain, start = named.chain([*before, *keys[:found]], asked)
            there = self._store.lookup(chain, _PROBE_S, start).blocks // named.parts
            found += there
            if there < len(asked):
                break
        return found

    def present(self, named: Named, keys: Sequence[str], windows: int) -> list[bool]:
        """Which of the pages `keys` are there, whatever lies before them. The last `windows` come first."""
        there = [False] * len(keys)
        until_s = time.monotonic() + _SEARCH_S
        end = len(keys)
        while end > 0 and time.monotonic() < until_s:
            begin = max(0, end - windows)
            at = begin
            while at < end and time.monotonic() < until_s:
                found = self.count(named, (), keys[at:end])
                there[at : at + found] = [True] * found
                at += found + 1
            end = begin
        return there

    def read(self, named: Named, before: Sequence[str], keys: Sequence[str], places: Sequence[Runs]) -> int:
        """Fill `places` with the pages `keys`. Returns how many, in a row, are whole."""
        if not self._clean():
            return 0
        chain, start = named.chain(before, keys)
        batch = max(1, _BATCH_BYTES // named.part_bytes)
        at = start
        with self._store.acquire(chain, self._load_deadline_s, start) as lease:
            while at < len(chain) and (ready := lease.ready(min(batch, len(chain) - at))):
                if any(one.payload.nbytes != named.part_bytes for one in ready):
                    break
                for one in ready:
                    page, part = divmod(one.index - start, named.parts)
                    copy_in(one.payload, places[page], part * named.part_bytes)
                lease.advance(len(ready))
                at += len(ready)
        return (at - start) // named.parts

    def write(
        self, named: Named, before: Sequence[str], keys: Sequence[str], places: Sequence[Runs]
    ) -> list[bool]:
        """Keep the pages `keys`, read from `places`. True for each that is there then, be it from earlier."""
        if not self._clean():
            return [False] * len(keys)
        chain, start = named.chain(before, keys)
        batch = max(1, _BATCH_BYTES // named.part_bytes)
        handed_out, last = 0, -1
        with self._store.begin_store(chain, start, len(chain), named.part_bytes, _SAVE_S) as lease:
            while rooms := lease.take(batch):
                for room in rooms:
                    page, part = divmod(room.index - start, named.parts)
                    copy_out(places[page], part * named.part_bytes, room.payload)
                handed_out, last = handed_out + len(rooms), rooms[-1].index
            stored = lease.commit()
        if stored == handed_out and last == len(chain) - 1:
            return [True] * len(keys)
        # Some were there already, or no room came free: the store knows which.
        kept = self._store.lookup(chain, 0.0, start).blocks // named.parts
        return [number < kept for number in range(len(keys))]

    def clear(self, tags: Sequence[bytes]) -> bool:
        """Drop all pages of these scopes. While that is not done nothing is served or kept here."""
        with self._lock:
            self._owed.update(tags)
            self._retry_s = 0.0
        return self._clean()

    def close(self) -> None:
        """Leave the store; what it holds stays there."""
        self._store.close()

    def _clean(self) -> bool:
        """Whether nothing is left to clear; tries again now and then."""
        if not self._owed:
            return True
        with self._lock:
            if time.monotonic() >= self._retry_s:
                for tag in tuple(self._owed):
                    self._store.clear(tag, _CLEAR_S)
                    if not self._store.up:
                        break
                    self._owed.discard(tag)
                self._retry_s = time.monotonic() + _RETRY_S
            return not self._owed
