"""What the store answers and counts, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiercel.store.policy import Choice

RAM = "ram"


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
class TierCounters:
    """Totals of one tier since the store opened. Bytes are bytes of records moved."""

    read_blocks: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    written_blocks: int = 0
    written_bytes: int = 0
    write_s: float = 0.0
    evicted_blocks: int = 0
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
    """Totals of the store since it opened. Blocks unless the name says otherwise."""

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


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier now."""

    name: str
    blocks: int
    used_bytes: int
    cap_bytes: int | None
    pending_writes: int
    breaker: str
    counters: TierCounters


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The whole store now."""

    slots: int
    slot_bytes: int
    slots_free: int
    ram_blocks: int
    ram_evictions: int
    leases: int
    pins: int
    counters: StoreCounters
    tiers: tuple[TierStats, ...]
