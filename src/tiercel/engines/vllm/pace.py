"""What computing a prompt costs in this engine, watched while it runs.

Only steps that compute a part of one prompt and nothing else tell something, and only as long as vLLM has one
step at a time under way. Belongs to the scheduler's thread.
"""

from __future__ import annotations

from tiercel.store import PrefillEstimator, Prompt

# Shorter steps are all overhead, and too short a prompt is never worth pricing.
_TOKENS_MIN = 16
# Before this many steps were watched, what is cached is loaded without asking what it saves.
_OBSERVED_MIN = 3


class Pace:
    """Times steps and prices prompts."""

    def __init__(self) -> None:
        self._estimator = PrefillEstimator()
        self._watched: tuple[int, int, float] | None = None
        self._under_way = 0

    def began(self, tokens: int, context: int, now_s: float) -> None:
        """A step begins that computes `tokens` of one prompt, after `context` that are there."""
        self._under_way += 1
        alone = self._under_way == 1 and tokens >= _TOKENS_MIN
        self._watched = (tokens, context, now_s) if alone else None

    def skipped(self) -> None:
        """A step begins that tells nothing."""
        self._under_way += 1
        self._watched = None

    def ended(self, now_s: float) -> None:
        """The results of a step are in."""
        self._under_way = max(0, self._under_way - 1)
        if self._watched is not None and not self._under_way:
            tokens, context, began_s = self._watched
            self._estimator.observe(tokens, context, now_s - began_s)
            self._watched = None

    def prompt(self, tokens: int, block_tokens: int) -> Prompt | None:
        """A prompt with its price; None while too little was watched."""
        if self._estimator.observed < _OBSERVED_MIN:
            return None
        cost = self._estimator.cost()
        return None if cost is None else Prompt(tokens, block_tokens, cost)
