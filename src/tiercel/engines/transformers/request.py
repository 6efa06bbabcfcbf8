"""What an engine is asked and what it answers: plain values, checked when made.

It knows neither models nor stores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tiercel.engines.transformers.chunks import Span, check_spans
from tiercel.errors import RequestError
from tiercel.store.policy import Decision, Hints

FinishReason = Literal["stop", "length"]
_STOPS_MAX = 16
_STOP_CHARS_MAX = 1024
_SEED_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to answer it. Raises RequestError for a value that makes no sense.

    `temperature` 0 is greedy. `salt` separates tenants: KV stored under one is invisible under another.
    `use_cache` False neither reads nor writes the store; `hints` say so in part. `chunks` are the spans
    (start, stop) of tokens that also stand in other prompts, elsewhere: an engine that is set to reuses their
    KV nearly, for any other they are tokens like all.
    """

    tokens: Sequence[int]
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    salt: str | None = None
    use_cache: bool = True
    hints: Hints = field(default_factory=Hints)
    chunks: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        if not self.tokens:
            raise RequestError("the prompt is empty; accepted is one token or more")
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {self.max_new_tokens}; accepted is 1 or more")
        if not 0.0 <= self.temperature < math.inf:
            raise RequestError(f"temperature is {self.temperature}; accepted is 0 or more")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p is {self.top_p}; accepted is above 0 and up to 1")
        if self.seed is not None and not 0 <= self.seed <= _SEED_MAX:
            raise RequestError(f"seed is {self.seed}; accepted is 0 to {_SEED_MAX}")
        if len(self.stop) > _STOPS_MAX:
            raise RequestError(f"{len(self.stop)} stop strings; accepted are up to {_STOPS_MAX}")
        for one in self.stop:
            if not 1 <= len(one) <= _STOP_CHARS_MAX:
                raise RequestError(
                    f"a stop string has {len(one)} characters; accepted are 1 to {_STOP_CHARS_MAX}"
                )
        check_spans(self.chunks, len(self.tokens))


@dataclass(frozen=True, slots=True)
class Delta:
    """One more token, and the text that became certain with it (often a word, sometimes nothing).

    The last one of an answer carries `finish_reason`; only bookkeeping and the `Result` follow it, so a
    client need not wait for them. `reused_tokens` of the prompt were restored, as in the `Result`. The first
    one says what was decided for the prompt.
    """

    token: int
    text: str
    finish_reason: FinishReason | None = None
    reused_tokens: int = 0
    decision: Decision | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, by clock. `ttft_s` is from the start to the first token: lookup, load, prefill, sampling."""

    ttft_s: float
    lookup_s: float
    load_s: float
    prefill_s: float
    decode_s: float
    store_s: float
    settle_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """The whole answer and what it cost. `sources` counts reused blocks by where they lay (`ram`, `disk`).

    `stored_blocks` were newly stored, of prompt and answer. `tokens` includes the token that ended it.
    """

    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    reused_tokens: int
    stored_blocks: int
    timing: Timing
    sources: Mapping[str, int] = field(default_factory=dict)
    decision: Decision | None = None


Event = Delta | Result
