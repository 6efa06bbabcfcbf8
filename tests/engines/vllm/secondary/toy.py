"""The toy engine under vLLM's own `OffloadingConnector`: its scheduler, CPU tier and tiering, our tier below.

Every byte that a step attends to is checked, so whatever a store, a load or a race gets wrong fails the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engines.vllm.toy import Rank, Toy, ToyEngine, toy_config, toy_views
from tests.store.support import RECORD, FaultyTier, Served, disk
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from tiercel.engines.vllm.secondary import TiercelTier
from tiercel.memory import Arena, ArenaKind
from tiercel.store import LaneOptions, SecondSight, TieredStore
from tiercel.tiers import Tier

# One block of two layers, in a page of its own.
ROW = 4096
TIER = "vllm:tiercel_secondary_"
FAILED = "vllm:kv_offload_tiering_promotion_job_failures"


@dataclass
class Tiered(Toy):
    """A toy with a CPU tier of `rows` chunks; `tier` are the options of ours, `tiers` all of them instead."""

    store: Any = None
    rows: int = 128
    tier: dict[str, Any] = field(default_factory=dict)
    tiers: list[dict[str, Any]] | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def start(self) -> TieredEngine:
        return TieredEngine(self)


def transfer(toy: Tiered) -> dict[str, Any]:
    """What a user writes, but for the spec: vLLM's own copies on GPUs only."""
    ours = {"type": "TiercelTier", "module_path": "tiercel.engines.vllm.secondary", **toy.tier}
    return {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec", "spec_module_path": "tests.engines.vllm.secondary.cpu",
            "cpu_bytes_to_use": toy.rows * ROW, "secondary_tiers": toy.tiers or [ours], **toy.more,
        },
    }  # fmt: skip


class TieredEngine(ToyEngine):
    toy: Tiered

    def _config(self) -> Any:
        return toy_config(self.toy, transfer(self.toy))

    def _rank(self, number: int, unit: int) -> Rank:
        connector = OffloadingConnector(self.config, KVConnectorRole.WORKER, self.cache)
        views = toy_views(self.toy, self.cache)
        connector.register_kv_caches(views)
        return Rank(views, connector, number)

    def _introduce(self) -> None:
        tier = self.manager.secondary_tiers[0]
        if isinstance(tier, TiercelTier) and not self.toy.prices:
            # Arithmetic is faster than any load: left to itself the engine would compute everything.
            tier._pace.prompt = lambda *_: None  # type: ignore[method-assign,assignment]

    def _count(self, told: dict[str, Any]) -> None:
        for name, values in told["data"].items():
            amounts = [one for one in values.values() if isinstance(one, int | float)]
            self.stats[name] = self.stats.get(name, 0) + sum(amounts)

    @property
    def manager(self) -> TieringOffloadingManager:
        found = self.connector.connector_scheduler.manager
        assert isinstance(found, TieringOffloadingManager)
        return found

    @property
    def ours(self) -> TiercelTier:
        found = self.manager.secondary_tiers[0]
        assert isinstance(found, TiercelTier)
        return found

    def count(self, name: str) -> float:
        return self.stats.get(TIER + name, 0)

    def lose_rows(self) -> None:
        """Empty vLLM's prefix cache and its CPU tier, as if other prompts had come."""
        self.forget()
        self.manager.primary_tier.reset_cache()

    def settled(self) -> None:
        """Nothing is under way or held any more."""
        self.drain()
        assert self.pool.get_num_free_blocks() == self.free_at_start
        assert not self.scheduler.requests
        assert not self.manager._jobs
        assert not self.ours._transfers._under_way
        assert not self.ours._lookups._requests
        rows = self.manager.primary_tier
        held = rows._num_allocated_chunks - len(rows._free_list) - rows._num_evictable_cache_chunks
        assert not held, "rows of the CPU tier are held for ever"


@contextmanager
def served(
    *tiers: tuple[Tier, LaneOptions], slots: int = 256, admission: SecondSight | None = None
) -> Iterator[Served]:
    """A store behind a daemon in this process, with slots of one row."""
    store = TieredStore(Arena(RECORD, slots, reserved=4, kind=ArenaKind.SHARED), tiers, admission)
    assert store.scanned(10)
    with Served(store) as daemon:
        yield daemon


def socket_of(daemon: Served) -> dict[str, Any]:
    return {"daemon.socket": str(Path(daemon.folder.name) / "s")}


@contextmanager
def on_disk(folder: Path, **options: Any) -> Iterator[tuple[Served, FaultyTier]]:
    """The same over a directory that can be told to misbehave."""
    folder.mkdir(exist_ok=True)
    tier = FaultyTier(disk(folder))
    lane = {"cap_bytes": 1 << 30, **options}
    with served((tier, LaneOptions(**lane))) as daemon:
        yield daemon, tier
