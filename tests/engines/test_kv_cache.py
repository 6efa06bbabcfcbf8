"""The cache against a dumb oracle (concatenation), and its blocks against the layout's own words."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.engines import device
from tiercel.engines.transformers.kv_cache import KVCache
from tiercel.engines.transformers.layout import BlockLayout, LayerShape

BLOCK = 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def inference() -> Iterator[None]:
    """As in the engine: buffers are made and filled without autograd."""
    with torch.inference_mode():
        yield


shapes = st.lists(
    st.builds(LayerShape, kv_heads=st.integers(1, 3), key_dim=st.integers(1, 4), value_dim=st.integers(1, 4)),
    min_size=1,
    max_size=5,
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 11)),
        st.tuples(st.just("truncate"), st.integers(0, 40)),
        st.tuples(st.just("reserve"), st.integers(0, 80)),
        st.tuples(st.just("move"), st.integers(0, 5)),
    ),
    max_size=12,
)


class Oracle:
    """All keys and values of all layers as plain tensors [heads, tokens, dim]."""

    def __init__(self, layout: BlockLayout) -> None:
        self.held = [
            [torch.empty(shape.kv_heads, 0, dim).to(layout.dtype) for dim in (shape.key_dim, shape.value_dim)]
            for shape in layout.shapes
        ]

    def append(self, layer: int, new: list[torch.Tensor]) -> None:
        self.held[layer] = [torch.cat(pair, dim=1) for pair in zip(self.held[layer], new, strict=True)]

    def truncate(self, tokens: int) -> None:
        self.held = [[one[:, :tokens] for one in layer] for layer in self.held]

    def payload(self, index: int) -> bytes:
        parts = [one[:, index * BLOCK : (index + 1) * BLOCK] for layer in self.held for one in layer]
        return b"".join(bytes(part.contiguous().view(torch.uint8).numpy()) for part in parts)


@settings(max_examples=60)
@given(shapes, dtypes, steps)
def test_it_holds_what_concatenation_holds(
    shapes: list[LayerShape], dtype: torch.dtype, steps: list[tuple[str, int]]
) -> None:
    layout = BlockLayout(tuple(shapes), dtype, BLOCK)
    cache, oracle, length = KVCache(layout, CPU), Oracle(layout), 0
    for step, amount in steps:
        if step == "append":
            for index, shape in enumerate(shapes):
                new = [drawn(shape.kv_heads, amount, dim, dtype) for dim in (shape.key_dim, shape.value_dim)]
                assert cache.get_mask_sizes(amount, index) == (length + amount, 0)
                keys, values = cache.update(new[0], new[1], index)
                oracle.append(index, [one[0] for one in new])
                assert torch.equal(keys[0], oracle.held[index][0])
                assert torch.equal(values[0], oracle.held[index][1])
            length += amount
        elif step == "truncate" and amount <= length:
            cache.truncate(amount)
            oracle.truncate(amount)
            length = amount
        elif step == "reserve":
            cache.reserve(amount, exactly=True)
        elif step == "move":
            cache = moved_by_blocks(cache, oracle)
            length = cache.length
            oracle.truncate(length)
        assert cache.length == length == cache.get_seq_length()


def drawn(heads: int, tokens: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(1, heads, tokens, dim).to(dtype)


def moved_by_blocks(cache: KVCache, oracle: Oracle) -> KVCache:
    """A new cache restored from all whole blocks of `cache`, whose bytes are checked on the way."""
    other = KVCache(cache.layout, CPU)
    for index in range(cache.length // BLOCK):
        payload = bytearray(cache.layout.payload_bytes)
        cache.save_block(index, memoryview(payload))
        assert bytes(payload) == oracle.payload(index)
        other.restore_block(index, memoryview(payload))
        payload[:] = b"\xff" * len(payload)  # a slot is used again as soon as it is given back
    return other


def test_like_layers_are_one_run_and_one_copy() -> None:
    layout = BlockLayout((LayerShape(2, 8, 8),) * 30, torch.bfloat16, 256)
    assert [(run.first, run.layers) for run in layout.runs()] == [(0, 30)]
    assert layout.payload_bytes == 30 * 2 * 2 * 8 * 256 * 2


@given(shapes)
def test_runs_cover_all_layers_in_order(shapes: list[LayerShape]) -> None:
    runs = list(BlockLayout(tuple(shapes), torch.float32, BLOCK).runs())
    assert [shape for run in runs for shape in [run.shape] * run.layers] == shapes
    assert [run.first for run in runs] == [
        sum(run.layers for run in runs[:index]) for index in range(len(runs))
    ]
    assert all(run.layers == 1 for run in runs if run.shape.key_dim != run.shape.value_dim)


def test_growth_is_amortised() -> None:
    cache = KVCache(BlockLayout((LayerShape(1, 1, 1),), torch.float32, BLOCK), CPU)
    capacities = set()
    for _ in range(2000):
        cache.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)
        capacities.add(cache.capacity)
    assert len(capacities) < 20


def test_running_out_of_memory_halfway_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request gets this cache: layers and blocks must be of the same buffers, and no longer."""
    shapes = [LayerShape(1, 2, 2), LayerShape(2, 2, 2)]
    layout = BlockLayout(shapes, torch.float32, BLOCK)
    payload = torch.arange(layout.payload_bytes // 4, dtype=torch.float32)
    cache = KVCache(layout, CPU)
    cache.reserve(BLOCK)
    empty, calls = cache._empty, list[int]()

    def second_fails(*sizes: int) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return empty(*sizes)

    for slab in cache._slabs:
        monkeypatch.setattr(slab, "_empty", second_fails)
    with pytest.raises(MemoryError):
        cache.reserve(3 * BLOCK)
    cache.clear()
    assert cache.capacity == BLOCK
    cache.restore_block(0, memoryview(payload.numpy()).cast("B"))
    kept = [one[:, :, :BLOCK].flatten() for number in range(2) for one in cache.buffers(number)]
    assert torch.equal(torch.cat(kept).sort().values, payload)
    cache.reserve(3 * BLOCK)
    assert cache.capacity == 3 * BLOCK
    assert all(buffer.shape[2] == cache.capacity for number in range(2) for buffer in cache.buffers(number))


@pytest.mark.parametrize("wrong", [-1, 1])
def test_payload_of_another_size_is_refused_before_the_cache_counts_it(wrong: int) -> None:
    cache = KVCache(BlockLayout((LayerShape(1, 2, 2),), torch.float32, BLOCK), CPU)
    with pytest.raises((AssertionError, ValueError)):
        cache.restore_block(0, memoryview(bytearray(cache.layout.payload_bytes + 4 * wrong)))
    assert cache.length == 0


def test_a_block_that_is_not_complete_is_not_saved() -> None:
    cache = KVCache(BlockLayout((LayerShape(1, 2, 2),), torch.float32, BLOCK), CPU)
    cache.update(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), 0)
    with pytest.raises(AssertionError):
        cache.save_block(0, memoryview(bytearray(cache.layout.payload_bytes)))


def test_device_names() -> None:
    assert device.resolve_device("cpu") == CPU
    assert device.resolve_device("auto").type in ("cpu", "cuda")
