"""How far keys of real KV are off in eight bits, by what a scale is for: what int8's groups were chosen by.

Direct and slow; knows nothing of the codec's format. `peak` is a scale up to a group's largest magnitude (two
bytes), `ends` one between its lowest and highest number (four).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SPANS = (256, 128, 64, 32, 16)


def groupings(blocks: Sequence[memoryview], sizes: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Bits per number, relative error and that of the worst token's head, of keys of blocks [layers, K and V,
    heads, tokens, head_dim] in bfloat16.
    """
    keys = torch.stack(
        [torch.frombuffer(one, dtype=torch.bfloat16).view(sizes)[:, 0] for one in blocks]
    ).float()
    found = {"peak by token": told(keys, by_peak(keys, -1), 8 + 16 / sizes[-1])}
    for span in SPANS:
        grouped = keys.unflatten(-2, (-1, span))
        found[f"peak by channel, {span} tokens"] = told(keys, by_peak(grouped, -2), 8 + 16 / span)
        found[f"ends by channel, {span} tokens"] = told(keys, by_ends(grouped, -2), 8 + 32 / span)
    return found


def by_peak(x: Tensor, axis: int) -> Tensor:
    step = x.abs().amax(axis, keepdim=True).clamp(min=1e-30) / 127
    return (x / step).round() * step


def by_ends(x: Tensor, axis: int) -> Tensor:
    low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    step = (high - low).clamp(min=1e-30) / 255
    return ((x - low) / step).round() * step + low


def told(keys: Tensor, back: Tensor, bits: float) -> dict[str, float]:
    off = back.view(keys.shape).bfloat16().float() - keys
    worst = (off.norm(dim=-1) / keys.norm(dim=-1).clamp(min=1e-9)).max()
    return {
        "bits": bits,
        "relative_error": (off.norm() / keys.norm()).item(),
        "worst_token": worst.item(),
    }
