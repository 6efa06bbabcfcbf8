"""How a tier is used by the store, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class WriteMode(StrEnum):
    """When a block goes down to this tier."""

    THROUGH = "through"
    ON_EVICT = "on-evict"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneOptions:
    """How a tier is used. `cap_bytes` None: no cap of ours. A call of more than `deadline_s` is a stall.

    `write_per_day_bytes` None: no budget for writing. `own_memory`: what lies there is this process'
    alone, so nothing is there that the index does not know, and ends with it, so a flush leaves it out.
    """

    cap_bytes: int | None = None
    write: WriteMode = WriteMode.THROUGH
    read_workers: int = 2
    write_workers: int = 1
    deadline_s: float = 5.0
    read_queue: int = 1024
    write_queue: int = 1024
    write_per_day_bytes: int | None = None
    own_memory: bool = False
