"""What computing a prompt costs in this engine, told from when its chunks come down to the CPU tier.

vLLM tells a tier nothing of its steps. But of a prompt that is computed alone from its beginning, the chunks
of each step come down one step after the other: the time between two is that of one step, and where all come
at once, the time since it was scheduled is that of its only step, and a little more. That errs towards
loading, which is what vLLM does without us. Belongs to the scheduler's thread.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from tiercel.store import PrefillEstimator, Prompt

# Before this many prompts were watched, what is cached is loaded without asking what it saves.
_OBSERVED_MIN = 3


@dataclass(slots=True)
class _Alone:
    """A prompt computed with no other beside it: its tokens that have come down, when, and how often."""

    request: str
    since_s: float
    tokens: int = 0
    took_s: float = 0.0
    times: int = 0


class Pace:
    """Watches requests that have the engine to themselves, and prices prompts."""

    def __init__(self) -> None:
        self._estimator = PrefillEstimator()
        self._live: set[str] = set()
        self._alone: _Alone | None = None

    def began(self, request: str) -> None:
        """vLLM has a request more: none is alone."""
        self._live.add(request)
        self._alone = None

    def over(self, request: str) -> None:
        """A request has ended."""
        self._live.discard(request)
        alone, self._alone = self._alone, None
        if alone is not None and alone.request == request and alone.times == 1:
            self._estimator.observe(alone.tokens, 0, alone.took_s)

    def scheduled(self, requests: Collection[str]) -> None:
        """A step is made, with these requests for the first time."""
        if len(self._live) == 1 and self._live.issubset(requests):
            (name,) = self._live
            self._alone = _Alone(name, time.monotonic())

    def came_down(self, request: str, first: int, stop: int, chunk_tokens: int) -> None:
        """Chunks `first..stop-1` of a request, and none before them missing, have reached the CPU tier."""
        alone = self._alone
        if alone is None or alone.request != request or first * chunk_tokens != alone.tokens:
            self._alone = None
            return
        now_s = time.monotonic()
        tokens, took_s = stop * chunk_tokens, now_s - alone.since_s
        if alone.times:
            self._estimator.observe(tokens - alone.tokens, alone.tokens, took_s)
        alone.tokens, alone.took_s, alone.since_s = tokens, took_s, now_s
        alone.times += 1

    def prompt(self, chunks: int, chunk_tokens: int) -> Prompt | None:
        """A prompt of so many chunks with its price; None while too little was watched."""
        if self._estimator.observed < _OBSERVED_MIN:
            return None
        cost = self._estimator.cost()
        if cost is None:
            return None
        # Its end is not known here; that much is computed in any case.
        return Prompt(chunks * chunk_tokens + 1, chunk_tokens, cost)
