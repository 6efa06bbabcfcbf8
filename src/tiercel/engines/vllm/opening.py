"""Putting a connector together: from vLLM's configuration and registered caches to its two sides."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
import vllm

from tiercel.blocks import Identity
from tiercel.codecs import BlockShape, marked
from tiercel.config import Config, human_bytes
from tiercel.engines.vllm.accounts import Accounts
from tiercel.engines.vllm.arrangement import interiors
from tiercel.engines.vllm.asker import Asker
from tiercel.engines.vllm.events import EventSource
from tiercel.engines.vllm.jobs import Shard
from tiercel.engines.vllm.layout import Layout, register
from tiercel.engines.vllm.mover import mover_for
from tiercel.engines.vllm.naming import Names, identity_of, names_of_shards, units_per_block
from tiercel.engines.vllm.scales import scales_digest
from tiercel.engines.vllm.scheduler import Grid, SchedulerSide
from tiercel.engines.vllm.stats import Tally
from tiercel.engines.vllm.worker import WorkerSide
from tiercel.errors import DaemonError, EngineError
from tiercel.service import RemoteStore, connect

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger("tiercel")
_CLEAR_S = 2.0


@dataclass(slots=True)
class WorkerParts:
    """One worker's connector. `lost_blocks` wait to be told to vLLM."""

    side: WorkerSide
    shard: Shard
    store: RemoteStore
    lost_blocks: set[int] = field(default_factory=set)

    def close(self) -> None:
        """End the transfers and leave the store."""
        self.side.close()
        self.store.close()


@dataclass(slots=True)
class SchedulerParts:
    """The scheduler's connector."""

    side: SchedulerSide
    asker: Asker
    store: RemoteStore
    names: list[Names]
    identity: Identity
    shards: Mapping[int, Shard]
    events: EventSource | None = None

    def forget(self, epoch: str) -> None:
        """Clear all that was stored under the names used so far, and go by new ones."""
        old = [scope.tag for names in self.names for scope in names.scopes()]
        identity = dataclasses.replace(self.identity, revision=self.identity.revision + epoch)
        self.names = names_of_shards(identity, self.shards)
        self.asker.use(self.names)
        self.side.rename(identity)
        if self.events is not None:
            self.events.use(self.names)
        self._clear(old)
        # What a save under way stores from now on is of the old names, too, and perhaps of the new weights.
        self.side.once_saved(partial(self.asker.do, partial(self._clear, old)))

    def _clear(self, tags: Sequence[bytes]) -> None:
        until_s = time.monotonic() + _CLEAR_S
        # What there is no time for is found by nobody here: it only takes room until it is evicted.
        for tag in reversed(tags):
            if (left_s := until_s - time.monotonic()) > 0:
                self.store.clear(tag, left_s)

    def close(self) -> None:
        """End the threads and leave the store."""
        self.asker.close()
        if self.events is not None:
            self.events.close()
        self.store.close()


def open_worker(
    config: VllmConfig,
    cache: KVCacheConfig,
    tensors: Mapping[str, torch.Tensor],
    options: Config,
    private: str,
    tally: Tally,
) -> WorkerParts:
    """A worker's side on the store that the options name. Raises TiercelError with one line."""
    layout = register(cache, tensors, interiors(config.compilation_config.static_forward_context))
    shard = _shard(config, cache, layout)
    store = _connect(options, shard.unit_bytes, private)
    mover = mover_for(layout.device)
    if store.slab is not None:
        mover.use_slab(store.slab)
    store.on_new_slab(mover.use_slab)
    side = WorkerSide(store, layout, shard, mover, tally, options.store.load_deadline_s)
    return WorkerParts(side, shard, store)


