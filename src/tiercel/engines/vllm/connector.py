"""`TiercelConnector`: vLLM's connector interface, spread over a scheduler's and a worker's side.

vLLM makes one in its scheduler's process and one in every worker. This module only translates: what vLLM
calls to what the sides do, plain jobs to the metadata classes vLLM carries. It decides nothing.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tiercel.engines.vllm.hints import explained
from tiercel.engines.vllm.jobs import Done, Shard, Step
from tiercel.engines.vllm.opening import SchedulerParts, WorkerParts, open_scheduler, open_worker
from tiercel.engines.vllm.options import read_options
from tiercel.engines.vllm.stats import Tally, TiercelPromMetrics, TiercelStats, timed
from tiercel.engines.vllm.support import check_cache, check_engine, check_version
from tiercel.store.figures import RAM

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("tiercel")


@dataclass
class TiercelMetadata(KVConnectorMetadata):
    """Scheduler to workers, once per step."""

    step: Step = field(default_factory=Step)


@dataclass
class TiercelWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, once per step."""

    done: Done = field(default_factory=Done)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Two workers' reports as one."""
        assert isinstance(other, TiercelWorkerMetadata)
        return TiercelWorkerMetadata(self.done.merged(other.done))


@dataclass
class TiercelHandshake(KVConnectorHandshakeMetadata):
    """What a worker registered, told to the scheduler once at start."""

    shard: Shard


class TiercelConnector(KVConnectorBase_V1, SupportsHMA):
    """KV of vLLM's prompts goes to Tiercel's tiers and comes back, across engines and restarts."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        check_version(vllm.__version__)
        super().__init__(vllm_config, role, kv_cache_config)
        check_engine(vllm_config)
        check_cache(kv_cache_config)
        transfer = self._kv_transfer_config
        self._options = read_options(transfer.kv_connector_extra_config or {})
        self._private = re.sub(r"_dp\d+$", "", str(transfer.engine_id))
        if transfer.kv_load_failure_policy != "recompute":
            # Read by the scheduler only after its connector was made.
            transfer.kv_load_failure_policy = "recompute"
            if role is KVConnectorRole.SCHEDULER:
                log.info("tiercel: kv_load_failure_policy is set to recompute: a load that fails is a miss")
        self._tally = Tally()
        self._pool: BlockPool | None = None
        self._scheduler: SchedulerParts | None = None
        self._worker: WorkerParts | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a later miss, nothing else."""
        return False

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Read the layout off the KV cache and connect."""
        self._worker = open_worker(
            self._vllm_config, self._kv_cache_config, kv_caches, self._options, self._private, self._tally
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What this worker registered."""
        return None if self._worker is None else TiercelHandshake(self._worker.shard)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the step's loads; all of them are asynchronous."""
        if self._worker is not None:
            self._worker.side.load(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded within a step."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved layer by layer."""

    def wait_for_save(self) -> None:
        """Start the step's saves; their blocks are held until they are reported."""
        if self._worker is not None:
            step = self._step()
            self._worker.side.save(step)
            if step.idle:
                self._worker.side.pause(step.waiting)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that are over. With several KV cache groups a failure is told by request."""
        if self._worker is None:
            return KVConnectorTransferResults()
        results = self._worker.side.results()
        if len(self._kv_cache_config.kv_cache_groups) == 1:
            self._worker.lost_blocks |= results.lost_blocks
            return KVConnectorTransferResults(finished_recving=results.loaded)
        return KVConnectorTransferResults(finished_recving=results.loaded, failed_recving=results.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Engine blocks that a load did not fill."""
        if self._worker is None:
            return set()
        lost, self._worker.lost_blocks = self._worker.lost_blocks, set()
        return lost

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Saves that are over, requests that were not loaded whole."""
        done = None if self._worker is None else self._worker.side.done()
        return None if done is None else TiercelWorkerMetadata(done)

    def _step(self) -> Step:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, TiercelMetadata)
        return metadata.step

    # Scheduler.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All workers have registered: now blocks can be named."""
        shards = [one.shard for one in metadata.values() if isinstance(one, TiercelHandshake)]
        self._scheduler = open_scheduler(
            self._vllm_config, self._kv_cache_config, shards, self._options, self._private, self._tally
        )
        if self._pool is not None:
            self._scheduler.side.bind(self._pool)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Learn vLLM's blocks, to hold those that are being saved."""
        self._pool = gpu_block_pool

    @timed
    def on_new_request(self, request: Request) -> None:
        """Ask for the prompt while it waits its turn."""
        if self._scheduler is not None:
            self._scheduler.side.added(request)

    @timed
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond vLLM's own can be loaded, asynchronously; None: not known yet."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.side.matched(request, num_computed_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Host memory or a tier below it."""
        if self._scheduler is None or not num_external_tokens:
            return {}
        sources: dict[CacheHitSource, int] = {}
        for place, tokens in self._scheduler.side.sources(request, num_external_tokens).items():
            source = CacheHitSource.HOST if place == RAM else CacheHitSource.DISK
            sources[source] = sources.get(source, 0) + tokens
        return sources

    @timed
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Load what was offered and accepted."""
        if self._scheduler is not None and num_external_tokens:
            self._scheduler.side.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @timed
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The step's loads and saves."""
        if self._scheduler is None:
            return TiercelMetadata()
        return TiercelMetadata(self._scheduler.side.step(scheduler_output))

    @timed
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What workers report."""
        if self._scheduler is None:
            return
        self._scheduler.side.ended(connector_output.finished_recving or ())
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, TiercelWorkerMetadata):
            self._scheduler.side.reported(meta.done)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Never delays: what is being saved is held by a reference of its own."""
        return self.request_finished_all_groups(request, (block_ids,))

    @timed
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never delays: what is being saved is held by a reference of its own. Says why, if asked."""
        if self._scheduler is None:
            return False, None
        decision = self._scheduler.side.finished(request)
        return False, None if decision is None else explained(decision)

    def has_pending_push_work(self) -> bool:
        """Whether steps are needed to learn of saves that end and to publish events."""
        return self._scheduler is not None and self._scheduler.side.saving()

    def has_pending_block_frees(self) -> bool:
        """Whether blocks come free sooner than by a preemption."""
        return self._scheduler is not None and self._scheduler.side.frees_soon()

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Blocks that came to and left our tiers."""
        if self._scheduler is None or self._scheduler.events is None:
            return ()
        return self._scheduler.events.take()

    def reset_cache(self) -> bool | None:
        """Forget everything of this model; what is computed from now on is this engine's alone.

        vLLM calls this when weights change, and cannot say whether they did.
        """
        if self._scheduler is None:
            return True
        self._scheduler.forget(f"+reset-{secrets.token_hex(8)}")
        return True

    # Both.

    def get_kv_connector_stats(self) -> TiercelStats | None:
        """Counts since the last time."""
        return self._tally.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TiercelStats:
        """Counts as vLLM hands them between its processes."""
        return TiercelStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TiercelPromMetrics:
        """The same counts for Prometheus."""
        return TiercelPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End the threads and leave the store."""
        for part in (self._worker, self._scheduler):
            if part is not None:
                part.close()
        self._worker = self._scheduler = None
