"""One layer's attention as transformers asks for it, in the shapes that are used here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from tiercel.attention.numbers import QUERIES_AT_ONCE


@dataclass(frozen=True, slots=True)
class Call:
    """Queries [batch, kv_heads, group, new, dim], post-RoPE, and keys and values.

    keys, values   [batch, kv_heads, n, dim]: of all tokens so far, or, while a policy serves an answer, of
                   the new ones alone
    window         of the layer's own; None: it has none
    """

    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    softcap: float | None
    window: int | None

    @property
    def before(self) -> int:
        """Tokens before the new ones, where keys are of all."""
        return self.keys.shape[2] - self.queries.shape[3]

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """Some queries at a time, with the place of the first among all of the call."""
        for first in range(0, self.queries.shape[3], QUERIES_AT_ONCE):
            yield first, self.queries[:, :, :, first : first + QUERIES_AT_ONCE]
