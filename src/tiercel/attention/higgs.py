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
from torch.nn.functional import embedding, pad

from tiercel.attention.numbers import products

POINTS = 256
_SAMPLES, _ROUNDS, _SEED = 60_000, 25, 20261130
_LENGTH_BITS, _LENGTH_MAX = 16, 65504.0
# Distances of this many groups to all points at a time: 4 MiB, which stay in a core's cache.
_GROUPS_AT_ONCE = 1 << 12
# Vectors that are decoded at a time to be compared with queries: bounds what a long context needs.
_VECTORS_AT_ONCE = 2048


@dataclass(frozen=True, slots=True)
class Packed:
    """Coded vectors, each once `dim` long: codes uint8 [..., n, groups], lengths float16 [..., n, 1]."""

    codes: Tensor
    lengths: Tensor
    dim: int

    def tensors(self) -> tuple[Tensor, Tensor]:
        """What they take."""
        return self.codes, self.lengths


@dataclass(frozen=True, slots=True)
class Higgs:
    """`width` numbers to one of 256 points: 4 is 2 bits a number, 2 is 4 bits."""

    width: int

    def bits(self, dim: int) -> float:
        """Bits of one vector of `dim` numbers, its length included."""
        return 8.0 * (_padded(dim, self.width) / self.width) + _LENGTH_BITS

    def pack(self, vectors: Tensor) -> Packed:
        """Code `vectors` [..., n, dim]."""
        dim = vectors.shape[-1]
        x = vectors.float()
        lengths = x.norm(dim=-1, keepdim=True).clamp(max=_LENGTH_MAX).half()
        safe = torch.where(lengths > 0, lengths.float(), 1.0)
        # A unit vector of dim numbers becomes dim numbers of variance one.
        y = _widened(_rotate(x / safe) * dim**0.5, self.width)
        codes = _indices(y.reshape(-1, self.width), self._points(y)).to(torch.uint8)
        return Packed(codes.view(*x.shape[:-1], y.shape[-1] // self.width), lengths, dim)

    def unpack(self, packed: Packed) -> Tensor:
        """What is left of the vectors, float32 [..., n, dim]. Zero vectors stay zero."""
        coded = self._looked_up(packed.codes)[..., : packed.dim]
        back = _rotate(coded / packed.dim**0.5) * packed.lengths.float()
        return torch.where(packed.lengths > 0, back, 0.0)

    def roundtrip(self, vectors: Tensor) -> Tensor:
        """What is left of `vectors` [..., n, dim] after coding, in their dtype."""
        return self.unpack(self.pack(vectors)).to(vectors.dtype)

    def products(self, queries: Tensor, packed: Packed) -> Tensor:
        """q·k in float32 with keys as they were packed, [batch, kv_heads, n, …]; shapes as in
        `numbers.products`.

        The rotation is its own transpose: turning the queries is as good as turning all keys back.
        """
        turned = _widened(_rotate(queries.float()) * packed.dim**-0.5, self.width)
        parts = [
            products(turned, self._looked_up(codes))
            for codes in torch.split(packed.codes, _VECTORS_AT_ONCE, dim=-2)
        ]
        return torch.cat(parts, -1) * packed.lengths.float().mT.unsqueeze(2)

    def _looked_up(self, codes: Tensor) -> Tensor:
        return embedding(codes.int(), self._points(codes)).flatten(-2)

    def _points(self, like: Tensor) -> Tensor:
        return codebook(self.width).to(like.device)


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


def _padded(dim: int, width: int) -> int:
    return -(-dim // width) * width


def _widened(y: Tensor, width: int) -> Tensor:
    missing = _padded(y.shape[-1], width) - y.shape[-1]
    return pad(y, (0, missing)) if missing else y


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
