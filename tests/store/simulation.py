"""A world with one thread at a time and a clock of its own, to run the store's threads in seeded orders.

    with Simulation(seed) as world:
        world.spawn(client)
        world.run()

Inside, the store's modules see this world's `threading`, `queue` and `time`. Whoever takes a lock or waits is
put aside, and the seed alone decides who goes on. Time passes when all wait, and a little whenever somebody
goes on. A wait that nothing can end is an error, and so is a fault of any thread.
"""

from __future__ import annotations

import heapq
import queue
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

# A step costs up to this much virtual time: deadlines then come between any two steps.
_STEP_S_MAX = 0.0005
_STEPS_MAX = 2_000_000
_START_S = 1000.0
_WALL_S = 1_700_000_000.0


class Stuck(AssertionError):
    """Somebody waits for ever, or the threads go round in circles."""


class Simulation:
    """The world. `wall_jump_s` may be changed at any time: it moves the wall clock, not the monotonic one."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.now_s = _START_S
        self.wall_jump_s = 0.0
        self.steps = 0
        self.over = False
        self._ready: list[greenlet] = []
        self._timers: list[tuple[float, int, _Waiter]] = []
        self._tasks: dict[greenlet, str] = {}
        self._wanted: set[greenlet] = set()
        self._hub = getcurrent()
        self._patched: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Simulation:
        mine = {
            threading: SimpleNamespace(
                Thread=self._thread,
                Lock=lambda: Lock(self),
                Condition=lambda lock=None: Condition(self, lock),
                Event=lambda: Event(self),
                local=threading.local,
            ),
            queue: SimpleNamespace(
                Queue=lambda size=0: Queue(self, size), Full=queue.Full, Empty=queue.Empty
            ),
            time: SimpleNamespace(
                monotonic=self.monotonic,
                perf_counter=self.monotonic,
                sleep=self.sleep,
                time=lambda: _WALL_S + self.now_s + self.wall_jump_s,
                time_ns=lambda: int((_WALL_S + self.now_s + self.wall_jump_s) * 1e9),
            ),
        }
        for name, module in list(sys.modules.items()):
            if name == "tiercel.store" or name.startswith("tiercel.store."):
                for attribute, value in list(vars(module).items()):
                    if any(value is real for real in mine):
                        self._patched.append((module, attribute, value))
                        setattr(module, attribute, mine[value])
        return self

    def __exit__(self, *_: object) -> None:
        for module, attribute, value in self._patched:
            setattr(module, attribute, value)
        # From here on nobody waits for anything: what is left over ends as if its process had been killed.
        self.over = True
        for task in list(self._tasks):
            if not task.dead:
                task.throw(GreenletExit)

    def spawn(self, act: Callable[[], object], name: str = "client", *, wanted: bool = True) -> greenlet:
        """Start a thread. `run` returns when all wanted ones have ended."""
        task = greenlet(act, self._hub)
        self._tasks[task] = name
        self._ready.append(task)
        if wanted:
            self._wanted.add(task)
        return task

    def run(self) -> None:
        """Let time pass until every wanted thread has ended. Raises what a thread raises, and `Stuck`."""
        while any(not task.dead for task in self._wanted):
            self._next()

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, wait_s: float) -> None:
        self.park(_Waiter(), max(0.0, wait_s))

    def step(self) -> None:
        """Let others go first, perhaps."""
        if not self.over:
            self._ready.append(getcurrent())
            self._hub.switch()

    def park(self, waiter: _Waiter, timeout_s: float | None) -> bool:
        """Wait until somebody wakes the waiter. False if the time came first."""
        if self.over:
            return True
        waiter.task = getcurrent()
        if timeout_s is not None:
            heapq.heappush(self._timers, (self.now_s + timeout_s, self.steps, waiter))
            self.steps += 1
        self._hub.switch()
        return waiter.woken

    def wake(self, waiter: _Waiter) -> None:
        if waiter.task is not None and not waiter.done:
            waiter.woken = waiter.done = True
            self._ready.append(waiter.task)
        elif waiter.task is None:
            waiter.woken = True

    def _next(self) -> None:
        self.steps += 1
        if self.steps > _STEPS_MAX:
            raise Stuck(f"no end in sight at {self.now_s - _START_S:.3f} s: {self._alive()}")
        self.now_s += self.pick.random() * _STEP_S_MAX
        while self._timers and (self._timers[0][0] <= self.now_s or not self._ready):
            until_s, _, waiter = heapq.heappop(self._timers)
            if not waiter.done:
                self.now_s = max(self.now_s, until_s)
                waiter.done = True
                assert waiter.task is not None
                self._ready.append(waiter.task)
        if not self._ready:
            raise Stuck(f"all wait for ever at {self.now_s - _START_S:.3f} s: {self._alive()}")
        at = self.pick.randrange(len(self._ready))
        self._ready[at], self._ready[-1] = self._ready[-1], self._ready[at]
        task = self._ready.pop()
        if not task.dead:
            task.switch()
        if task.dead:
            self._tasks.pop(task, None)

    def _alive(self) -> list[str]:
        return [name for task, name in self._tasks.items() if not task.dead]

    def _thread(self, target: Callable[[], object], name: str = "thread", daemon: bool = True) -> Thread:
        return Thread(self, target, name)


class _Waiter:
    """One wait of one thread: woken, or its time is up; whichever comes first."""

    __slots__ = ("done", "task", "woken")

    def __init__(self) -> None:
        self.task: greenlet | None = None
        self.woken = False
        self.done = False


class Thread:
    def __init__(self, world: Simulation, target: Callable[[], object], name: str) -> None:
        self._world = world
        self._target = target
        self._name = name
        self._ended = Event(world)

    def start(self) -> None:
        self._world.spawn(self._run, self._name, wanted=False)

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def _run(self) -> None:
        try:
            self._target()
        finally:
            self._ended.set()


class Lock:
    def __init__(self, world: Simulation) -> None:
        self._world = world
        self._held = False
        self._waiting: list[_Waiter] = []

    def acquire(self, blocking: bool = True) -> bool:
        self._world.step()
        while self._held and not self._world.over:
            if not blocking:
                return False
            waiter = _Waiter()
            self._waiting.append(waiter)
            self._world.park(waiter, None)
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        if self._waiting:
            at = self._world.pick.randrange(len(self._waiting))
            self._world.wake(self._waiting.pop(at))

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    def __init__(self, world: Simulation, lock: Lock | None = None) -> None:
        self._world = world
        self._lock = lock or Lock(world)
        self._waiting: list[_Waiter] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        assert self._lock.locked() or self._world.over, "waits without holding the lock"
        waiter = _Waiter()
        self._waiting.append(waiter)
        self._lock.release()
        woken = self._world.park(waiter, timeout)
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        self._lock.acquire()
        return woken

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        until_s = None if timeout is None else self._world.now_s + timeout
        while not predicate():
            left_s = None if until_s is None else until_s - self._world.now_s
            if (left_s is not None and left_s <= 0) or self._world.over:
                return predicate()
            self.wait(left_s)
        return True

    def notify(self, count: int = 1) -> None:
        assert self._lock.locked() or self._world.over, "notifies without holding the lock"
        for waiter in self._waiting[:count]:
            self._waiting.remove(waiter)
            self._world.wake(waiter)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    def __init__(self, world: Simulation) -> None:
        self._world = world
        self._set = False
        self._waiting: list[_Waiter] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        for waiter in self._waiting:
            self._world.wake(waiter)
        self._waiting.clear()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            waiter = _Waiter()
            self._waiting.append(waiter)
            self._world.park(waiter, timeout)
        return self._set


class Queue:
    """As much of `queue.Queue` as is used."""

    def __init__(self, world: Simulation, size: int) -> None:
        self._world = world
        self._size = size
        self._items: deque[Any] = deque()
        self._waiting: list[_Waiter] = []

    def put_nowait(self, item: Any) -> None:
        if 0 < self._size <= len(self._items):
            raise queue.Full
        self._items.append(item)
        if self._waiting:
            self._world.wake(self._waiting.pop(0))

    def get(self, timeout: float | None = None) -> Any:
        until_s = None if timeout is None else self._world.now_s + timeout
        while not self._items:
            left_s = None if until_s is None else until_s - self._world.now_s
            if (left_s is not None and left_s <= 0) or self._world.over:
                raise queue.Empty
            waiter = _Waiter()
            self._waiting.append(waiter)
            self._world.park(waiter, left_s)
            if waiter in self._waiting:
                self._waiting.remove(waiter)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)
