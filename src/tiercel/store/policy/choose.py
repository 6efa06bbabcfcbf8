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
# A load that was expected to be quick is waited for a little longer than expected.
_PATIENCE, _PATIENCE_SHARE = 2.0, 0.05


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
    """How many of the blocks found to load, and the times expected: of the load, in all, and without it.

    `meet_from` and `meet_s` are for engines that can compute while they load (Cake, Jin et al., 2024): blocks
    from there on are expected to be loaded, last one first, when those before them have been computed.
    """

    blocks: int
    load_s: float
    expected_s: float
    recompute_s: float
    meet_from: int
    meet_s: float
    # The time expected if all blocks were loaded, for people to compare with.
    all_s: float = 0.0

    @property
    def patience_s(self) -> float:
        """How long the load may take before what it has not brought had better be computed."""
        return _PATIENCE * self.load_s + _PATIENCE_SHARE * self.recompute_s


def choose(
    prompt: Prompt, sources: Sequence[str], start: int, seconds: Callable[[str, int], float]
) -> Choice:
    """The best prefix of the blocks found at `sources` (block `start` on; those before are there already).

    `seconds(source, blocks)` is the expected time to bring up so many blocks from a source.
    """
    context = start * prompt.block_tokens
    recompute_s = prompt.cost.seconds(prompt.tokens - context, context)
    meet_from, meet_s = _meet(prompt, sources, start, seconds)
    best_blocks, best_load_s, best_s = 0, 0.0, recompute_s
    counts: dict[str, int] = {}
    load_s, expected_s = 0.0, recompute_s
    for number, source in enumerate(sources, 1):
        counts[source] = counts.get(source, 0) + 1
        load_s = max(load_s, seconds(source, counts[source]))
        context = (start + number) * prompt.block_tokens
        # One token is always computed, for its logits.
        rest = max(1, prompt.tokens - context)
        wait_s = load_s + number * prompt.copy_s
        expected_s = wait_s + prompt.cost.seconds(rest, context)
        if expected_s < best_s:
            best_blocks, best_load_s, best_s = number, wait_s, expected_s
    if best_s > recompute_s * (1 - _WORTH_SHARE):
        best_blocks, best_load_s, best_s = 0, 0.0, recompute_s
    return Choice(best_blocks, best_load_s, best_s, recompute_s, meet_from, meet_s, expected_s)


def _meet(
    prompt: Prompt, sources: Sequence[str], start: int, seconds: Callable[[str, int], float]
) -> tuple[int, float]:
    """Where loading from the end and computing from the beginning meet, and the time to the first token."""
    size, first = prompt.block_tokens, start * prompt.block_tokens
    rest_at = first + len(sources) * size
    rest_s = prompt.cost.seconds(max(1, prompt.tokens - rest_at), rest_at)
    counts: dict[str, int] = {}
    load_s = 0.0
    meet_from = len(sources)
    for number in range(len(sources) - 1, -1, -1):
        counts[sources[number]] = counts.get(sources[number], 0) + 1
        further_s = max(load_s, seconds(sources[number], counts[sources[number]]) + prompt.copy_s)
        if further_s > prompt.cost.seconds((number + 1) * size, first):
            break
        load_s, meet_from = further_s, number
    return meet_from, max(load_s, prompt.cost.seconds(meet_from * size, first)) + rest_s
