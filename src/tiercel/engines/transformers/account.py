"""The account of one prompt: what was found, loaded, waited for and computed, and why. Becomes a `Decision`.

Counts and times only; it decides nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tiercel.engines.transformers.prefix import Found, Restored
from tiercel.store import PrefillCost
from tiercel.store.policy import Decision, Outcome, action_of, fell_short, why

_ENGINE = "transformers"


@dataclass(slots=True)
class Account:
    """A prompt of so many tokens. `unasked` is why the store was not asked, None if it was.

    `loaded` counts by source what came before anything was computed, `restored` also what came meanwhile;
    `waited_s` is how long computing waited for the latter. `cost` prices what was not computed.
    """

    tokens: int
    block_tokens: int
    unasked: str | None = None
    found: Found | None = None
    restored: Restored = field(default_factory=Restored)
    loaded: Counter[str] = field(default_factory=Counter)
    cost: PrefillCost | None = None
    computed_tokens: int = 0
    prefill_s: float = 0.0
    waited_s: float = 0.0

    @property
    def reused_blocks(self) -> int:
        """Blocks that were not computed."""
        return self.restored.sources.total()

    def looked(self) -> Decision:
        """What was found and would be done."""
        found = self.found
        return Decision(
            prompt_tokens=self.tokens,
            block_tokens=self.block_tokens,
            reason=self._reason(),
            found=Counter(found.sources) if found is not None else {},
            choice=found.choice if found is not None else None,
            lookup_s=found.lookup_s if found is not None else 0.0,
            engine=_ENGINE,
        )

    def done(self, outcome: Outcome) -> Decision:
        """What became of it."""
        found, size = self.found, self.block_tokens
        met = self.restored.sources - self.loaded
        reason = self._reason()
        if found is not None and outcome == "answered":
            reason += fell_short(found.load, self.restored.blocks, met.total() if found.meet else None)
        before = self.looked()
        return Decision(
            prompt_tokens=self.tokens,
            block_tokens=size,
            reason=reason,
            found=before.found,
            loaded=dict(self.loaded),
            met=dict(met),
            reused_tokens={place: blocks * size for place, blocks in self.restored.sources.items()},
            computed_tokens=self.computed_tokens,
            choice=before.choice,
            lookup_s=before.lookup_s,
            load_s=self.restored.load_s,
            prefill_s=self.prefill_s,
            action=action_of(len(found.sources) if found is not None else 0, self.reused_blocks),
            outcome=outcome,
            engine=_ENGINE,
            saved_s=self._saved_s(),
            spent_s=before.lookup_s + self.restored.load_s + self.waited_s,
            done=True,
        )

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Computing waits for the store."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - began_s

    def _saved_s(self) -> float | None:
        cost = self.cost
        if not self.reused_blocks:
            return 0.0
        if cost is None:
            return None
        assert self.found is not None
        size, met = self.block_tokens, self.reused_blocks - self.restored.blocks
        saved_s = cost.saved(self.restored.blocks * size)
        return saved_s + (cost.saved(met * size, (len(self.found.chain) - met) * size) if met else 0.0)

    def _reason(self) -> str:
        found = self.found
        if self.unasked is not None:
            return self.unasked
        if found is None:
            return f"all is computed: no full block of {self.block_tokens} tokens lies before the last token"
        if not found.sources:
            return "all is computed: nothing of it is stored"
        return why(Counter(found.sources), found.load, found.meet, found.choice)
