"""What reuse of chunks is set to do, and which of a prompt's tokens it leaves to be computed.

A chunk is a piece of a prompt, such as a document, whose KV was computed by itself and is moved to where it
stands now. Its first tokens, which then had nothing before them, are computed anew (EPIC, Hu et al., arXiv
2410.15332), and of the others the share that deviates most (CacheBlend, Yao et al., arXiv 2405.16444).
Positions and counts only; no tensor, no store.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from tiercel.errors import ConfigError, RequestError

OFF = "no"
# What a chunk's KV is called in lists, figures and reports of an evaluation.
METHOD = "chunks"
Span = tuple[int, int]
_SETTING = re.compile(r"([0-9]{1,5})(?:\+([0-9]{1,3}(?:\.[0-9]{1,6})?|\.[0-9]{1,6}))?", re.ASCII)
SPANS_MAX = 4096
# A chunk takes whole blocks of a store. With less than a quarter of one, computing it alone costs more than
# its next use saves, and its block earns a tenth of what a full one does (docs/chunks.md).
_BLOCK_SHARE_MIN = 0.25


@dataclass(frozen=True, slots=True)
class ChunkReuse:
    """`head_tokens` of every moved chunk are computed anew, and the `ratio` of others that deviate most."""

    head_tokens: int = 16
    ratio: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """What a setting says, such as `16` or `16+0.15`; None for `no`. Raises ConfigError."""
        if text == OFF:
            return None
        found = _SETTING.fullmatch(text)
        ratio = float(found[2] or 0) if found is not None else math.inf
        if found is None or ratio > 1:
            raise ConfigError(
                f"attention.chunks: is {text[:40]!a}; accepted: no, how many first tokens of a chunk are "
                "computed anew, such as 16, or with the share of others that deviate most, such as 16+0.15"
            )
        return cls(int(found[1]), ratio)

    def __str__(self) -> str:
        return f"{self.head_tokens}+{self.ratio:g}" if self.ratio else str(self.head_tokens)

    def worth(self, span: Span, block_tokens: int) -> bool:
        """Whether a chunk of this length leaves more to reuse than is computed anew, and deserves a block."""
        tokens = span[1] - span[0]
        return tokens > 2 * self.head_tokens and tokens >= _BLOCK_SHARE_MIN * block_tokens


@dataclass(frozen=True, slots=True)
class Placed:
    """Tokens `start..stop-1`, whose KV came from a chunk. `at_home`: they are where they were computed."""

    start: int
    stop: int
    at_home: bool = False


def check_spans(spans: Sequence[Span], tokens: int) -> None:
    """Raise RequestError unless `spans` are pieces of a prompt of so many `tokens`, in order and apart."""
    if len(spans) > SPANS_MAX:
        raise RequestError(f"{len(spans)} chunks; accepted are up to {SPANS_MAX}")
    before = 0
    for start, stop in spans:
        if not before <= start < stop <= tokens:
            raise RequestError(
                f"chunk {start}..{stop} is empty, overlaps the one before or leaves the prompt; accepted are "
                f"spans in order within 0..{tokens}"
            )
        before = stop


def places_to_compute(first: int, tokens: int, placed: Sequence[Placed], reuse: ChunkReuse) -> list[int]:
    """Places from `first` on that no chunk's KV stands for, in order; always with the last token's."""
    places: list[int] = []
    at = first
    for one in placed:
        places += range(at, one.start if one.at_home else min(one.start + reuse.head_tokens, one.stop))
        at = one.stop
    places += range(at, tokens)
    return places if places and places[-1] == tokens - 1 else [*places, tokens - 1]


def places_that_may_deviate(placed: Sequence[Placed], computed: Sequence[int]) -> list[int]:
    """Places of moved chunks that are not computed anyway, in order."""
    anyway = frozenset(computed)
    return [
        place
        for one in placed
        if not one.at_home
        for place in range(one.start, one.stop)
        if place not in anyway
    ]


def deviating_count(placed: Sequence[Placed], reuse: ChunkReuse) -> int:
    """How many tokens the ratio stands for: a share of all tokens of moved chunks, rounded up."""
    return math.ceil(reuse.ratio * sum(one.stop - one.start for one in placed if not one.at_home))
