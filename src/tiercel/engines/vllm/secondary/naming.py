"""The identity of chunks of vLLM's CPU tier: everything their bytes depend on.

vLLM tells a secondary tier the model's name and the shape of its cache. Neither says which weights these are,
nor what was overridden, nor what computes; a tier that is shared or survives a restart must know. So the
whole configuration is taken from the scheduler that is making the tier. Decides nothing else.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import secrets
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    get_sliding_window_size_in_chunks,
)
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from tiercel.blocks import Identity
from tiercel.engines.vllm.jobs import Shard
from tiercel.engines.vllm.naming import identity_of
from tiercel.errors import EngineError

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.config import OffloadingParallelConfig

log = logging.getLogger("tiercel")


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine that a tier belongs to."""

    config: VllmConfig
    cache: KVCacheConfig


def making_engine() -> Engine:
    """The engine whose scheduler is making a tier right now. Raises EngineError if none is."""
    frame = inspect.currentframe()
    while frame is not None:
        config, cache = frame.f_locals.get("vllm_config"), frame.f_locals.get("kv_cache_config")
        if isinstance(config, VllmConfig) and isinstance(cache, KVCacheConfig):
            return Engine(config, cache)
        frame = frame.f_back
    raise EngineError(
        "nothing says what the chunks of this tier are; accepted is a tier made by OffloadingConnector"
    )


def chunk_tokens(spec: OffloadingSpec) -> int:
    """Tokens of one chunk (in the first group)."""
    return int(spec.tokens_per_block[0] * spec.blocks_per_chunk)


def identity_of_chunks(engine: Engine, spec: OffloadingSpec, row_bytes: int) -> Identity:
    """What all chunks of an engine have in common; `row_bytes` is a chunk of all ranks in the CPU tier.

    Reads the model's weight files (remembered from then on). vLLM's hashes know adapters by name only, so an
    engine that takes adapters shares with nobody. Raises ModelError or EngineError.
    """
    whole = Shard(
        number=0, shards=1, writes=True, layout=_layout(engine, spec, row_bytes), unit_bytes=row_bytes,
        computed=_computed(engine.config),
    )  # fmt: skip
    identity = identity_of(engine.config, {0: whole}, chunk_tokens(spec))
    if engine.config.lora_config is None:
        return identity
    log.warning("tiercel: vLLM's hashes know adapters by name only; chunks are this engine's alone")
    return apart(identity, "adapters")


def apart(identity: Identity, why: str) -> Identity:
    """An identity that nobody else has, now or later."""
    return dataclasses.replace(identity, revision=f"{identity.revision}+{why}-{secrets.token_hex(8)}")


def windowed_groups(engine: Engine, spec: OffloadingSpec) -> frozenset[bytes]:
    """The groups, as their keys end, of which vLLM wants the last chunks before a token, not all."""
    return frozenset(
        group.group_id.to_bytes(4, "big")
        for group in spec.config.groups
        if get_sliding_window_size_in_chunks(
            engine.cache.kv_cache_groups[group.group_id].kv_cache_spec,
            group.tokens_per_block * spec.blocks_per_chunk,
        )
        is not None
    )


def _layout(engine: Engine, spec: OffloadingSpec, row_bytes: int) -> bytes:
    """Form and meaning of a row: which layers, of which kind, in which order, from which ranks."""
    told = spec.config
    hashed = blake2b(digest_size=32, person=b"tiercel-vllm-row")
    groups = [engine.cache.kv_cache_groups[one.group_id] for one in told.groups]
    tensors = engine.cache.kv_cache_tensors
    for part in (
        row_bytes, told.groups, told.worker_kv_bytes_per_block, told.cache, told.replicated_layout,
        told.canonical_layout, told.kv_cache_layout, _ranks(told.parallel),
        [(one.layer_names, one.kv_cache_spec) for one in groups], [one.layers for one in tensors],
        bool(engine.config.use_v2_model_runner),
    ):  # fmt: skip
        text = repr(part).encode()
        hashed.update(len(text).to_bytes(4, "little") + text)
    return hashed.digest()


def _ranks(parallel: OffloadingParallelConfig) -> OffloadingParallelConfig:
    """All but which of several equal engines this is."""
    return dataclasses.replace(
        parallel, data_parallel_index=0, data_parallel_size=1, data_parallel_rank_local=None
    )


def _computed(config: VllmConfig) -> str:
    """What computes, as far as it can be told without asking the workers."""
    attention = blake2b(repr(config.attention_config).encode(), digest_size=8).hexdigest()
    releases = [".".join(one.split(".")[:2]) for one in (torch.__version__, vllm.__version__)]
    return f"{current_platform.get_device_name()}+torch{releases[0]}+vllm{releases[1]}+{attention}"