def open_scheduler(
    config: VllmConfig,
    cache: KVCacheConfig,
    shards: Sequence[Shard],
    options: Config,
    private: str,
    tally: Tally,
) -> SchedulerParts:
    """The scheduler's side, once every worker has said what it registered. Raises TiercelError."""
    by_number = {one.number: one for one in shards}
    if not shards or len(by_number) != shards[0].shards:
        raise EngineError(f"{len(by_number)} distinct parts of the KV registered; accepted is every one")
    unit_tokens, unit_bytes = _unit_tokens(config, cache), max(one.unit_bytes for one in shards)
    store = _connect(options, unit_bytes, private)
    check_room(store, unit_bytes)
    block_tokens = unit_tokens * units_per_block(unit_bytes, store.slot_payload_bytes)
    if len({one.computed for one in shards}) != 1:
        raise EngineError("workers compute on different devices or backends; accepted is one kind for all")
    exact = identity_of(config, by_number, block_tokens)
    identity = mark_for(exact, store, {one.shape for one in shards}, unit_bytes)
    asker = Asker(store)
    named = names_of_shards(identity, by_number)
    asker.use(named)
    grid = Grid(block_tokens, _hash_tokens(config, cache), _group_tokens(cache))
    speculative = config.speculative_config
    drops_last = speculative is not None and speculative.use_eagle()
    side = SchedulerSide(
        asker,
        grid,
        named[0].identity,
        Accounts(store.report, block_tokens, drops_last=drops_last),
        workers=config.parallel_config.world_size,
        drops_last=drops_last,
        tally=tally,
    )
    wanted = config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events
    parts = SchedulerParts(side, asker, store, named, identity, by_number)
    if wanted:
        parts.events = EventSource(store, block_tokens)
        parts.events.use(named)
        side.tell(parts.events)
    log.info("tiercel: %d tokens per block, %s", block_tokens, human_bytes(unit_bytes))
    return parts


def check_room(store: RemoteStore, block_bytes: int) -> None:
    """Raises EngineError unless a block of so many bytes fits into the daemon's slots."""
    if store.slot_payload_bytes < block_bytes:
        enough = human_bytes(block_bytes + (1 << 16))
        raise EngineError(
            f"the daemon's slots hold {human_bytes(store.slot_payload_bytes)}, one block of this model has "
            f"{human_bytes(block_bytes)}; set ram.slot of the daemon to {enough}"
        )


def mark_for(identity: Identity, store: RemoteStore, shapes: Collection[str], payload_bytes: int) -> Identity:
    """The identity for what the daemon's tiers do to blocks; where that does not go, all are kept exactly."""
    shape = BlockShape.parse(next(iter(shapes))) if len(shapes) == 1 else None
    try:
        return marked(identity, store.lossy, shape, payload_bytes)
    except EngineError as refusal:
        log.warning("tiercel: %s; its blocks are kept exactly", refusal)
        return identity


def _connect(options: Config, unit_bytes: int, private: str) -> RemoteStore:
    """The store that the options name; a daemon made for smaller blocks will do, if one unit fits."""
    try:
        return connect(options, units_per_block(unit_bytes) * unit_bytes, private=private)
    except DaemonError:
        if units_per_block(unit_bytes) == 1:
            raise
    return connect(options, unit_bytes, private=private)


def _shard(config: VllmConfig, cache: KVCacheConfig, layout: Layout) -> Shard:
    """This worker's part: pipeline stage, and the heads that its tensor-parallel rank does not share."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tp, pp = get_tp_group(), get_pp_group()
    replicas = cache.kv_tp_replicas
    distinct = tp.world_size // replicas
    return Shard(
        number=pp.rank_in_group * distinct + tp.rank_in_group // replicas,
        shards=pp.world_size * distinct,
        writes=tp.rank_in_group % replicas == 0,
        layout=layout.digest,
        unit_bytes=layout.unit_bytes(_unit_tokens(config, cache)),
        computed=_computed(config, layout.device),
        scales=scales_digest(config, cache),
        shape="" if layout.shape is None else str(layout.shape),
    )


def _computed(config: VllmConfig, device: torch.device) -> str:
    """What computes on this worker: kind of device, libraries, attention backend."""
    kind = device.type if device.type == "cpu" else torch.cuda.get_device_name(device)
    releases = [".".join(one.split(".")[:2]) for one in (torch.__version__, vllm.__version__)]
    return f"{kind}+torch{releases[0]}+vllm{releases[1]}+{_backends(config)}"


def _backends(config: VllmConfig) -> str:
    """The attention backends of all layers that cache something."""
    layers = config.compilation_config.static_forward_context.values()
    found = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    return ",".join(sorted(found))


def _unit_tokens(config: VllmConfig, cache: KVCacheConfig) -> int:
    """Tokens of one scheduler block: a multiple of every group's block."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(cache, config)[0])


def _hash_tokens(config: VllmConfig, cache: KVCacheConfig) -> int:
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(cache, config)[1])


def _group_tokens(cache: KVCacheConfig) -> tuple[int, ...]:
    return tuple(group.kv_cache_spec.block_size for group in cache.kv_cache_groups)
