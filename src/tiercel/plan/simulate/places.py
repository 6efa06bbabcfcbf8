"""The tiers of one simulated host: what is cached where, and how blocks move down and up.

It keeps runs of blocks in order of last use and counts what is written. It knows nothing of time.
Rules, as in the store: a chain is touched leaf first, so parents are younger than their children and are
evicted after them; a block evicted from a tier that the next one has already only touches it there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tiercel.plan.simulate.costs import Fleet


class Place:
    """One tier's content on one host, or of all hosts if shared."""

    __slots__ = ("capacity_blocks", "evicted_blocks", "order", "sightings", "used_blocks", "written_blocks")

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.used_blocks = 0
        self.written_blocks = 0
        self.evicted_blocks = 0
        self.order: OrderedDict[int, None] = OrderedDict()  # runs, oldest first
        self.sightings: dict[int, bool] = {}  # run → was it seen a second time?

    def see(self, run: int) -> None:
        """Note that a request used this run, for admission."""
        self.sightings[run] = run in self.sightings

    def put(self, run: int, weight: int, weights: Sequence[int]) -> list[int]:
        """Store a run that is not here; return the runs that had to go, oldest first."""
        self.order[run] = None
        self.used_blocks += weight
        self.written_blocks += weight
        gone: list[int] = []
        while self.used_blocks > self.capacity_blocks:
            victim, _ = self.order.popitem(last=False)
            self.used_blocks -= weights[victim]
            self.evicted_blocks += weights[victim]
            gone.append(victim)
        return gone


class HostPlaces:
    """A host's places, fastest first; the shared ones are the same objects on every host."""

    __slots__ = ("evict_down", "places", "promote", "seen_twice", "weights")

    def __init__(self, places: list[Place], weights: Sequence[int], fleet: Fleet) -> None:
        self.places = places
        self.weights = weights
        self.evict_down = fleet.write == "evict"
        self.seen_twice = fleet.admission == "seen-twice"
        self.promote = fleet.promote

    def lookup(self, chain: Sequence[int]) -> list[tuple[int, int]]:
        """Leading cached part of a chain as stretches (place number, blocks), each from its fastest place."""
        stretches: list[tuple[int, int]] = []
        at, blocks = -1, 0
        for run in chain:
            number = next((n for n, place in enumerate(self.places) if run in place.order), -1)
            if number < 0:
                break
            if number != at and blocks:
                stretches.append((at, blocks))
                blocks = 0
            at = number
            blocks += self.weights[run]
        if blocks:
            stretches.append((at, blocks))
        return stretches

    def cached_blocks(self, chain: Sequence[int]) -> int:
        """Length of the leading cached part of a chain."""
        return sum(blocks for _, blocks in self.lookup(chain))

    def commit(self, chain: Sequence[int]) -> None:
        """Store or touch a chain that an engine has now, leaf first."""
        if not self.places:
            return
        first = self.places[0]
        lower = self.places[1:]
        for run in reversed(chain):
            if self.seen_twice:
                for place in lower:
                    place.see(run)
            below = not self.promote and any(run in place.order for place in lower)
            if run in first.order:
                first.order.move_to_end(run)
            elif not below:
                self._put(0, run)
            if self.evict_down and not below:
                continue
            for number, place in enumerate(lower, start=1):
                if run not in place.order:
                    self._admit(number, run)
                elif below:
                    place.order.move_to_end(run)

    def _put(self, number: int, run: int) -> None:
        for victim in self.places[number].put(run, self.weights[run], self.weights):
            self._fell(number + 1, victim)

    def _fell(self, number: int, run: int) -> None:
        """A run was evicted from the place before `number`."""
        if number == len(self.places):
            return
        place = self.places[number]
        if run in place.order:
            place.order.move_to_end(run)
        elif self.evict_down:
            self._admit(number, run)

    def _admit(self, number: int, run: int) -> None:
        if self.seen_twice and not self.places[number].sightings.get(run, False):
            return
        self._put(number, run)
