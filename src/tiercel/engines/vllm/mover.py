"""Copying between engine blocks and arena slots, ordered against the engine's own work. One per device kind.

A `mark` is taken on the engine's thread and stands for all work queued until then. A copy starts after its
mark's work has ended and has ended itself when the call returns, so whoever calls may give slots back and
report blocks as free or filled. Nothing here decides what is copied or holds the interpreter lock for long.
"""

from __future__ import annotations

import ctypes
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from tiercel.engines.vllm.layout import Copies
from tiercel.errors import EngineError

log = logging.getLogger("tiercel")
Mark = object


class Mover(Protocol):
    """What the transfer threads need of a device. Calls block their thread and may come from several."""

    def mark(self) -> Mark: ...

    def load(self, mark: Mark, blocks: list[tuple[memoryview, Copies]]) -> None: ...

    def save(self, mark: Mark, blocks: list[tuple[memoryview, Copies]]) -> None: ...

    def use_slab(self, slab: memoryview) -> None: ...


def mover_for(device: torch.device) -> Mover:
    """The mover of a device's kind. Raises EngineError for a kind without one."""
    if device.type == "cpu":
        return CpuMover()
    if device.type == "cuda":
        return CudaMover(device)
    raise EngineError(f"KV cache lies on {device.type}; accepted are cpu and cuda")


def address_of(payload: memoryview) -> int:
    """Where a slot's bytes lie in this process."""
    return int(np.frombuffer(payload, dtype=np.uint8).ctypes.data)


class CpuMover:
    """On a CPU the engine's work has ended when it returns; a copy is a memcpy per run.

    Measured on two cores, 30 layers x 62 blocks of 98 KB: 17-18 GB/s from one thread, no more from two;
    process_vm_readv 11-15, torch's per-block copies 2.2.
    """

    def __init__(self) -> None:
        self._memcpy = ctypes.CDLL(None).memcpy
        self._memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._memcpy.restype = ctypes.c_void_p

    def mark(self) -> Mark:
        """Nothing is queued on a CPU."""
        return None

    def load(self, mark: Mark, blocks: list[tuple[memoryview, Copies]]) -> None:
        """Copy payloads into engine blocks."""
        memcpy = self._memcpy
        for payload, copies in blocks:
            start = address_of(payload)
            for engine, offset, size in zip(copies.engine, copies.payload, copies.sizes, strict=True):
                memcpy(engine, start + offset, size)

    def save(self, mark: Mark, blocks: list[tuple[memoryview, Copies]]) -> None:
        """Copy engine blocks into payloads."""
        memcpy = self._memcpy
        for payload, copies in blocks:
            start = address_of(payload)
            for engine, offset, size in zip(copies.engine, copies.payload, copies.sizes, strict=True):
                memcpy(start + offset, engine, size)

    def use_slab(self, slab: memoryview) -> None:
        """Memory is memory."""


class Pins:
    """The arenas whose pages are registered with a device, so that copies are asynchronous and at full speed.

    A device knows pages by their address. An arena that was replaced therefore stays mapped until it is
    unregistered, and that waits until no copy is under way: another one mapped at its address would be read
    and written in the old one's pages.
    """

    def __init__(self, register: Callable[[int, int], bool], unregister: Callable[[int], object]) -> None:
        self._register, self._unregister = register, unregister
        self._lock = threading.Lock()
        self._copies = 0
        self._slab: memoryview | None = None
        self._pinned = False
        self._old: list[memoryview] = []

    def use(self, slab: memoryview) -> None:
        """Register an arena in place of the one before it. Where that fails, copies are only slower."""
        with self._lock:
            if self._slab is slab:
                return
            if self._slab is not None and self._pinned:
                self._old.append(self._slab)
            self._slab, self._pinned = slab, self._register(address_of(slab), slab.nbytes)
            self._let_go_locked()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """A copy that may be from or to an arena is under way."""
        with self._lock:
            self._copies += 1
        try:
            yield
        finally:
            with self._lock:
                self._copies -= 1
                self._let_go_locked()

    def _let_go_locked(self) -> None:
        while self._old and not self._copies:
            self._unregister(address_of(self._old[-1]))
            self._old.pop()


class CudaMover:
    """A side stream per direction; copies wait for an event of the compute stream and end with their own."""

    _TO_HOST, _TO_DEVICE = 2, 1

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime = _cuda_runtime()
        # The lowest priority: copies yield to compute.
        self._loads: torch.cuda.Stream = _stream(device, priority=0)
        self._saves: torch.cuda.Stream = _stream(device, priority=0)
        self._pins = Pins(self._register, self._runtime.cudaHostUnregister)

    def mark(self) -> Mark:
        """An event behind everything queued on the engine's current stream."""
        event = _event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def load(self, mark: Mark, blocks: list[tuple[memoryview, Copies]]) -> None:
        """Copy payloads into engine blocks, after the kernels that may still read or write those."""
        self._run(self._loads, mark, blocks, self._TO_DEVICE)

    def save(self, mark: Mark, blocks: list[tuple[memoryview, Copies]]) -> None:
        """Copy engine blocks into payloads, after the kernels that compute them."""
        self._run(self._saves, mark, blocks, self._TO_HOST)

    def use_slab(self, slab: memoryview) -> None:
        """Register the arena's pages, and no longer those of the one before it."""
        torch.cuda.set_device(self._device)
        self._pins.use(slab)

    def _register(self, start: int, nbytes: int) -> bool:
        if fault := self._runtime.cudaHostRegister(start, nbytes, 0):
            self._runtime.cudaGetLastError()  # or the engine's next kernel is blamed for it
            log.warning(
                "tiercel: the arena's memory cannot be pinned (CUDA says %d); copies are slower", fault
            )
        return not fault

    def _run(
        self, stream: torch.cuda.Stream, mark: Mark, blocks: list[tuple[memoryview, Copies]], kind: int
    ) -> None:
        torch.cuda.set_device(self._device)
        assert isinstance(mark, torch.cuda.Event)
        stream.wait_event(mark)
        copy, raw = self._runtime.cudaMemcpyAsync, stream.cuda_stream
        with self._pins.copying():
            for payload, copies in blocks:
                start = address_of(payload)
                for engine, offset, size in zip(copies.engine, copies.payload, copies.sizes, strict=True):
                    pair = (engine, start + offset) if kind == self._TO_DEVICE else (start + offset, engine)
                    if fault := copy(*pair, size, kind, raw):
                        # A broken context is the engine's end too; never report such a block as copied.
                        raise RuntimeError(f"cudaMemcpyAsync failed with {fault}")
            ended = _event()
            ended.record(stream)
            ended.synchronize()


# torch leaves these untyped.
_stream: Any = torch.cuda.Stream
_event: Any = torch.cuda.Event


def _cuda_runtime() -> Any:  # ctypes types a library's functions as Any
    """The CUDA runtime that torch has loaded into this process."""
    found = re.search(r"\S*libcudart\S*\.so[.\d]*", Path("/proc/self/maps").read_text())
    if found is None:
        raise EngineError("the CUDA runtime is not loaded; accepted is a vLLM built for CUDA")
    runtime = ctypes.CDLL(found.group())
    runtime.cudaMemcpyAsync.argtypes = (
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
    )  # fmt: skip
    runtime.cudaHostRegister.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
    runtime.cudaHostUnregister.argtypes = (ctypes.c_void_p,)
    return runtime
