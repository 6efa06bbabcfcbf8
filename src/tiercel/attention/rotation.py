"""Moving post-RoPE keys to other positions, where a model's position encoding allows it.

    k' = k * cos(delta * inv_freq) + rotate_half(k) * sin(delta * inv_freq)

in float32, on the first `2 * len(inv_freq)` dimensions, then in the keys' dtype again. Only encodings whose
frequencies do not depend on the length or the layer are moved; for others there is no function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from tiercel.attention.policy import RotateKeys

_PROBE_POSITIONS = 7
_PROBE_ERROR_MAX = 0.02


def key_rotation(module: Any) -> RotateKeys | None:
    """A function that moves keys of `module`, tried on it; None where there is none or the trial fails."""
    found = [one for one in module.modules() if isinstance(getattr(one, "inv_freq", None), Tensor)]
    if len(found) != 1 or getattr(found[0], "rope_type", "default") in ("dynamic", "longrope"):
        return None
    inv_freq: Tensor = found[0].inv_freq.float()

    def rotate(keys: Tensor, delta: Tensor) -> Tensor:
        angles = delta[..., None, None].float() * inv_freq  # [batch, kv_heads, 1, half]
        angles = torch.cat([angles, angles], -1)
        turned = angles.shape[-1]
        part = keys[..., :turned].float()
        half = turned // 2
        swapped = torch.cat([-part[..., half:], part[..., :half]], -1)
        moved = part * angles.cos() + swapped * angles.sin()
        return torch.cat([moved.to(keys.dtype), keys[..., turned:]], -1)

    return rotate if _works(module, rotate) else None


@torch.inference_mode()
def _works(module: Any, rotate: RotateKeys) -> bool:
    """Whether a lone token's keys at a later position are its keys at the first one, moved, in all layers."""
    ids = torch.full((1, 1), 5, device=module.get_input_embeddings().weight.device)
    places = (ids * 0, ids * 0 + _PROBE_POSITIONS)
    return all(
        _near(rotate(first, torch.full(first.shape[:2], _PROBE_POSITIONS, device=ids.device)), later)
        for first, later in zip(*(_keys(module, ids, at) for at in places), strict=True)
    )


def _near(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).float().norm() <= _PROBE_ERROR_MAX * other.float().norm())


def _keys(module: Any, ids: Tensor, position: Tensor) -> list[Tensor]:
    """The keys of each layer. A lone token attends to itself only, so nothing else depends on where it is."""
    cache = DynamicCache()
    module(input_ids=ids, position_ids=position, past_key_values=cache, use_cache=True)
    layers: list[Any] = list(cache.layers)
    return [layer.keys for layer in layers]
