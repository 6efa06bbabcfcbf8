"""HIGGS: vectors rotated until they look Gaussian, then coded with a codebook that is good for Gaussians.

A vector of `dim` numbers is divided by its length and rotated with a Hadamard matrix; groups of `width`
numbers are replaced by the nearest of 256 points. The codebook is our own: k-means on a fixed sample of N(0,
1), made on first use (a second), the same in every process on one kind of machine. Source of the method:
HIGGS, arXiv 2411.17525, section 4. Beside this, a token costs one length in 16 bits per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

POINTS = 256
_SAMPLES, _ROUNDS, _SEED = 60_000, 25, 20261130
_LENGTH_BITS, _LENGTH_MAX = 16, 65504.0
# Distances of this many groups to all points at a time: 4 MiB, which stay in a core's cache.
_GROUPS_AT_ONCE = 1 << 12


@dataclass(frozen=True, slots=True)
class Higgs:
    """`width` numbers to one of 256 points: 4 is 2 bits a number, 2 is 4 bits."""

    width: int

    def bits(self, dim: int) -> float:
        """Bits of one vector of `dim` numbers, its length included."""
        return 8.0 * (_padded(dim, self.width) / self.width) + _LENGTH_BITS

    def roundtrip(self, vectors: Tensor) -> Tensor:
        """What is left of `vectors` [..., dim] after coding, in their dtype. Zero vectors stay zero."""
        dim = vectors.shape[-1]
        x = vectors.float()
        length = x.norm(dim=-1, keepdim=True).clamp(max=_LENGTH_MAX).half().float()
        safe = torch.where(length > 0, length, 1.0)
        # A unit vector of dim numbers becomes dim numbers of variance one.
        y = _rotate(x / safe) * dim**0.5
        coded = _nearest(_pad(y, self.width), codebook(self.width).to(x.device))[..., :dim]
        back = _rotate(coded / dim**0.5) * length
        return torch.where(length > 0, back, 0.0).to(vectors.dtype)


@lru_cache(maxsize=4)
def codebook(width: int) -> Tensor:
    """The 256 points [256, width] for standard normal numbers."""
    generator = torch.Generator().manual_seed(_SEED)
    sample = torch.randn(_SAMPLES, width, generator=generator)
    points = sample[:POINTS].clone()
    for _ in range(_ROUNDS):
        near = _indices(sample, points)
        sums = torch.zeros_like(points).index_add_(0, near, sample)
        counts = torch.bincount(near, minlength=POINTS)[:, None]
        points = torch.where(counts > 0, sums / counts.clamp(min=1), points)
    return points


def _indices(groups: Tensor, points: Tensor) -> Tensor:
    """The nearest point of each of `groups` [n, width]."""
    half = points.square().sum(-1) / 2
    parts = [torch.addmm(-half, part, points.mT).argmax(-1) for part in torch.split(groups, _GROUPS_AT_ONCE)]
    return torch.cat(parts) if parts else groups.new_zeros(0, dtype=torch.long)


def _nearest(y: Tensor, points: Tensor) -> Tensor:
    groups = y.reshape(-1, points.shape[1])
    coded: Tensor = points[_indices(groups, points)]
    return coded.reshape(y.shape)


def _padded(dim: int, width: int) -> int:
    return -(-dim // width) * width


def _pad(y: Tensor, width: int) -> Tensor:
    missing = _padded(y.shape[-1], width) - y.shape[-1]
    return torch.nn.functional.pad(y, (0, missing)) if missing else y


def _rotate(x: Tensor) -> Tensor:
    """A symmetric orthogonal rotation: Hadamard in blocks of the largest power of two that divides dim."""
    dim = x.shape[-1]
    block = dim & -dim
    return (x.reshape(*x.shape[:-1], dim // block, block) @ _hadamard(block).to(x.device)).reshape(x.shape)


@lru_cache(maxsize=8)
def _hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    scaled: Tensor = matrix / size**0.5
    return scaled
