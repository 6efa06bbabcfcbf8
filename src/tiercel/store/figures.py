"""What the store answers and counts, as plain data."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from tiercel.store.policy import Choice

RAM = "ram"

# One read or write of a tier: a block in memory next door to a large one in another region.
TRANSFER_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
# The first token of a prompt: a few tokens on a GPU to a hundred thousand on CPUs.
TTFT_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 100.0)


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest cached prefix of a chain: `sources[i]` names where block `i` lies (`ram` or a tier).

    Asked with a prompt, `choice` says how much of it is worth loading.
    """

    sources: tuple[str, ...] = ()
    choice: Choice | None = None

    @property
    def blocks(self) -> int:
        """Length of the prefix, in blocks."""
        return len(self.sources)

    @property
    def worth(self) -> int:
        """How many of the blocks to load: all, unless a choice was made."""
        return self.blocks if self.choice is None else self.choice.blocks


@dataclass(slots=True)
class Histogram:
    """How often something took how long. `counts[i]` took up to `bounds_s[i]`, the last of them longer."""

    bounds_s: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds_s) + 1)

    @property
    def count(self) -> int:
        """How many were seen."""
        return sum(self.counts)

    @property
    def mean_s(self) -> float:
        """Their mean; 0 while none was seen."""
        return self.sum_s / self.count if self.count else 0.0

    def observe(self, seconds: float) -> None:
        """See one more."""
        self.counts[bisect.bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += seconds

    def copy(self) -> Histogram:
        """As it is now."""
        return Histogram(self.bounds_s, list(self.counts), self.sum_s)


@dataclass(slots=True)
class TierCounters:
    """Totals of one tier since the store opened. Bytes are bytes of records moved.

    Of blocks that left it: `evicted_blocks` made room, `cleared_blocks` and `dropped_blocks` were told to go,
    `corrupt` ones were wrong, `missing` ones were gone.
    """

    read_blocks: int = 0
    read_bytes: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    evicted_blocks: int = 0
    cleared_blocks: int = 0
    dropped_blocks: int = 0
    missing: int = 0
    corrupt: int = 0
    failed: int = 0
    full: int = 0
    writes_dropped: int = 0
    over_budget: int = 0
    reads_refused: int = 0
    breaker_opened: int = 0


@dataclass(slots=True)
class StoreCounters:
    """Totals of the store since it opened. Blocks unless the name says otherwise.

    `slot_waits` is how often a store had to wait for a slot of RAM, `slot_wait_s` for how long in all;
    `staged` loads found no slot but a reserved one.
    """

    lookups: int = 0
    looked_up: int = 0
    hit: int = 0
    stored: int = 0
    stores_skipped: int = 0
    stores_aborted: int = 0
    not_admitted: int = 0
    loaded: dict[str, int] = field(default_factory=dict)
    loads_failed: int = 0
    loads_timed_out: int = 0
    priced_out: int = 0
    probes: int = 0
    cleared: int = 0
    demoted: int = 0
    dropped: int = 0
    ram_cleared: int = 0
    ram_dropped: int = 0
    slot_waits: int = 0
    slot_wait_s: float = 0.0
    staged: int = 0


@dataclass(slots=True)
class RequestTotals:
    """What engines reported of their requests since the store opened; see `Decision` for the words.

    `reused_tokens` by the place they came from, `engine` for an engine's own memory. `ttft` by what was
    reused: `store`, else `engine`, else `none`. `unpriced` requests reused blocks and could not say what that
    saved. `lost` reports never arrived, `bad` ones could not be counted.
    """

    requests: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    actions: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    computed_tokens: int = 0
    reused_tokens: dict[str, int] = field(default_factory=dict)
    saved_s: float = 0.0
    spent_s: float = 0.0
    unpriced: int = 0
    ttft: dict[str, Histogram] = field(default_factory=dict)
    lost: int = 0
    bad: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that was not computed; 0 before there were any."""
        return sum(self.reused_tokens.values()) / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault of a tier: how often, and what was said of it last. `at_s` is Unix time."""

    kind: str
    tier: str
    text: str
    count: int
    at_s: float


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier now. Reads are of one block each, writes of several."""

    name: str
    blocks: int
    used_bytes: int
    cap_bytes: int | None
    pending_writes: int
    breaker: str
    counters: TierCounters
    pending_reads: int = 0
    reads: Histogram = field(default_factory=lambda: Histogram(TRANSFER_BOUNDS_S))
    writes: Histogram = field(default_factory=lambda: Histogram(TRANSFER_BOUNDS_S))

    @property
    def left(self) -> dict[str, int]:
        """How many blocks left it, by reason."""
        told = self.counters
        return {
            "capacity": told.evicted_blocks, "cleared": told.cleared_blocks, "dropped": told.dropped_blocks,
            "corrupt": told.corrupt, "missing": told.missing,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The whole store now. Of the `slots`, `reserved` ones are for loading only.

    `lossy` names the codecs that may change answers; none: what is loaded is what was stored.
    """

    slots: int
    slot_bytes: int
    slots_free: int
    ram_blocks: int
    ram_evictions: int
    leases: int
    pins: int
    counters: StoreCounters
    tiers: tuple[TierStats, ...]
    reserved: int = 0
    requests: RequestTotals = field(default_factory=RequestTotals)
    faults: tuple[Fault, ...] = ()
    lossy: tuple[str, ...] = ()

    @property
    def left(self) -> dict[str, int]:
        """How many blocks left RAM, by reason."""
        told = self.counters
        return {
            "capacity": self.ram_evictions, "demoted": told.demoted, "cleared": told.ram_cleared,
            "dropped": told.ram_dropped,
        }  # fmt: skip
