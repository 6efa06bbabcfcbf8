"""Load or compute: how long a prefix to load so that the first token comes soonest.

Of a prompt of N blocks, the first i are loaded (from whichever tier has each; tiers work side by side), then
the rest is computed after them. For every i the expected time is

    max over tiers(time of the tier's blocks among the first i) + i * copy + prefill(rest, context = i blocks)

and the smallest wins; a gain within the noise is not worth a tier's work: what it does not have to read, it
can read for others. The break-even view is Mooncake's (Qin et al., FAST '25,
section 4, equation 2), with both sides measured here. It never waits and asks nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiercel.store.policy.prefill import PrefillCost

# A gain smaller than this share of the time is noise, and not worth a tier's work.
_WORTH_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a lookup tells of its prompt, so that it can be judged: sizes in tokens, times in seconds.

    `copy_s` is what copying one block into the engine takes it.
    """

    tokens: int
    block_tokens: int
    cost: PrefillCost
    copy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """How many of the blocks found to load, and the times expected: of the load, in all, and without it."""

    blocks: int
    load_s: float
    expected_s: float
    recompute_s: float


def choose(
    prompt: Prompt, sources: Sequence[str], start: int, seconds: Callable[[str, int], float]
) -> Choice:
    """The best prefix of the blocks found at `sources` (block `start` on; those before are there already).

    `seconds(source, blocks)` is the expected time to bring up so many blocks from a source.
    """
    context = start * prompt.block_tokens
    recompute_s = prompt.cost.seconds(prompt.tokens - context, context)
    best = Choice(0, 0.0, recompute_s, recompute_s)
    counts: dict[str, int] = {}
    load_s = 0.0
    for number, source in enumerate(sources, 1):
        counts[source] = counts.get(source, 0) + 1
        load_s = max(load_s, seconds(source, counts[source]))
        context = (start + number) * prompt.block_tokens
        # One token is always computed, for its logits.
        rest = max(1, prompt.tokens - context)
        wait_s = load_s + number * prompt.copy_s
        expected_s = wait_s + prompt.cost.seconds(rest, context)
        if expected_s < best.expected_s:
            best = Choice(number, wait_s, expected_s, recompute_s)
    if best.expected_s > recompute_s * (1 - _WORTH_SHARE):
        return Choice(0, 0.0, recompute_s, recompute_s)
    return best
