"""How a budget of device memory for KV is divided. It knows sizes only, and takes none of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiercel.config.units import format_bytes
from tiercel.engines.transformers.layout import BlockLayout
from tiercel.errors import ModelError

# Two: one is filled while the other is read.
STAGING_PIECES = 2
# A piece of more tokens would make the first wait of a step longer and the others not shorter.
_PIECE_TOKENS_MIN, _PIECE_TOKENS_MAX = 16, 2048
# Pieces take up to this share of the budget, what stays on the device the rest.
_STAGING_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Division:
    """How a budget is used: for two pieces of `piece_tokens` tokens of any one layer, and to keep the first
    `resident_tokens` tokens of every layer without a sliding window.
    """

    piece_tokens: int
    resident_tokens: int


def divide(layout: BlockLayout, windows: Sequence[int | None], budget_bytes: int) -> Division:
    """Divide `budget_bytes` for a model whose layers see `windows` tokens back (None: all).

    Raises ModelError where the budget is too small for two pieces.
    """
    weights = [shape.elements * layout.dtype.itemsize for shape in layout.shapes]
    pair_bytes = STAGING_PIECES * max(weights)
    least_bytes = _PIECE_TOKENS_MIN * pair_bytes
    if budget_bytes < least_bytes:
        raise ModelError(
            f"KV device budget {format_bytes(budget_bytes)} is too small for this model; "
            f"accepted is {format_bytes(least_bytes)} or more"
        )
    piece_tokens = _PIECE_TOKENS_MIN
    while 2 * piece_tokens <= min(_PIECE_TOKENS_MAX, _STAGING_SHARE * budget_bytes // pair_bytes):
        piece_tokens *= 2
    token_bytes = sum(weight for weight, window in zip(weights, windows, strict=True) if window is None)
    left_bytes = budget_bytes - piece_tokens * pair_bytes
    return Division(piece_tokens, left_bytes // token_bytes if token_bytes else 0)
