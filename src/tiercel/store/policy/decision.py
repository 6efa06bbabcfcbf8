"""What was decided for one prompt, why, and what came of it: places, counts, times, a sentence for people.

Never a token, a text, a key, a salt or a session. A store keeps the latest few hundred.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from tiercel.store.policy.choose import Choice

_KEPT = 256
# The place of what an engine had in its own memory, without asking a store.
ENGINE = "engine"

Action = Literal["load", "recompute", "split", "miss"]
Outcome = Literal["answered", "cancelled", "failed"]
ACTIONS: tuple[Action, ...] = get_args(Action)
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One prompt. Blocks are counted by the place they lay in (`ram`, `disk`); times are seconds by clock.

    `found` is the longest stored prefix; `loaded` of it came before anything was computed, `met` while the
    blocks before them were; `computed_tokens` were computed, `reused_tokens` by place were not (`engine`:
    what the engine had itself). `choice` is what was expected, None where there was nothing to compare.

    `action`: all of what was found beyond the engine's own was loaded (`load`), a part (`split`), nothing
    (`recompute`), or there was none (`miss`). `outcome`: `answered` has its first token, after `ttft_s` from
    when the `engine` took the request up; None where it was not measured. `saved_s` is what computing the
    blocks that the store gave was expected to take, by the engine's own measurements; None where it had none.
    `spent_s` is how long the request waited for the store: lookup and load.

    `done` False: only looked at, so nothing of it has happened.
    """

    prompt_tokens: int
    block_tokens: int
    reason: str
    found: Mapping[str, int] = field(default_factory=dict)
    loaded: Mapping[str, int] = field(default_factory=dict)
    met: Mapping[str, int] = field(default_factory=dict)
    reused_tokens: Mapping[str, int] = field(default_factory=dict)
    computed_tokens: int = 0
    choice: Choice | None = None
    lookup_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    action: Action = "miss"
    outcome: Outcome = "answered"
    engine: str = ""
    ttft_s: float | None = None
    saved_s: float | None = None
    spent_s: float = 0.0
    done: bool = False
    number: int = 0
    at_s: float = 0.0


class DecisionLog:
    """The latest decisions that a store was told of. Thread-safe."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._lock = threading.Lock()
        self._kept: deque[Decision] = deque(maxlen=kept)
        self._number = 0

    def add(self, decision: Decision, now_s: float) -> Decision:
        """Keep a decision; returns it with its running number and date (Unix time)."""
        with self._lock:
            self._number += 1
            kept = replace(decision, number=self._number, at_s=now_s)
            self._kept.append(kept)
        return kept

    def latest(self, limit: int = _KEPT) -> list[Decision]:
        """At most `limit` decisions, the latest first."""
        with self._lock:
            return list(self._kept)[::-1][:limit]


def action_of(found_blocks: int, reused_blocks: int) -> Action:
    """What was done with the blocks that a store had."""
    if found_blocks <= 0:
        return "miss"
    if reused_blocks <= 0:
        return "recompute"
    return "load" if reused_blocks >= found_blocks else "split"


def as_json(decision: Decision) -> dict[str, Any]:
    """A decision for people's programs: plain values, times in seconds."""
    choice = decision.choice
    expected = None if choice is None else {
        "load_blocks": choice.blocks, "load_s": choice.load_s, "first_token_s": choice.expected_s,
        "load_all_s": choice.all_s, "meet_from_block": choice.meet_from, "meet_s": choice.meet_s,
        "compute_all_s": choice.recompute_s,
    }  # fmt: skip
    took = {
        "lookup_s": decision.lookup_s, "load_s": decision.load_s, "prefill_s": decision.prefill_s,
        "ttft_s": decision.ttft_s,
    }  # fmt: skip
    shown = {
        "number": decision.number, "at_s": decision.at_s, "engine": decision.engine,
        "outcome": decision.outcome, "action": decision.action, "prompt_tokens": decision.prompt_tokens,
        "block_tokens": decision.block_tokens, "found": dict(decision.found), "expected": expected,
        "loaded": dict(decision.loaded), "met": dict(decision.met),
        "reused_tokens": dict(decision.reused_tokens), "computed_tokens": decision.computed_tokens,
        "took": took, "saved_s": decision.saved_s, "spent_s": decision.spent_s, "reason": decision.reason,
    }  # fmt: skip
    if not decision.done:
        for name in _OF_DONE:
            del shown[name]
    return shown


_OF_DONE = (
    "number", "at_s", "outcome", "action", "loaded", "met", "reused_tokens", "computed_tokens", "took",
    "saved_s", "spent_s",
)  # fmt: skip


def why(found: Mapping[str, int], first: int, meet: bool, choice: Choice | None) -> str:
    """Why `first` blocks are loaded before computing begins, and with `meet` the others meanwhile."""
    blocks = sum(found.values())
    places = " and ".join(f"{count} in {place}" for place, count in found.items())
    if choice is None:
        return f"{_blocks(blocks)} found ({places}) and loaded without comparing"
    compute = f"computing all {_seconds(choice.recompute_s)}"
    if meet:
        return (
            f"{_blocks(blocks)} found ({places}): loading from the end while computing from the beginning is "
            f"expected to take {_seconds(choice.meet_s)}, {compute}"
        )
    if first == blocks:
        return (
            f"{_blocks(blocks)} found ({places}): loading them and computing the rest is expected to take "
            f"{_seconds(choice.expected_s)}, computing all {_seconds(choice.recompute_s)}"
        )
    part = f"the first {first} are loaded, the others computed" if first else "all is computed"
    return (
        f"{_blocks(blocks)} found ({places}), {part}: loading all is expected to take "
        f"{_seconds(choice.all_s)}, {compute}"
    )


def fell_short(planned: int, loaded: int, met: int | None) -> str:
    """What to add to the reason once it is known how many blocks came: nothing if all did that should have.

    `met` is how many came while others were computed, None if that was not tried.
    """
    said = f"; {_blocks(loaded)} of {planned} came in time" if loaded < planned else ""
    return said if met is None else f"{said}; {_blocks(met)} came while the others were computed"


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
