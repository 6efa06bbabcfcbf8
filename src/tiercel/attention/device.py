"""Memory of a device that holds KV: every tensor is asked for here, counted, and refused beyond a limit.

Where device and host are the same memory the count is the same: what would have to be on a device. It counts
keys, values and what stands for them, not what an operator needs for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from tiercel.errors import RequestError


class DeviceMemory:
    """KV on `device`, at most `limit_bytes` of it at a time (None: no limit). Used by one thread."""

    def __init__(self, device: torch.device, limit_bytes: int | None = None) -> None:
        self.device, self.limit_bytes = device, limit_bytes
        self.held_bytes = self.peak_bytes = 0

    @contextmanager
    def visiting(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """These on the device for a while: copies where they lie elsewhere. Raises RequestError."""
        size = sum(one.nbytes for one in tensors)
        self.add(size)
        try:
            yield tuple(one.to(self.device) for one in tensors)
        finally:
            self.held_bytes -= size

    def add(self, size: int) -> None:
        """Count `size` bytes more. Raises RequestError where that is more than the limit."""
        if self.limit_bytes is not None and self.held_bytes + size > self.limit_bytes:
            raise RequestError(
                f"KV of {self.held_bytes + size} bytes is needed on the device; accepted: {self.limit_bytes}"
            )
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


class Lot:
    """The part of a device's memory that one sequence has."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.device = memory.device
        self.held_bytes = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new tensor. Raises RequestError where it does not fit."""
        size = prod(shape) * dtype.itemsize
        self._memory.add(size)
        self.held_bytes += size
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def put(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor`."""
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)

    def free(self, *tensors: Tensor) -> None:
        """Give tensors of `empty` or `put` back; their owner lets go of them."""
        self._give_back(sum(one.nbytes for one in tensors))

    def close(self) -> None:
        """Give everything back."""
        self._give_back(self.held_bytes)

    def _give_back(self, size: int) -> None:
        self.held_bytes -= size
        self._memory.held_bytes -= size
