"""What a prefill gives: the first token's logits, and what was reused, computed and decided. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tiercel.engines.transformers.prefix import Restored
from tiercel.store import Choice
from tiercel.store.policy import Decision


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prefilled prompt: `logits` of its last token, shape [vocabulary], and what it took.

    So many of its first tokens have exact KV (`exact_tokens`): what follows must not be stored as theirs.
    `stored_blocks` were stored meanwhile.
    """

    logits: torch.Tensor
    restored: Restored
    reused_tokens: int
    lookup_s: float
    prefill_s: float
    decision: Decision
    exact_tokens: int
    stored_blocks: int = 0

    @property
    def choice(self) -> Choice | None:
        """What was expected, if there was anything to choose."""
        return self.decision.choice
