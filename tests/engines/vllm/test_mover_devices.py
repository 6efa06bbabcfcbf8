"""Copies between engine memory and slots on real devices: exact both ways, and ordered by the engine's work.

The CPU runs what needs no stream. What is marked `gpu` needs a CUDA GPU (`make gpu-check`); each of its
ordering tests first does it wrongly and sees it go wrong.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tiercel.engines.vllm.layout import Copies
from tiercel.engines.vllm.mover import Mover, Pins, address_of, mover_for
from tiercel.memory import Arena, ArenaKind

LAYERS, BLOCKS, PAGE = 6, 8, 4096 + 256
PAYLOAD = LAYERS * PAGE
# Clock ticks a kernel is kept busy for; a tenth of a second and more on today's GPUs.
SLOW = 400_000_000
OLD, NEW = 7, 9


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU on this machine")
    return torch.device(request.param)


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU on this machine")
    return torch.device("cuda")


@pytest.fixture
def slab() -> Iterator[mmap.mmap]:
    """An arena as a worker maps it: whole, by its descriptor."""
    arena = Arena(PAYLOAD, BLOCKS, kind=ArenaKind.SHARED)
    yield mmap.mmap(arena.fileno(), arena.total_bytes)
    arena.close()


def opened(device: torch.device, slab: mmap.mmap) -> tuple[Mover, list[memoryview]]:
    whole = memoryview(slab)
    each = len(whole) // BLOCKS
    mover = mover_for(device)
    mover.use_slab(whole)
    return mover, [whole[slot * each : slot * each + PAYLOAD] for slot in range(BLOCKS)]


def cache_on(device: torch.device, value: int = 0) -> torch.Tensor:
    return torch.full((LAYERS, BLOCKS, PAGE), value, dtype=torch.uint8, device=device)


def copies_of(cache: torch.Tensor, block: int) -> Copies:
    places = [cache[layer, block].data_ptr() for layer in range(LAYERS)]
    return Copies(places, [layer * PAGE for layer in range(LAYERS)], [PAGE] * LAYERS)


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_all(payload: memoryview, value: int) -> bool:
    return bool((np.frombuffer(payload, dtype=np.uint8) == value).all())


def fill(payload: memoryview, value: int) -> None:
    np.frombuffer(payload, dtype=np.uint8)[:] = value


def test_a_replaced_arena_stays_mapped_until_it_is_unregistered_and_that_until_no_copy_runs() -> None:
    """A device goes by addresses: one that is used anew too early leads to the old arena's pages."""
    registered: set[int] = set()

    def register(start: int, nbytes: int) -> bool:
        assert start not in registered, "another arena lies at the address of a registered one"
        registered.add(start)
        return True

    pins = Pins(register, registered.remove)
    for _ in range(4):
        # As the arenas of daemons that follow each other: unmapped when nobody has them any more.
        slab = memoryview(mmap.mmap(-1, 1 << 20))
        pins.use(slab)
        pins.use(slab)
        assert registered == {address_of(slab)}
    with pins.copying():
        old = address_of(slab)
        slab = memoryview(mmap.mmap(-1, 1 << 20))
        pins.use(slab)
        assert registered == {old, address_of(slab)}
    assert registered == {address_of(slab)}


def test_an_arena_that_cannot_be_pinned_is_never_unpinned() -> None:
    unregistered: list[int] = []
    pins = Pins(lambda start, nbytes: False, unregistered.append)
    for _ in range(2):
        pins.use(memoryview(mmap.mmap(-1, 4096)))
    assert not unregistered


def test_every_byte_comes_back(device: torch.device, slab: mmap.mmap) -> None:
    mover, slots = opened(device, slab)
    cache = torch.randint(0, 256, (LAYERS, BLOCKS, PAGE), dtype=torch.uint8, device=device)
    settle(device)
    mover.save(mover.mark(), [(slots[block], copies_of(cache, block)) for block in range(BLOCKS)])
    for block in range(BLOCKS):
        saved = torch.frombuffer(slots[block], dtype=torch.uint8).view(LAYERS, PAGE)
        assert torch.equal(saved, cache[:, block].cpu())
    # Into other blocks of another cache, so that nothing is right by having stayed where it was.
    other = cache_on(device, 255)
    mover.load(
        mover.mark(), [(slots[block], copies_of(other, BLOCKS - 1 - block)) for block in range(BLOCKS)]
    )
    settle(device)
    assert torch.equal(other.flip(1).cpu(), cache.cpu())


