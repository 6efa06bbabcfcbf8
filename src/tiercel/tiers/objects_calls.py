"""Requests to an object store that end in time: tried again with jitter, at a pace, within a deadline.

Knows nothing of records. The library limits the time of a request per client, not per call, so there are
several clients of falling limits; a try takes the longest that still fits.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from obstore.store import ObjectStore

from tiercel.tiers.base import Fate, Outcome
from tiercel.tiers.objects_faults import FAULTS, Fault, fault_of
from tiercel.tiers.objects_pace import Pace

T = TypeVar("T")

CLOSED = Outcome(Fate.FAILED, "closed")
_LATE = Outcome(Fate.FAILED, "no turn within the deadline")
_LIMIT_SHARES = (0.95, 0.45, 0.2, 0.1)
# A server that is not there is told of at once, so that the caller computes instead; one that asks for
# patience gets it, within the deadline.
_TRIES, _PATIENT_TRIES = 3, 8
_PAUSE_S, _PAUSE_MAX_S = 0.05, 2.0


class Calls:
    """`make(limit_s)` gives a client whose requests take at most so long. `most`: requests at once."""

    def __init__(self, make: Callable[[float], ObjectStore], deadline_s: float, most: int) -> None:
        self.deadline_s = deadline_s
        self.pace = Pace(most)
        self._most = most
        self._clients = [(share * deadline_s, make(share * deadline_s)) for share in _LIMIT_SHARES]
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def patient(self) -> ObjectStore:
        """The client with the longest limit, for listings, whose pages each have that long."""
        return self._clients[0][1]

    def until_s(self) -> float:
        """The end of a call that begins now, on the monotonic clock."""
        return time.monotonic() + self.deadline_s

    def close(self) -> None:
        """No more tries. Requests under way end at their limits; nobody waits for them here."""
        self._closed = True
        self.pace.close()

    def spread(self, act: Callable[[int], T], count: int) -> list[T]:
        """Do `act(0)` … `act(count - 1)`, several at once. Each must end by itself."""
        if count <= 1 or self._most == 1:
            return [act(at) for at in range(count)]
        # Threads of this call only: nothing is left to end at closing, and what a call of two megabytes
        # takes is a hundred times what a thread does.
        with ThreadPoolExecutor(min(count, self._most), thread_name_prefix="tiercel-objects") as pool:
            return list(pool.map(act, range(count)))

    def attempt(
        self,
        act: Callable[[ObjectStore], T],
        until_s: float,
        failed: Callable[[Fault], T],
        steps: int = 1,
    ) -> T:
        """The answer of `act`, tried again where that may help; or that of `failed`, with the last fault.

        `steps`: how many requests `act` makes one after the other, all of which must fit.
        """
        fault = Fault(_LATE)
        tries = 0
        while not self._closed:
            with self._turn(until_s) as entered:
                client = self._within((until_s - time.monotonic()) / steps)
                if not entered or client is None:
                    break
                try:
                    answer = act(client)
                except FAULTS as error:
                    fault = fault_of(error)
                else:
                    self.pace.went_well()
                    return answer
            tries += 1
            if not fault.again or tries >= (_PATIENT_TRIES if fault.slow else _TRIES):
                return failed(fault)
            self.rest(tries, fault, until_s)
        return failed(Fault(CLOSED) if self._closed else fault)

    def rest(self, tries: int, fault: Fault, until_s: float = math.inf) -> None:
        """Wait before another try; where we were asked to slow down, everybody does."""
        pause_s = random.uniform(0.5, 1.0) * min(_PAUSE_S * 2**tries, _PAUSE_MAX_S)
        if fault.slow:
            self.pace.slow_down(pause_s)
        self.pace.wait(min(pause_s, until_s - time.monotonic()))

    @contextmanager
    def _turn(self, until_s: float) -> Iterator[bool]:
        entered = self.pace.enter(until_s)
        try:
            yield entered
        finally:
            if entered:
                self.pace.leave()

    def _within(self, left_s: float) -> ObjectStore | None:
        return next((client for limit_s, client in self._clients if limit_s <= left_s), None)
