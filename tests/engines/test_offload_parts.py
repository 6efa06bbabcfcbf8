"""What the offloaded attention is made of: parts against a plain softmax, and the division of a budget."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.attention.device import DeviceMemory, Lot
from tiercel.engines.device import Copier
from tiercel.engines.transformers.layout import BlockLayout, LayerShape
from tiercel.engines.transformers.offload.budget import divide
from tiercel.engines.transformers.offload.partial import Asking, Partial, attend, merged, sunk
from tiercel.engines.transformers.offload.resident import Residents
from tiercel.engines.transformers.offload.stream import Stream
from tiercel.errors import ModelError

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def plain(asking: Asking, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Attention of each query head and token by itself, in float64, no tricks."""
    kv_heads, rows, _ = asking.rows.shape
    out = torch.zeros(kv_heads, rows, values.shape[-1], dtype=torch.float64)
    for head in range(kv_heads):
        for row in range(rows):
            at = asking.first + row % asking.new
            low = 0 if asking.window is None else max(0, at - asking.window + 1)
            scores = keys[head, low : at + 1].double() @ asking.rows[head, row].double() * asking.scale
            if asking.softcap is not None:
                scores = torch.tanh(scores / asking.softcap) * asking.softcap
            sink = sinks[head * (rows // asking.new) + row // asking.new].double()
            weights = torch.cat([scores, sink[None]]).softmax(0)[:-1]
            out[head, row] = weights @ values[head, low : at + 1].double()
    return out


@settings(max_examples=80, deadline=None)
@given(
    first=st.integers(0, 40),
    new=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    window=st.one_of(st.none(), st.integers(1, 30)),
    softcap=st.one_of(st.none(), st.floats(0.5, 50)),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    seed=st.integers(0, 2**31),
)
def test_parts_merged_are_the_whole(
    first: int, new: int, kv_heads: int, group: int, window: int | None, softcap: float | None,
    spread: float, cuts: list[int], seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    keys, values = torch.randn(kv_heads, first + new, 5), torch.randn(kv_heads, first + new, 7)
    rows = torch.randn(kv_heads, group * new, 5) * spread
    asking = Asking(rows, first, new, 0.4, softcap, window)
    sinks = torch.randn(kv_heads * group) * spread
    edges = sorted({asking.seen_from, *(cut for cut in cuts if asking.seen_from < cut < first), first})
    whole: Partial | None = None
    for start, stop in zip(edges, [*edges[1:], first + new], strict=True):
        if start < stop:
            whole = merged(whole, attend(asking, keys[:, start:stop], values[:, start:stop], start))
    assert whole is not None
    got = sunk(whole, sinks, new).result().double()
    torch.testing.assert_close(got, plain(asking, keys, values, sinks), atol=1e-5, rtol=1e-4)


def test_a_part_that_a_query_does_not_see_weighs_nothing() -> None:
    """The last of two queries is past the window's reach of the first part."""
    keys, values = torch.randn(1, 6, 4), torch.randn(1, 6, 4)
    asking = Asking(torch.randn(1, 2, 4), 4, 2, 1.0, window=4)
    part = attend(asking, keys[:, 1:2], values[:, 1:2], 1)
    assert part.weight[0, :, 0].tolist() == [1.0, 0.0]
    assert not part.total[0, 1].any()


shapes = st.lists(
    st.builds(
        LayerShape, kv_heads=st.integers(1, 4), key_dim=st.integers(1, 64), value_dim=st.integers(1, 64)
    ),
    min_size=1,
    max_size=6,
)


@given(shapes=shapes, dtype=st.sampled_from([torch.float32, torch.bfloat16]), data=st.data())
def test_a_budget_is_never_exceeded_and_not_left_lying(
    shapes: list[LayerShape], dtype: torch.dtype, data: st.DataObject
) -> None:
    layout = BlockLayout(tuple(shapes), dtype, 16)
    windows = [data.draw(st.one_of(st.none(), st.just(24))) for _ in shapes]
    budget_bytes = data.draw(st.integers(0, 2**21))
    widest = max(shape.elements for shape in shapes) * dtype.itemsize
    if budget_bytes < 32 * widest:
        with pytest.raises(ModelError, match="too small"):
            divide(layout, windows, budget_bytes)
        return
    division = divide(layout, windows, budget_bytes)
    memory = DeviceMemory(CPU, budget_bytes)
    lot = Lot(memory)
    Stream(layout, lot, Copier(CPU), division.piece_tokens)
    Residents(layout, windows, lot, division.resident_tokens)
    assert memory.peak_bytes <= budget_bytes
    if None in windows:
        assert memory.peak_bytes + layout.token_bytes > budget_bytes
