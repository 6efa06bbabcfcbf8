"""Break-even: whether loading from a tier, as fast as it was measured, beats computing at a measured speed.

The same model of loading as the store's (`policy.speed`), with figures from this run; the prefill speed is
given by the user or learned by a running daemon. Nothing is estimated: without one there is no verdict.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.config import human_bytes
from tiercel.doctor.finding import Finding, ok, skip, warn
from tiercel.doctor.speed import Speed

# A gain below this share is noise to the store, which then computes.
_WORTH_SHARE = 0.02
_TOKENS_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Prefill:
    """What computing costs and what a token weighs, and where each is from; None: not known."""

    tokens_per_s: float | None = None
    token_bytes: float | None = None
    origin: str = ""
    weighed_by: str = ""


def worth(speed: Speed, prefill: Prefill) -> Finding:
    """Whether, and from how many tokens on, the store will load from this tier."""
    if prefill.tokens_per_s is None:
        return skip(
            "no measured prefill speed",
            "give --prefill TOKENS_PER_S as your engine reports it, or ask while a daemon has served",
        )
    if prefill.token_bytes is None:
        return skip("no size of a token's KV", "give --model MODEL: a built-in name or a config.json")
    block_tokens = speed.record_bytes / prefill.token_bytes
    load_tokens_per_s = block_tokens / speed.gap_s
    times = load_tokens_per_s / prefill.tokens_per_s
    compared = (
        f"{load_tokens_per_s:,.0f} against {prefill.tokens_per_s:,.0f} tokens/s {prefill.origin}; "
        f"{human_bytes(prefill.token_bytes)} a token {prefill.weighed_by}"
    )
    least = least_tokens(speed, prefill.tokens_per_s, block_tokens)
    if least is None:
        advice = "the store computes instead, and writes there gain nothing: a faster place, or write = off"
        return warn(f"never worth it ({compared})", advice, times, "times")
    said = f"{times:.1f} times as fast as computing, worth it from {least:,.0f} tokens on ({compared})"
    return ok(said, times, "times", least_tokens=least)


def least_tokens(speed: Speed, tokens_per_s: float, block_tokens: float) -> float | None:
    """The shortest prefix, in whole blocks, whose loading gains; None if none up to a million tokens does.

    one_read + (blocks - 1) * gap < (1 - 2 %) * blocks * block_tokens / tokens_per_s
    """
    block_s = (1 - _WORTH_SHARE) * block_tokens / tokens_per_s
    if speed.one_read_s < block_s:
        return block_tokens
    if speed.gap_s >= block_s:
        return None
    blocks = 1 + (speed.one_read_s - block_s) // (block_s - speed.gap_s) + 1
    return blocks * block_tokens if blocks * block_tokens <= _TOKENS_MAX else None
