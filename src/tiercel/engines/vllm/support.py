"""What of vLLM is supported. Everything else is refused at start, in one sentence, on every process."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tiercel.errors import EngineError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

VERSIONS = ("0.32",)
_HASHES = ("sha256", "sha256_cbor")


def check_version(found: str) -> None:
    """Raises EngineError unless the connector interface of this vLLM release is known."""
    release = re.match(r"\d+\.\d+", found)
    if release is None or release.group() not in VERSIONS:
        raise EngineError(f"vLLM {found} is not supported; accepted are {', '.join(VERSIONS)}")


def check_engine(config: VllmConfig) -> None:
    """Raises EngineError for a flag that Tiercel cannot honour."""
    parallel, cache = config.parallel_config, config.cache_config
    role = None if config.kv_transfer_config is None else config.kv_transfer_config.kv_role
    if role != "kv_both":
        raise EngineError(f"kv_role is {role}; accepted is kv_both")
    for flag in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (ranks := getattr(parallel, flag, 1)) > 1:
            raise EngineError(f"{flag} is {ranks}; accepted is 1")
    if cache.prefix_caching_hash_algo not in _HASHES:
        raise EngineError(
            f"prefix_caching_hash_algo is {cache.prefix_caching_hash_algo}, too weak to share KV by; "
            f"accepted are {', '.join(_HASHES)}"
        )
    if getattr(cache, "calculate_kv_scales", False):
        raise EngineError(
            "calculate_kv_scales makes the KV scales depend on the first request; accepted are fixed scales"
        )
    if config.model_config.is_encoder_decoder:
        raise EngineError("encoder-decoder models are not supported; accepted are decoder-only models")


def check_cache(config: KVCacheConfig) -> None:
    """Raises EngineError for a kind of KV cache whose blocks cannot be restored from bytes alone."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        iter_layer_specs,
    )

    accepted = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
    if not config.kv_cache_groups:
        raise EngineError("the model has no KV cache; TiercelConnector has nothing to do")
    for number, group in enumerate(config.kv_cache_groups):
        for spec in iter_layer_specs(group.kv_cache_spec):
            if type(spec) not in accepted:
                raise EngineError(
                    f"KV cache group {number} is a {type(spec).__name__} (recurrent state or the like); "
                    f"accepted are {', '.join(one.__name__ for one in accepted)}"
                )
            if spec.tokens_per_state != 1:
                raise EngineError(
                    f"KV cache group {number} keeps {spec.tokens_per_state} tokens per state; accepted is 1"
                )
        if group.host_resident or not group.enable_kv_transfer:
            raise EngineError(f"KV cache group {number} lies in host memory; accepted are device caches")
