"""Where the bytes of a block lie in vLLM's registered KV tensors: addresses, strides, sizes.

Read off what vLLM registers and checked against what it planned; nothing is guessed from shapes. What does
not fit is refused. A block's payload holds, for each KV cache group, for each of its engine blocks in token
order, the bytes of every layer in the order of the group. Nothing here copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tiercel.codecs.shape import BY_HEAD, BY_TOKEN, ITEM_BYTES, KEYS_BY_CHANNEL, BlockShape
from tiercel.engines.vllm.arrangement import Interior
from tiercel.engines.vllm.jobs import NULL_BLOCK
from tiercel.errors import EngineError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

Addresses = npt.NDArray[np.uint64]
# Address in block 0, bytes from one block to the next, length.
Run = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Dim:
    """One dimension of a block: bytes between its entries, their number, the tensor's axis."""

    stride: int
    size: int
    axis: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """The contiguous runs of bytes that make up one engine block of one group.

    Run `p` of block `b` starts at address `base[p] + b * stride[p]`, is `size[p]` bytes long and lies at
    `offset[p]` of the engine block's part of the payload, `nbytes` bytes in all.
    """

    block_tokens: int
    base: Addresses
    stride: Addresses
    size: Addresses
    offset: Addresses
    nbytes: int


@dataclass(frozen=True, slots=True)
class Copies:
    """Runs of bytes to copy between engine memory and one payload (offsets), as plain lists."""

    engine: list[int]
    payload: list[int]
    sizes: list[int]


