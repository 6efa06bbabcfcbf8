"""Scales of a quantised KV cache that vLLM keeps outside the cache: part of what the bytes mean.

Scales inside the cache's own pages are saved with them. Those outside are digested into the identity, so
that blocks written under other scales are misses. Nothing here changes a scale.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from tiercel.errors import EngineError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_NAMES = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale")
_CACHE_NAMES = ("k_scale_cache", "v_scale_cache", "_k_scale_cache", "_v_scale_cache")


def scales_digest(config: VllmConfig, cache: KVCacheConfig) -> bytes | None:
    """A digest of every scale outside the cache; None where the cache is not quantised.

    Raises EngineError when a layer keeps scales per token outside the registered cache: they would be lost.
    """
    from vllm.v1.kv_cache_interface import is_quantized_kv_cache

    if not is_quantized_kv_cache(str(config.cache_config.cache_dtype)):
        return None
    layers = config.compilation_config.static_forward_context
    hashed = blake2b(digest_size=32, person=b"tiercel-scales")
    for name in sorted(one for group in cache.kv_cache_groups for one in group.layer_names):
        layer = layers.get(name)
        for attribute in _NAMES:
            scale = getattr(layer, attribute, None)
            if isinstance(scale, torch.Tensor):
                hashed.update(f"{name}.{attribute}{tuple(scale.shape)}".encode())
                hashed.update(scale.detach().float().cpu().contiguous().numpy().tobytes())
        _refuse_outside(name, layer)
    return hashed.digest()


def _refuse_outside(name: str, layer: object) -> None:
    """Refuse scales per token that do not lie in the layer's own cache."""
    pages = getattr(layer, "kv_cache", None)
    inside = pages.untyped_storage().data_ptr() if isinstance(pages, torch.Tensor) else None
    for owner in (layer, getattr(layer, "impl", None)):
        for attribute in _CACHE_NAMES:
            scales = getattr(owner, attribute, None)
            if isinstance(scales, torch.Tensor) and scales.untyped_storage().data_ptr() != inside:
                raise EngineError(
                    f"layer {name} keeps {attribute} outside its KV cache; accepted are scales within it"
                )
