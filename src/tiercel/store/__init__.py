"""The store: what engines hold. `TieredStore` embedded; policies and movement behind it."""

from tiercel.store.base import Reading, Store, Writing
from tiercel.store.build import open_store
from tiercel.store.figures import (
    RAM,
    Fault,
    Histogram,
    Hit,
    RequestTotals,
    StoreCounters,
    StoreStats,
    TierCounters,
    TierStats,
)
from tiercel.store.journal import Event, Events
from tiercel.store.leases import LeasedBlock, NewBlock, ReadLease, WriteLease
from tiercel.store.options import LaneOptions, WriteMode
from tiercel.store.overview import Overview, PrefixNode, ScopeUse, overview_json
from tiercel.store.policy import Choice, Decision, PrefillCost, PrefillEstimator, Prompt, SecondSight, Sight
from tiercel.store.store import TieredStore

__all__ = [
    "RAM",
    "Choice",
    "Decision",
    "Event",
    "Events",
    "Fault",
    "Histogram",
    "Hit",
    "LaneOptions",
    "LeasedBlock",
    "NewBlock",
    "Overview",
    "PrefillCost",
    "PrefillEstimator",
    "PrefixNode",
    "Prompt",
    "ReadLease",
    "Reading",
    "RequestTotals",
    "ScopeUse",
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
    "overview_json",
]