def test_only_what_is_named_is_touched(device: torch.device, slab: mmap.mmap) -> None:
    mover, slots = opened(device, slab)
    cache = cache_on(device, OLD)
    settle(device)
    fill(slots[0], NEW)
    mover.load(mover.mark(), [(slots[0], copies_of(cache, 3))])
    settle(device)
    assert bool((cache[:, 3] == NEW).all())
    assert bool((cache[:, :3] == OLD).all())
    assert bool((cache[:, 4:] == OLD).all())


def test_copies_of_several_threads_do_not_mix(device: torch.device, slab: mmap.mmap) -> None:
    mover, slots = opened(device, slab)
    cache = cache_on(device)
    settle(device)
    mark = mover.mark()

    def work(block: int) -> None:
        for _ in range(20):
            fill(slots[block], block + 1)
            mover.load(mark, [(slots[block], copies_of(cache, block))])
            fill(slots[block], 0)  # a slot is the caller's again once the call returns
            mover.save(mark, [(slots[block], copies_of(cache, block))])
            assert is_all(slots[block], block + 1)
            seen[block] += 1

    seen = [0] * BLOCKS
    threads = [threading.Thread(target=work, args=(block,)) for block in range(BLOCKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [20] * BLOCKS


@pytest.mark.gpu
def test_a_save_waits_for_the_kernels_that_write(gpu: torch.device, slab: mmap.mmap) -> None:
    """Row D12."""
    mover, slots = opened(gpu, slab)
    cache = cache_on(gpu, OLD)
    settle(gpu)
    before = mover.mark()
    torch.cuda._sleep(SLOW)
    cache.fill_(NEW)
    after = mover.mark()
    mover.save(before, [(slots[0], copies_of(cache, 0))])
    assert is_all(slots[0], OLD), "the kernel was not slow enough for this test to mean anything"
    mover.save(after, [(slots[0], copies_of(cache, 0))])
    assert is_all(slots[0], NEW)


@pytest.mark.gpu
def test_a_load_waits_for_the_kernels_that_still_read(gpu: torch.device, slab: mmap.mmap) -> None:
    """Row D13."""
    mover, slots = opened(gpu, slab)
    fill(slots[0], NEW)
    for wait in (False, True):
        cache = cache_on(gpu, OLD)
        settle(gpu)
        before = mover.mark()
        torch.cuda._sleep(SLOW)
        seen = cache[:, 0].clone()
        after = mover.mark()
        mover.load(after if wait else before, [(slots[0], copies_of(cache, 0))])
        settle(gpu)
        assert bool((seen == (OLD if wait else NEW)).all())
        assert bool((cache[:, 0] == NEW).all())


@pytest.mark.gpu
def test_what_is_loaded_is_there_when_the_call_returns(gpu: torch.device, slab: mmap.mmap) -> None:
    """Row D14: a kernel queued later, on whatever stream, reads the new bytes; the slot is free again."""
    mover, slots = opened(gpu, slab)
    cache = cache_on(gpu, OLD)
    settle(gpu)
    fill(slots[0], NEW)
    mover.load(mover.mark(), [(slots[0], copies_of(cache, 0))])
    fill(slots[0], OLD)
    with torch.cuda.stream(torch.cuda.Stream(gpu)):
        seen = cache[:, 0].clone()
    settle(gpu)
    assert bool((seen == NEW).all())


@pytest.mark.gpu
def test_copies_do_not_wait_for_unrelated_work(gpu: torch.device, slab: mmap.mmap) -> None:
    """What the engine queues after the mark does not delay a copy."""
    mover, slots = opened(gpu, slab)
    cache = cache_on(gpu, OLD)
    settle(gpu)
    mark = mover.mark()
    torch.cuda._sleep(SLOW)
    working = torch.cuda.Event()
    working.record()
    mover.save(mark, [(slots[0], copies_of(cache, 0))])
    assert not working.query()
    settle(gpu)
