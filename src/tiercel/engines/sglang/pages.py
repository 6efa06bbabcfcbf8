"""Where the bytes of a page lie in SGLang's host pools, and copying them: addresses and sizes.

Read off the page buffers a pool names itself, and checked: a page's place must follow from its number, and
every run must lie within a tensor of the pool. What does not fit is refused; nothing is guessed. Copies are
memcpy's, straight between a pool and an arena slot, without the interpreter lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tiercel.blocks.framing import frame
from tiercel.errors import EngineError

# Address and length.
Run = tuple[int, int]
Addresses = npt.NDArray[np.uint64]
# What a pool of another make may raise when it is asked for the buffers of a page.
_NO_ANSWER = (AssertionError, AttributeError, IndexError, NotImplementedError, TypeError, ValueError)
_FORM = """layout page_size dtype temporal_dtype conv_dtype layer_num num_mamba_layers start_layer end_layer
head_num head_dim v_head_dim kv_cache_dim storage_format_tag stores_page_envelope""".split()


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of one host pool. Run `r` of page `p` lies at `base[r] + p * stride[r]`, `sizes[r]` long.

    `form` says what the bytes of a page are: kind of pool, layout, dtypes, layers, sizes of the runs. `flat`:
    they are those of a flattened page, as SGLang hands it over as a tensor. `held` keeps the memory.
    """

    page_tokens: int
    count: int
    base: Addresses
    stride: Addresses
    sizes: tuple[int, ...]
    form: bytes
    flat: bool
    held: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one page."""
        return sum(self.sizes)

    def runs(self, token: int) -> list[Run] | None:
        """The runs of the page that begins at index `token` of the pool; None if none begins there."""
        page, inside = divmod(token, self.page_tokens)
        if inside or not 0 <= page < self.count:
            return None
        starts = self.base + np.uint64(page) * self.stride
        return list(zip(starts.tolist(), self.sizes, strict=True))


def pages_of(pool: Any, name: str) -> Pages | None:
    """Read the layout of a host pool; None for one that only hands out indices and holds no bytes.

    Raises EngineError for a pool whose pages have no fixed place.
    """
    if getattr(pool, "size_per_token", None) == 0:
        return None
    called = f"host pool '{name}' ({type(pool).__name__}, layout {getattr(pool, 'layout', '?')})"
    try:
        page_tokens = int(pool.page_size)
        count = int(pool.size) // page_tokens
        last = count - 1
        first, second, end = (_buffers(pool, page, page_tokens) for page in (0, min(1, last), last))
    except _NO_ANSWER as fault:
        raise EngineError(
            f"{called} does not tell where its pages lie ({type(fault).__name__}); "
            "accepted are pools that do: try --hicache-mem-layout page_first"
        ) from None
    base, sizes = first
    stride = second[0] - base
    regular = second[1] == end[1] == sizes and (base + np.uint64(last) * stride == end[0]).all()
    if not sizes or not regular:
        raise EngineError(f"{called} has pages at irregular places; accepted are pools with a fixed stride")
    held = tuple(_tensors(vars(pool).values()))
    for starts in (base, end[0]):
        if not all(_within(held, *run) for run in zip(starts.tolist(), sizes, strict=True)):
            raise EngineError(f"{called} names bytes outside its own memory; accepted are its own")
    flat = len({_within(held, *run) for run in zip(base.tolist(), sizes, strict=True)}) == 1
    if flat:  # a slice of one tensor, flattened, has its bytes in the order of their addresses
        order = np.argsort(base)
        base, stride, sizes = base[order], stride[order], tuple(sizes[at] for at in order.tolist())
    return Pages(page_tokens, count, base, stride, sizes, _form(pool, sizes), flat, held)


def tensor_run(value: object) -> Run | None:
    """The bytes of a tensor that lies in one piece in host memory; None for anything else."""
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or not value.is_contiguous():
        return None
    return value.data_ptr(), value.numel() * value.element_size()


def copy_out(runs: Iterable[Run], start: int, payload: memoryview) -> None:
    """Fill `payload` with the bytes of a page from offset `start` on; what lies past its end is zeros."""
    at = _address(payload)
    end = at + payload.nbytes
    for address, size in _cut(runs, start, payload.nbytes):
        ctypes.memmove(at, address, size)
        at += size
    if at < end:
        ctypes.memset(at, 0, end - at)


def copy_in(payload: memoryview, runs: Iterable[Run], start: int) -> None:
    """Write `payload` over the bytes of a page from offset `start` on; what lies past its end is left."""
    at = _address(payload)
    for address, size in _cut(runs, start, payload.nbytes):
        ctypes.memmove(address, at, size)
        at += size


def _cut(runs: Iterable[Run], start: int, length: int) -> Iterator[Run]:
    """The parts of `runs` that are bytes `start..start+length-1` of all of them together."""
    stop = start + length
    offset = 0
    for address, size in runs:
        first, last = max(start, offset), min(stop, offset + size)
        if first < last:
            yield address + first - offset, last - first
        offset += size


def _address(payload: memoryview) -> int:
    return int(np.frombuffer(payload, dtype=np.uint8).ctypes.data)


def _buffers(pool: Any, page: int, page_tokens: int) -> tuple[Addresses, tuple[int, ...]]:
    tokens = torch.arange(page * page_tokens, (page + 1) * page_tokens, dtype=torch.int64)
    addresses, sizes = pool.get_page_buffer_meta(tokens)
    if len(addresses) != len(sizes):
        raise ValueError("as many sizes as addresses")
    return np.asarray(addresses, dtype=np.uint64), tuple(int(size) for size in sizes)


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _within(tensors: Iterable[torch.Tensor], start: int, size: int) -> int:
    """The address of the memory that holds a run; 0 if none of the tensors does."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() <= start and start + size <= storage.data_ptr() + storage.nbytes():
            return storage.data_ptr()
    return 0


def _form(pool: Any, sizes: tuple[int, ...]) -> bytes:
    told = [f"{name}={getattr(pool, name, None)}" for name in _FORM]
    return frame(type(pool).__name__, *told, *sizes)
