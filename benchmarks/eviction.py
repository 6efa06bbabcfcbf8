"""How far other eviction policies come on a trace: the study behind docs/decisions/eviction.md.

python -m benchmarks.eviction TRACE

One cache, no time, as in `tiercel simulate`: a request counts the leading blocks that are cached, then uses
its whole chain, leaf first. Nothing of this is in the store.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import log2
from typing import Protocol

from tiercel.plan.simulate import join_runs, policy_hits, read_trace

SHARES = (0.05, 0.1, 0.2, 0.5)
Chains = list[list[int]]
TURNS_MAX = 8
# A conversation's each further turn keeps its blocks for so much of what the cache holds, in uses of blocks.
GRACE_SHARE = 0.2
# So many requests teach before what was learnt of them is used, and until it is learnt anew.
LESSON = 1000
# What is remembered of what was evicted, in caches.
GHOSTS = 4


class Cache(Protocol):
    """A cache of single blocks."""

    def __contains__(self, block: int) -> bool: ...

    def use(self, block: int) -> None: ...


class Arc:
    """Adaptive replacement (Megiddo and Modha, FAST '03)."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.target = 0.0
        self.once: OrderedDict[int, None] = OrderedDict()
        self.often: OrderedDict[int, None] = OrderedDict()
        self.gone_once: OrderedDict[int, None] = OrderedDict()
        self.gone_often: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self.once or block in self.often

    def use(self, block: int) -> None:
        if block in self:
            self.once.pop(block, None)
            self.often[block] = None
            self.often.move_to_end(block)
            return
        back_once, back_often = block in self.gone_once, block in self.gone_often
        if back_once:
            step = max(1.0, len(self.gone_often) / len(self.gone_once))
            self.target = min(self.room, self.target + step)
        if back_often:
            step = max(1.0, len(self.gone_once) / len(self.gone_often))
            self.target = max(0.0, self.target - step)
        self.gone_once.pop(block, None)
        self.gone_often.pop(block, None)
        if len(self.once) + len(self.often) >= self.room:
            self._replace(back_often)
        if len(self.once) + len(self.gone_once) >= self.room and self.gone_once:
            self.gone_once.popitem(last=False)
        if len(self.gone_once) + len(self.gone_often) > self.room:
            (self.gone_often or self.gone_once).popitem(last=False)
        (self.often if back_once or back_often else self.once)[block] = None

    def _replace(self, back_often: bool) -> None:
        many = len(self.once) > self.target or (back_often and len(self.once) == self.target)
        if self.once and (many or not self.often):
            self.gone_once[self.once.popitem(last=False)[0]] = None
        else:
            self.gone_often[self.often.popitem(last=False)[0]] = None


class TinyLfu:
    """W-TinyLFU (Einziger, Friedman, Manes, 2017) with exact counts; the window is a share of the room."""

    def __init__(self, room: int, window: float) -> None:
        self.room = room
        self.window_max = max(1, int(room * window))
        self.main_max = max(1, room - self.window_max)
        self.window: OrderedDict[int, None] = OrderedDict()
        self.probation: OrderedDict[int, None] = OrderedDict()
        self.protected: OrderedDict[int, None] = OrderedDict()
        self.counts: Counter[int] = Counter()
        self.uses = 0

    def __contains__(self, block: int) -> bool:
        return block in self.window or block in self.probation or block in self.protected

    def use(self, block: int) -> None:
        self.counts[block] += 1
        self.uses += 1
        if self.uses >= 10 * self.room:
            self.uses //= 2
            self.counts = Counter({key: count // 2 for key, count in self.counts.items() if count > 1})
        for part in (self.window, self.protected):
            if block in part:
                part.move_to_end(block)
                return
        if block in self.probation:
            del self.probation[block]
            self.protected[block] = None
            if len(self.protected) > 0.8 * self.main_max:
                self.probation[self.protected.popitem(last=False)[0]] = None
            return
        self.window[block] = None
        if len(self.window) > self.window_max:
            self._admit(self.window.popitem(last=False)[0])

    def _admit(self, block: int) -> None:
        if len(self.probation) + len(self.protected) >= self.main_max:
            part = self.probation or self.protected
            victim = next(iter(part))
            if self.counts[block] <= self.counts[victim]:
                return
            del part[victim]
        self.probation[block] = None


class SecondUse:
    """LRU that keeps what is used for the second time within four caches of different blocks."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.kept: OrderedDict[int, None] = OrderedDict()
        self.seen: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self.kept

    def use(self, block: int) -> None:
        if block in self.kept or block in self.seen:
            self.kept[block] = None
            self.kept.move_to_end(block)
            if len(self.kept) > self.room:
                self.kept.popitem(last=False)
        self.seen[block] = None
        self.seen.move_to_end(block)
        if len(self.seen) > GHOSTS * self.room:
            self.seen.popitem(last=False)


def play(chains: Chains, cache: Cache) -> int:
    """Leading hits of a cache of blocks."""
    hits = 0
    for chain in chains:
        hits += next((at for at, block in enumerate(chain) if block not in cache), len(chain))
        for block in reversed(chain):
            cache.use(block)
    return hits


def play_graced(chains: Chains, room: int, graces: Sequence[float]) -> int:
    """Leading hits of prefix LRU where request i dates its blocks `graces[i]` uses into the future.

    A block is never dated back, so a parent always stays longer than its children.
    """
    due: dict[int, float] = {}
    order: list[tuple[float, int]] = []
    now = hits = 0
    for chain, grace in zip(chains, graces, strict=True):
        hits += next((at for at, block in enumerate(chain) if block not in due), len(chain))
        now += len(chain) + 1
        for depth, block in enumerate(chain):
            date = now + grace - depth
            if block not in due:
                heapq.heappush(order, (date, block))
            due[block] = max(date, due.get(block, date))
        own, passed = set(chain), []
        while len(due) > room and order:
            date, block = heapq.heappop(order)
            if due.get(block) != date:
                if block in due:
                    heapq.heappush(order, (due[block], block))
            elif block in own:
                passed.append((date, block))
            else:
                del due[block]
        for date, block in passed:
            heapq.heappush(order, (date, block))
        # A chain larger than the cache keeps its head.
        for block in chain[: -(len(due) - room) - 1 : -1] if len(due) > room else []:
            del due[block]
    return hits


def turns(chains: Chains, memory: int) -> list[int]:
    """Which turn of its conversation each request is, as far as the last `memory` blocks used tell."""
    known: OrderedDict[int, int] = OrderedDict()
    found = []
    for chain in chains:
        deepest = next((at for at in range(len(chain) - 1, -1, -1) if chain[at] in known), -1)
        # What all prompts begin with says nothing.
        turn = known[chain[deepest]] + 1 if deepest > 0 else 0
        found.append(min(turn, TURNS_MAX))
        for block in reversed(chain):
            known[block] = known.pop(block, turn)
        while len(known) > memory:
            known.popitem(last=False)
    return found


def continued(chains: Chains) -> list[bool]:
    """Whether anything but the root of a request's prompt that it used last is ever used again."""
    last: dict[int, int] = {}
    again = [False] * len(chains)
    for number, chain in enumerate(chains):
        for block in chain[1:]:
            if block in last:
                again[last[block]] = True
            last[block] = number
    return again


def kinds(chains: Chains) -> list[int]:
    """Classes of requests: by the turn, and by how many new blocks it brings (powers of two)."""
    seen: set[int] = set()
    found = []
    for chain, turn in zip(chains, turns(chains, 1 << 60), strict=True):
        new = sum(block not in seen for block in chain)
        seen.update(chain)
        found.append(min(turn, 3) * 8 + min(new.bit_length(), 7))
    return found


def fitted_graces(chains: Chains, classes: Sequence[int], room: int) -> dict[int, float]:
    """By class the grace that suits these requests best: hit densities by class and age, known beforehand.

    After least hit density (Beckmann, Chen, Cidon, NSDI '18): each class is kept up to the age where a use
    of room brings the same hits in all classes.
    """
    edges = [0.0] + [room / 64 * 2 ** (step / 4) for step in range(40)]
    ages: dict[int, Counter[int]] = {name: Counter() for name in set(classes)}
    lost = Counter[int]()
    last: dict[int, tuple[int, int]] = {}
    now = 0

    def bin_of(age: int) -> int:
        return min(len(edges) - 2, 1 + int(4 * log2(age / edges[1]))) if age >= edges[1] else 0

    for chain, name in zip(chains, classes, strict=True):
        now += len(chain) + 1
        for block in chain:
            if block in last:
                before, used = last[block]
                ages[before][bin_of(now - used)] += 1
            last[block] = (name, now)
    for name, _ in last.values():
        lost[name] += 1
    curves = {}
    for name, hits in ages.items():
        alive, points = hits.total() + lost[name], [(0.0, 0.0, 0.0)]
        for at in range(len(edges) - 1):
            width, (_, space, gained) = edges[at + 1] - edges[at], points[-1]
            points.append((edges[at + 1], space + (alive - hits[at] / 2) * width, gained + hits[at]))
            alive -= hits[at]
        curves[name] = points

    def kept(price: float) -> dict[int, tuple[float, float, float]]:
        return {name: max(curve, key=lambda one: one[2] - price * one[1]) for name, curve in curves.items()}

    low, high = 1e-9, 64 / room
    for _ in range(50):
        middle = (low * high) ** 0.5
        too_much = sum(one[1] for one in kept(middle).values()) > room * now
        low, high = (middle, high) if too_much else (low, middle)
    best = kept(high)
    return {name: one[0] for name, one in best.items()}


def by_turn(chains: Chains, room: int, memory: int) -> int:
    """The best simple policy found: the later a conversation's turn, the longer it is kept."""
    return play_graced(chains, room, [GRACE_SHARE * room * turn for turn in turns(chains, memory)])


def fitted(chains: Chains, room: int) -> int:
    classes = kinds(chains)
    graces = fitted_graces(chains, classes, room)
    return play_graced(chains, room, [graces[name] for name in classes])


def learnt(chains: Chains, room: int) -> int:
    """The same without seeing the future: what is done in each lesson is fitted to those before it."""
    classes, graces = kinds(chains), [0.0] * min(LESSON, len(chains))
    for start in range(LESSON, len(chains), LESSON):
        best = fitted_graces(chains[:start], classes[:start], room)
        graces += [best.get(name, 0.0) for name in classes[start : start + LESSON]]
    return play_graced(chains, room, graces)


def oracle(chains: Chains, room: int) -> int:
    return play_graced(chains, room, [0.0 if one else -1e12 for one in continued(chains)])


STUDY: dict[str, Callable[[Chains, int], int]] = {
    "ARC": lambda chains, room: play(chains, Arc(room)),
    "W-TinyLFU, window 1 %": lambda chains, room: play(chains, TinyLfu(room, 0.01)),
    "W-TinyLFU, window 50 %": lambda chains, room: play(chains, TinyLfu(room, 0.5)),
    "LRU, admission on second use": lambda chains, room: play(chains, SecondUse(room)),
    "by turn, remembers 2 caches": lambda chains, room: by_turn(chains, room, 2 * room),
    "by turn, remembers 4 caches": lambda chains, room: by_turn(chains, room, GHOSTS * room),
    "by turn, remembers all": lambda chains, room: by_turn(chains, room, 1 << 60),
    "hit density, fitted to the trace": fitted,
    "hit density, learnt as it runs": learnt,
    "knows which prompts are continued": oracle,
}


def synthetic(kind: str, count: int = 6000) -> Chains:
    """Traffic made to find where a policy is worse than LRU."""
    pick, made = random.Random(1), 0

    def new(blocks: int) -> list[int]:
        nonlocal made
        made += blocks
        return list(range(made - blocks, made))

    if kind == "shared documents":
        documents = [new(30) for _ in range(200)]
        return [documents[min(199, int(pick.paretovariate(0.8)) - 1)] + new(3) for _ in range(count)]
    if kind == "documents that change":
        chains: Chains = []
        for _ in range(6):
            documents = [new(20) for _ in range(60)]
            chains += [pick.choice(documents) + new(2) for _ in range(count // 6)]
        return chains
    # Half retries of prompts that are dead afterwards, half conversations.
    events: list[tuple[float, list[int]]] = []
    for _ in range(count // 12):
        start, prompt = pick.random() * 1000, new(10)
        events += [(start + 0.05 * at, prompt) for at in range(8)]
        start, prompt = pick.random() * 1000, []
        for _ in range(4):
            prompt = prompt + new(6)
            events.append((start, prompt))
            start += pick.expovariate(1 / 8)
    return [prompt for _, prompt in sorted(events, key=lambda one: one[0])]


def main() -> None:
    trace = read_trace(sys.argv[1])
    flat = trace.blocks.tolist()
    chains = [flat[start:end] for start, end in pairwise(trace.offsets.tolist())]
    rooms = [int(trace.block_count * share) for share in SHARES]
    runs = join_runs(trace)
    for name in ("lru", "tiercel", "fifo", "s3-fifo", "opt"):
        show(name, [one.blocks / len(flat) for one in policy_hits(name, trace, runs, rooms)])
    for name, count in STUDY.items():
        show(name, [count(chains, room) / len(flat) for room in rooms])
    for kind in ("shared documents", "documents that change", "bursts"):
        made = synthetic(kind)
        room_all = len({block for chain in made for block in chain})
        rooms = [int(room_all * share) for share in (0.02, *SHARES)]
        plain = [play_graced(made, room, [0.0] * len(made)) for room in rooms]
        graced = [by_turn(made, room, GHOSTS * room) for room in rooms]
        show(f"by turn against LRU, {kind}", [b / a - 1 for a, b in zip(plain, graced, strict=True)], "+.1%")


def show(name: str, values: Sequence[float], style: str = ".4f") -> None:
    print(f"| {name} | {' | '.join(format(value, style) for value in values)} |", flush=True)


if __name__ == "__main__":
    main()
