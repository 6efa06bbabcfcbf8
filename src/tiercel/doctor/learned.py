"""What a running daemon has seen: how fast its engines computed, what a token weighs, what was expected.

Only measured times count; who has none says nothing.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from tiercel.blocks import HEADER_BYTES
from tiercel.doctor.finding import Finding, ok, skip
from tiercel.doctor.running import Daemon
from tiercel.doctor.worth import Prefill
from tiercel.store.policy import Decision

# Shorter prefills are all overhead.
_TOKENS_MIN = 256


def learned(given: Prefill, daemon: Daemon) -> Prefill:
    """What was given, and what of the rest the daemon has seen."""
    rates = [rate for one in daemon.decisions if (rate := _rate(one)) is not None]
    told = given
    if given.tokens_per_s is None and rates:
        told = replace(
            told,
            tokens_per_s=median(rates),
            origin=f"measured in {len(rates)} request{'s' * (len(rates) > 1)}",
        )
    sizes = {one.block_tokens for one in daemon.decisions if one.block_tokens}
    if given.token_bytes is None and daemon.stats is not None and len(sizes) == 1:
        payload_bytes = daemon.stats.slot_bytes - HEADER_BYTES
        told = replace(told, token_bytes=payload_bytes / sizes.pop(), weighed_by="by the daemon's slots")
    return told


def belief(daemon: Daemon) -> Finding:
    """What the cost model expected of the latest prompt that it had a choice for."""
    for one in daemon.decisions:
        if one.choice is not None:
            compute_s, expected_s = one.choice.recompute_s, one.choice.expected_s
            said = (
                f"of the latest prompt with a choice ({one.prompt_tokens:,} tokens): all computed "
                f"{compute_s:.3f} s, loading {one.choice.blocks} blocks first {expected_s:.3f} s"
            )
            return ok(said, compute_s - expected_s, "s", compute_s=compute_s, expected_s=expected_s)
    return skip("no prompt yet with something to compare", "the model learns from the first prompts served")


def _rate(one: Decision) -> float | None:
    """Tokens a second of one prefill, if it was measured and long enough to tell."""
    if one.computed_tokens < _TOKENS_MIN:
        return None
    if one.prefill_s > 0:
        return one.computed_tokens / one.prefill_s
    if one.ttft_s is not None and one.ttft_s > one.spent_s:
        # What an engine has not split: its first token came after waiting for the store and computing.
        return one.computed_tokens / (one.ttft_s - one.spent_s)
    return None
