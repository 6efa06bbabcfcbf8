"""Where a model runs, and the one difference that makes to copying KV: waiting for the copy to end.

It never allocates slot memory and never owns a stream: every copy is queued on the device's current stream,
behind the kernels that wrote its source and ahead of those that read its target.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

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