@dataclass(frozen=True, slots=True)
class Layout:
    """The registered KV cache. `digest` covers form and meaning of a payload, not where it happens to lie.

    `shape` is what codecs may know of a payload, where all layers are alike and their content is known.
    """

    groups: tuple[Pieces, ...]
    digest: bytes
    device: torch.device
    shape: BlockShape | None = None

    def unit_bytes(self, unit_tokens: int) -> int:
        """Payload bytes of `unit_tokens` tokens, a multiple of every group's block."""
        return sum(group.nbytes * (unit_tokens // group.block_tokens) for group in self.groups)

    def copies(self, tables: Sequence[Sequence[int]], first_token: int, block_tokens: int) -> Copies:
        """The runs of one block, from its token `first_token` on; `tables[g]` are its engine blocks there.

        Null blocks have no bytes to copy. `first_token` is a multiple of every group's block.
        """
        engine: list[Addresses] = []
        payload: list[Addresses] = []
        sizes: list[Addresses] = []
        at = 0
        for group, table in zip(self.groups, tables, strict=True):
            count = block_tokens // group.block_tokens
            ids: Addresses = np.asarray(table, dtype=np.uint64)
            places: Addresses = np.arange(first_token // group.block_tokens, count, dtype=np.uint64)
            assert len(ids) == len(places), (len(ids), len(places))
            there = ids != NULL_BLOCK
            ids, places = ids[there, None], places[there, None]
            engine.append((group.base + ids * group.stride).ravel())
            payload.append((np.uint64(at) + places * np.uint64(group.nbytes) + group.offset).ravel())
            sizes.append(np.broadcast_to(group.size, (len(ids), len(group.size))).ravel())
            at += count * group.nbytes
        return Copies(*(np.concatenate(part).tolist() for part in (engine, payload, sizes)))


def register(
    config: KVCacheConfig, caches: Mapping[str, torch.Tensor], known: Mapping[str, Interior] | None = None
) -> Layout:
    """Read the layout off the tensors vLLM registered. `known` is what the content of layers is, by name.

    Raises EngineError for what is not understood.
    """
    from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs

    hashed = blake2b(digest_size=32, person=b"tiercel-vllm-kv")
    groups: list[Pieces] = []
    devices: set[torch.device] = set()
    shapes: set[BlockShape | None] = set()
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        runs: list[Run] = []
        for name in group.layer_names:
            layer = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
            tensor = caches.get(name)
            if not isinstance(tensor, torch.Tensor):
                raise EngineError(
                    f"KV cache of layer {name} is not one tensor; accepted are attention caches"
                )
            devices.add(tensor.device)
            assert isinstance(layer, AttentionSpec)  # all others were refused
            dims = _dims(name, tensor, config.num_blocks)
            runs += _runs(name, tensor, dims, config.num_blocks, layer.unpadded_page_size_bytes)
            shapes.add(_shape(tensor, dims, layer, (known or {}).get(name)))
            order = [(dim.axis, dim.size) for dim in dims]
            hashed.update(repr((name, str(tensor.dtype), order, layer)).encode())
        hashed.update(b"group")
        groups.append(_pieces(spec.block_size, _merged(runs)))
    if len(devices) != 1:
        raise EngineError(f"KV cache lies on {len(devices)} devices; accepted is one")
    return Layout(tuple(groups), hashed.digest(), devices.pop(), _common(shapes))


def _shape(
    tensor: torch.Tensor, dims: list[_Dim], spec: AttentionSpec, interior: Interior | None
) -> BlockShape | None:
    """A layer's part of a payload as codecs see it; None where its content is not known, or not dense."""
    dtype, width = str(tensor.dtype).removeprefix("torch."), spec.head_size
    plain = spec.num_head_slots is None and spec.state_content_bytes is None and spec.tokens_per_state == 1
    if interior is None or dtype not in ITEM_BYTES or not plain or spec.head_size_v != width:
        return None
    order = [dim.axis for dim in dims]
    if tensor.ndim != 4 or tensor.shape[3] != 2 * width or order[-1] != 3 or 0 in order[1:]:
        return None
    by_token = order[-3:-1] == [2, 1]
    sizes = (tensor.shape[1], tensor.shape[2], width)
    if interior is Interior.KEYS_BY_CHANNEL:
        return None if by_token else BlockShape(dtype, sizes, KEYS_BY_CHANNEL)
    return BlockShape(dtype, sizes, BY_TOKEN if by_token else BY_HEAD)


def _common(shapes: set[BlockShape | None]) -> BlockShape | None:
    """What is true of all layers' parts: their shape, or at least their rows."""
    if len(shapes) == 1:
        return shapes.pop()
    rows = {None if one is None else one.as_rows() for one in shapes}
    return rows.pop() if len(rows) == 1 else None


def _dims(name: str, tensor: torch.Tensor, blocks: int) -> list[_Dim]:
    """The dimensions of one block of a layer, outermost in memory first."""
    rows, rest = divmod(tensor.shape[0], blocks)
    if rest or not rows:
        raise EngineError(f"KV cache of layer {name} has {tensor.shape[0]} rows for {blocks} blocks")
    # vLLM may cut each of its blocks into several rows for the attention kernel, evenly spaced: axis 0.
    sizes = (rows, *tensor.shape[1:])
    element = tensor.element_size()
    dims = [
        _Dim(stride * element, size, axis)
        for axis, (stride, size) in enumerate(zip(tensor.stride(), sizes, strict=True))
        if size > 1
    ]
    return sorted(dims, key=lambda dim: -dim.stride)


def _runs(name: str, tensor: torch.Tensor, dims: list[_Dim], blocks: int, page_bytes: int) -> list[Run]:
    """Each contiguous run of one layer's block, in the order of memory."""
    element = tensor.element_size()
    extent = element
    for dim in reversed(dims):
        if dim.stride < extent:
            raise EngineError(f"KV cache of layer {name} overlaps itself; this cache layout is not supported")
        extent = dim.stride * (dim.size - 1) + extent
    outer, length = list(dims), element
    while outer and outer[-1].stride == length:
        length *= outer.pop().size
    starts = [0]
    for dim in outer:
        starts = [start + step * dim.stride for start in starts for step in range(dim.size)]
    if len(starts) * length != page_bytes:
        raise EngineError(
            f"KV cache of layer {name} registers {len(starts) * length} bytes per block where vLLM plans "
            f"{page_bytes}; this cache layout is not supported"
        )
    block_stride = tensor.stride(0) * element * (tensor.shape[0] // blocks)
    end = tensor.storage_offset() * element + block_stride * (blocks - 1) + extent
    if end > tensor.untyped_storage().nbytes():
        raise EngineError(f"KV cache of layer {name} reaches beyond its memory; this layout is not supported")
    return [(tensor.data_ptr() + start, block_stride, length) for start in starts]


def _merged(runs: list[Run]) -> list[Run]:
    """Neighbouring runs as one: layouts that keep all layers of a block together become one copy."""
    merged: list[Run] = []
    for base, stride, length in runs:
        if merged and merged[-1][0] + merged[-1][2] == base and merged[-1][1] == stride:
            merged[-1] = (merged[-1][0], stride, merged[-1][2] + length)
        else:
            merged.append((base, stride, length))
    return merged


def _pieces(block_tokens: int, runs: list[Run]) -> Pieces:
    table = np.asarray(runs, dtype=np.uint64).reshape(-1, 3)
    size = table[:, 2].copy()
    ends = np.cumsum(size)
    return Pieces(block_tokens, table[:, 0].copy(), table[:, 1].copy(), size, ends - size, int(ends[-1]))
