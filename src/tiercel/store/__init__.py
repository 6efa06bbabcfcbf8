"""The store: what engines hold. `TieredStore` embedded; policies and movement behind it."""

from tiercel.store.base import Reading, Store, Writing
from tiercel.store.build import open_store
from tiercel.store.figures import RAM, Hit, StoreCounters, StoreStats, TierCounters, TierStats
from tiercel.store.journal import Event, Events
from tiercel.store.leases import LeasedBlock, NewBlock, ReadLease, WriteLease
from tiercel.store.options import LaneOptions, WriteMode
from tiercel.store.policy import Choice, PrefillCost, PrefillEstimator, Prompt, SecondSight, Sight
from tiercel.store.store import TieredStore

__all__ = [
    "RAM",
    "Choice",
    "Event",
    "Events",
    "Hit",
    "LaneOptions",
    "LeasedBlock",
    "NewBlock",
    "PrefillCost",
    "PrefillEstimator",
    "Prompt",
    "ReadLease",
    "Reading",
    "SecondSight",
    "Sight",
    "Store",
    "StoreCounters",
    "StoreStats",
    "TierCounters",
    "TierStats",
    "TieredStore",
    "WriteLease",
    "WriteMode",
    "Writing",
    "open_store",
]
