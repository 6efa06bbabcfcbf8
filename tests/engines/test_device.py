"""The transformers engine's copies on real devices: exact, and behind the kernels that wrote their source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tiercel.engines.device import Copier, copy_in, copy_out, host_empty
from tiercel.engines.transformers import TransformersEngine

SLOW = 400_000_000
SHAPE = (2, 3, 1000)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU on this machine")
    return torch.device(request.param)


def test_strided_parts_come_back_exactly(device: torch.device) -> None:
    buffer = torch.randn(2, 3, 4000, device=device)
    parts = [buffer[..., 500:1500], buffer[..., 2000:3000]]
    payload = memoryview(bytearray(sum(part.numel() * 4 for part in parts)))
    copy_out(parts, payload)
    other = torch.zeros_like(buffer)
    copy_in(payload, [other[..., 500:1500], other[..., 2000:3000]])
    assert torch.equal(other[..., 500:1500], parts[0])
    assert torch.equal(other[..., 2000:3000], parts[1])
    assert not other[..., 1500:2000].any()


def test_a_copy_out_has_what_the_queued_kernels_wrote(device: torch.device) -> None:
    part = torch.zeros(SHAPE, device=device)
    payload = memoryview(bytearray(part.numel() * 4))
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda._sleep(SLOW)
    part.fill_(3.0)
    copy_out([part], payload)
    assert bool((torch.frombuffer(payload, dtype=torch.float32) == 3.0).all())


def test_a_copier_overwrites_nothing_that_queued_kernels_read(device: torch.device) -> None:
    target, source = torch.zeros(SHAPE, device=device), host_empty(SHAPE, torch.float32, device)
    source.fill_(1.0)
    copier = Copier(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda._sleep(SLOW)
    before = target.clone()
    arrival = copier.start([(target, source)])
    arrival.wait()
    after = target.clone()
    assert not before.any()
    assert bool((after == 1.0).all())
    assert arrival.done()


def test_a_budget_of_kv_changes_no_logit(
    device: torch.device, tiny_model: Callable[..., Path], prompt: Callable[..., list[int]]
) -> None:
    how = {"dtype": "float32", "device": device.type, "block_tokens": 16}
    plain = TransformersEngine(tiny_model(), **how)  # type: ignore[arg-type]
    engine = TransformersEngine(tiny_model(), kv_device_bytes=12 * 2**10, **how)  # type: ignore[arg-type]
    for length in (20, 120):
        expected = plain.prefill_logits(prompt(length)).logits
        torch.testing.assert_close(engine.prefill_logits(prompt(length)).logits, expected, atol=1e-4, rtol=0)
    assert engine.offload is not None
    assert 0 < engine.offload.memory.peak_bytes <= 12 * 2**10
