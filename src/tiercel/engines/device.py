"""Where a model runs, and what that changes for copying KV: how a copy ends, and how it runs beside others.

It never allocates slot memory. But for a `Copier`, every copy is queued on the device's current stream,
behind the kernels that wrote its source and ahead of those that read its target.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from tiercel.errors import ModelError


def resolve_device(name: str) -> torch.device:
    """Return the device called `name`: `auto`, `cpu`, `cuda` or `cuda:N`. Raises ModelError otherwise."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"device {name!r} is unknown; accepted are auto, cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"device {name!r} is not supported; accepted are auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"device {name!r} is not there; this host has {torch.cuda.device_count()} CUDA devices"
        )
    return device


def wait_for_device(device: torch.device) -> None:
    """Block until everything queued on the device's current stream is done. Free on a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def side_stream(device: torch.device) -> AbstractContextManager[object]:
    """A stream of its own for the copies of another thread; nothing on a CPU.

    For targets that no queued kernel reads or writes; `copy_in` waits for the copies it queued.
    """
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def copy_in(payload: memoryview, parts: Iterable[torch.Tensor]) -> None:
    """Copy a block's bytes into `parts`, in order; `payload` may be given back as soon as this returns.

    Every part is a (strided) view of a cache buffer; together they have exactly the payload's bytes.
    """
    offset = 0
    device = torch.device("cpu")
    for part in parts:
        source = torch.frombuffer(payload, dtype=part.dtype, count=part.numel(), offset=offset)
        part.copy_(source.view(part.shape), non_blocking=True)
        offset += part.numel() * part.element_size()
        device = part.device
    assert offset == payload.nbytes, (offset, payload.nbytes)
    # The caller may hand the slot back once this returns, so the device must have read it by then.
    wait_for_device(device)


def copy_out(parts: Iterable[torch.Tensor], payload: memoryview) -> None:
    """Copy `parts`, in order, into a block's bytes; the bytes are final when this returns.

    Queued behind the kernels that compute the parts, so what is copied is what they wrote.
    """
    offset = 0
    device = torch.device("cpu")
    for part in parts:
        target = torch.frombuffer(payload, dtype=part.dtype, count=part.numel(), offset=offset)
        target.view(part.shape).copy_(part, non_blocking=True)
        offset += part.numel() * part.element_size()
        device = part.device
    assert offset == payload.nbytes, (offset, payload.nbytes)
    wait_for_device(device)


def host_empty(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised host memory that `device` copies from and to by itself: page-locked for CUDA."""
    return torch.empty(tuple(sizes), dtype=dtype, pin_memory=device.type == "cuda")


def copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy [heads, tokens, dim], whose heads may lie apart, queued on the current stream.

    Between host and device a copy only runs by itself where both sides are contiguous: one per head.
    """
    if target.device == source.device:
        target.copy_(source)
        return
    for row, other in zip(target, source, strict=True):
        row.copy_(other, non_blocking=True)


class Arrival(Protocol):
    """A copy on its way."""

    def done(self) -> bool:
        """Whether it has ended by now."""
        ...

    def wait(self) -> None:
        """Let what is computed after this see the copy. Raises what made it fail."""
        ...


class Copier:
    """Copies from host memory to a device beside what is computed there: on a CPU in a thread of its own, on
    CUDA on a stream of its own. A target may be in use by what was queued before; one copy follows another.

    There is no deadline: memory that is being written cannot be left to anybody else.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread: ThreadPoolExecutor | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        else:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="tiercel-copier")

    def start(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Arrival:
        """Copy each (target, source), both [heads, tokens, dim]. Sources must stay as they are meanwhile."""
        if self._thread is not None:
            return _Threaded(self._thread.submit(self.copy, pairs))
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self.copy(pairs)
            return _Streamed(self._stream.record_event(), self._device)

    @torch.inference_mode()
    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """What is done in the background."""
        for target, source in pairs:
            copy_rows(target, source)


@dataclass(frozen=True, slots=True)
class _Threaded:
    future: Future[None]

    def done(self) -> bool:
        return self.future.done()

    def wait(self) -> None:
        self.future.result()


@dataclass(frozen=True, slots=True)
class _Streamed:
    event: torch.cuda.Event
    device: torch.device

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)
