"""What engines tell of their requests: the latest decisions, and totals over all of them.

A report is an account, never a reason to fail: numbers are brought to what can be, names are bounded, and
what cannot be counted at all is counted as bad. Knows no prompt.

Locking: one of its own, held for microseconds; the store's lock is not needed.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

from tiercel.store.figures import TTFT_BOUNDS_S, Histogram, RequestTotals
from tiercel.store.policy import ACTIONS, ENGINE, OUTCOMES, Choice, Decision, DecisionLog

# Places are tiers and the engine; more than this many are somebody's invention, and go by one name.
_PLACES_MAX = 32
OTHER = "other"
_TOKENS_MAX = 1 << 40
_SECONDS_MAX = 1e6
_REASON_CHARS_MAX = 400
_LABEL_CHARS_MAX = 64


class Reports:
    """The accounts of one store. Thread-safe; nothing here raises."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = RequestTotals(
            outcomes=dict.fromkeys(OUTCOMES, 0),
            actions=dict.fromkeys(ACTIONS, 0),
            ttft={reused: Histogram(TTFT_BOUNDS_S) for reused in ("none", ENGINE, "store")},
        )
        self._log = DecisionLog()

    def add(self, decision: Decision) -> Decision:
        """Count what became of a request. Returns it as it is kept."""
        try:
            cleaned = _cleaned(decision)
            with self._lock:
                _count(self._totals, cleaned)
            return self._log.add(cleaned, time.time())
        except Exception:  # noqa: BLE001 (an account that goes wrong must not cost anybody a request)
            self.note_bad()
            return decision

    def note_bad(self) -> None:
        """A report came that could not be counted."""
        with self._lock:
            self._totals.bad += 1

    def note_lost(self, count: int) -> None:
        """So many reports did not get here."""
        with self._lock:
            self._totals.lost += max(0, min(count, _TOKENS_MAX))

    def latest(self, limit: int) -> list[Decision]:
        """At most `limit` decisions, the latest first."""
        return self._log.latest(limit)

    def totals(self) -> RequestTotals:
        """A copy of the totals."""
        with self._lock:
            return copy.deepcopy(self._totals)


def _count(totals: RequestTotals, one: Decision) -> None:
    totals.requests += 1
    totals.outcomes[one.outcome] += 1
    totals.actions[one.action] += 1
    totals.prompt_tokens += one.prompt_tokens
    totals.computed_tokens += one.computed_tokens
    for place, tokens in one.reused_tokens.items():
        known = place in totals.reused_tokens or len(totals.reused_tokens) < _PLACES_MAX
        name = place if known else OTHER
        totals.reused_tokens[name] = totals.reused_tokens.get(name, 0) + tokens
    totals.spent_s += one.spent_s
    from_store = any(tokens for place, tokens in one.reused_tokens.items() if place != ENGINE)
    if from_store and one.saved_s is None:
        totals.unpriced += 1
    totals.saved_s += one.saved_s or 0.0
    if one.ttft_s is not None:
        reused = "store" if from_store else ENGINE if one.reused_tokens.get(ENGINE) else "none"
        totals.ttft[reused].observe(one.ttft_s)


def _cleaned(one: Decision) -> Decision:
    """With numbers that can be: nothing negative, no more tokens in all than the prompt has."""
    prompt = _tokens(one.prompt_tokens)
    computed = min(_tokens(one.computed_tokens), prompt)
    left = prompt - computed
    reused: dict[str, int] = {}
    for place, tokens in list(one.reused_tokens.items())[:_PLACES_MAX]:
        taken = min(_tokens(tokens), left)
        left -= taken
        if taken:
            reused[place[:_LABEL_CHARS_MAX]] = taken
    return replace(
        one,
        prompt_tokens=prompt,
        block_tokens=_tokens(one.block_tokens),
        reason=one.reason[:_REASON_CHARS_MAX],
        found=_blocks(one.found),
        loaded=_blocks(one.loaded),
        met=_blocks(one.met),
        reused_tokens=reused,
        computed_tokens=computed,
        choice=None if one.choice is None else _expected(one.choice),
        lookup_s=_seconds(one.lookup_s),
        load_s=_seconds(one.load_s),
        prefill_s=_seconds(one.prefill_s),
        engine=one.engine[:_LABEL_CHARS_MAX],
        ttft_s=None if one.ttft_s is None else _seconds(one.ttft_s),
        saved_s=None if one.saved_s is None else _seconds(one.saved_s),
        spent_s=_seconds(one.spent_s),
    )


def _expected(choice: Choice) -> Choice:
    """JSON knows no infinity: one such figure would take the whole overview from whoever looks."""
    return Choice(
        blocks=_tokens(choice.blocks),
        load_s=_seconds(choice.load_s),
        expected_s=_seconds(choice.expected_s),
        recompute_s=_seconds(choice.recompute_s),
        meet_from=_tokens(choice.meet_from),
        meet_s=_seconds(choice.meet_s),
        all_s=_seconds(choice.all_s),
    )


def _blocks(places: Mapping[str, int]) -> dict[str, int]:
    return {
        place[:_LABEL_CHARS_MAX]: _tokens(count)
        for place, count in list(places.items())[:_PLACES_MAX]
        if count > 0
    }


def _tokens(count: int) -> int:
    return max(0, min(int(count), _TOKENS_MAX))


def _seconds(seconds: float) -> float:
    return min(max(0.0, seconds), _SECONDS_MAX) if math.isfinite(seconds) else 0.0
