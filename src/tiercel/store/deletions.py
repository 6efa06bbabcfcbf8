"""What a tier is to delete: tried in the background until it works, and once more when the store closes.

Never gives up for a tier that is away, and never costs a thread for every call to it.

Locking: takes the store's lock itself; calls the tier without it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from tiercel.blocks import BlockKey
from tiercel.store.lane import Lane

_PAUSE_S = (0.5, 60.0)


def until_it_works(attempt: Callable[[], bool], closing: threading.Event) -> bool:
    """Try again and again, at longer and longer intervals. False if `closing` was set first."""
    pause_s, pause_max_s = _PAUSE_S
    while not attempt():
        if closing.wait(pause_s):
            return False
        pause_s = min(pause_s * 2, pause_max_s)
    return True


class Deletions:
    """Those of one lane; `closing` is set when its store is about to close."""

    def __init__(self, lane: Lane, lock: threading.Condition, closing: threading.Event) -> None:
        self._lane = lane
        self._lock = lock
        self._closing = closing
        # Records to be deleted, with who waits for that.
        self._unwanted: list[tuple[Sequence[BlockKey], threading.Event]] = []
        # By what is set when they have ended well.
        self._threads: dict[threading.Event, threading.Thread] = {}

    def purge(self, tag: bytes | None, doomed: dict[BlockKey, int]) -> threading.Event:
        """Delete a barred scope's records; adds those the index did not know to `doomed`. Set when done."""

        def attempt() -> bool:
            if not self._lane.purge(tag, doomed):
                return False
            self._lane.end_purge(tag)
            return True

        return self._start(attempt, "purge")

    def forget(self, keys: Sequence[BlockKey]) -> threading.Event:
        """Delete some records, known or not. Set when done."""
        done = threading.Event()
        with self._lock:
            self._unwanted.append((keys, done))
            first = len(self._unwanted) == 1
        if first:
            self._start(self._forget_all, "forget")
        return done

    def under_way(self) -> set[threading.Event]:
        """What is being deleted, by what is set when it is done."""
        with self._lock:
            return set(self._threads)

    def join(self, until_s: float) -> bool:
        """Wait until the monotonic time `until_s` for all to end. False if something is left."""
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not self.under_way()

    def _forget_all(self) -> bool:
        while True:
            with self._lock:
                batch = list(self._unwanted)
                keys = [key for some, _ in batch for key in some]
                records = dict.fromkeys(keys, 0) | self._lane.index.expel(keys)
            if not self._lane.delete(records):
                return False
            with self._lock:
                del self._unwanted[: len(batch)]
                ended = not self._unwanted
            for _, done in batch:
                done.set()
            if ended:
                return True

    def _start(self, attempt: Callable[[], bool], what: str) -> threading.Event:
        done = threading.Event()

        def run() -> None:
            # Once more at the end: the next store does not know what this one was to delete.
            if until_it_works(attempt, self._closing) or attempt():
                with self._lock:
                    del self._threads[done]
                done.set()

        thread = threading.Thread(target=run, name=f"tiercel-{self._lane.name}-{what}", daemon=True)
        with self._lock:
            self._threads[done] = thread
            thread.start()
        return done
