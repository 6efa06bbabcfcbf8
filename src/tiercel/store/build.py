"""From configuration to a running store: sizes the arena for one kind of block and opens the tiers."""

from __future__ import annotations

import threading

from tiercel.blocks import record_bytes
from tiercel.codecs import codec_of
from tiercel.codecs.consent import lossy_tiers
from tiercel.config import Config, human_bytes
from tiercel.config.schema import MEMORY, MIB, TierConfig
from tiercel.errors import MemoryLimitError, TierError
from tiercel.memory import Arena, ArenaKind, check_host
from tiercel.store.options import LaneOptions, WriteMode
from tiercel.store.policy import SecondSight
from tiercel.store.store import TieredStore
from tiercel.tiers import Tier
from tiercel.tiers.coded import coded
from tiercel.tiers.registry import open_tier, tier_names


def open_store(config: Config, payload_bytes: int) -> TieredStore:
    """Open the store that `config` describes for blocks of up to `payload_bytes` bytes.

    Raises `MemoryLimitError` when the RAM size holds no block beside the reserved ones or does not fit the
    host, `TierError` when a tier cannot be opened, `ConfigError` when a lossy codec was not accepted.
    """
    lossy = lossy_tiers(config)
    slot_bytes = record_bytes(payload_bytes)
    slots = config.ram.size_bytes // slot_bytes
    reserved = config.ram.reserved_slots
    if slots <= reserved:
        raise MemoryLimitError(
            f"ram.size = {human_bytes(config.ram.size_bytes)} holds {slots} blocks of "
            f"{human_bytes(slot_bytes)}; "
            f"accepted is {-(-(reserved + 1) * slot_bytes // MIB)}MiB or more "
            f"({reserved} reserved for loading and 1 to keep)"
        )
    if config.host_bytes > config.ram.size_bytes:
        # Each alone might fit; none of it is touched yet.
        check_host(config.host_bytes, "RAM with tiers of kind memory")
    tiers = _open_tiers(config, slot_bytes)
    try:
        arena = Arena(slot_bytes, slots, reserved=reserved, kind=ArenaKind(config.ram.kind))
    except MemoryLimitError:
        for tier, _ in tiers:
            tier.close()
        raise
    if not arena.huge_pages:
        threading.Thread(target=arena.prefault, name="tiercel-prefault", daemon=True).start()
    seen = SecondSight() if config.store.admission == "second-sight" else None
    return TieredStore(arena, tiers, seen, lossy, load_always=config.store.load == "always")


def _open_tiers(config: Config, slot_bytes: int) -> list[tuple[Tier, LaneOptions]]:
    """Open every tier; those that were opened are closed again when a later one cannot be."""
    codecs = [codec_of(tier.codec) for tier in config.tiers]
    opened: list[tuple[Tier, LaneOptions]] = []
    try:
        for tier, name in zip(config.tiers, tier_names([tier.kind for tier in config.tiers]), strict=True):
            inner = open_tier(tier, name, slot_bytes)
            opened.append((coded(inner, codecs[len(opened)]), _options(tier, config)))
    except (MemoryLimitError, TierError):
        for open_one, _ in opened:
            open_one.close()
        raise
    return opened


def _options(tier: TierConfig, config: Config) -> LaneOptions:
    return LaneOptions(
        cap_bytes=tier.size_bytes,
        write=WriteMode(tier.write),
        read_workers=tier.read_workers,
        write_workers=tier.write_workers,
        deadline_s=tier.deadline_s,
        read_queue=config.store.read_queue_blocks,
        write_queue=config.store.write_queue_blocks,
        write_per_day_bytes=tier.write_per_day_bytes,
        own_memory=tier.kind == MEMORY,
    )
