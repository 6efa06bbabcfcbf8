"""Numbers in another order come back the same: a codec scales by what belongs together, wherever it lies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiercel.codecs import LOSSY, BlockShape, Codec
from tiercel.codecs.shape import BY_HEAD, BY_TOKEN, ITEM_BYTES, KEYS_BY_CHANNEL

ORDERS = (BY_HEAD, BY_TOKEN, KEYS_BY_CHANNEL)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# [parts, K and V, heads, tokens, head_dim]
sizes = st.tuples(
    st.integers(1, 5), st.just(2), st.integers(1, 4), st.sampled_from([8, 48, 64]), st.sampled_from([8, 64])
)  # fmt: skip


def block(form: tuple[int, ...], dtype: str, seed: int) -> Tensor:
    """KV with a large channel in the keys, a large token and a large head."""
    x = torch.randn(form, generator=torch.manual_seed(seed))
    x[:, 0, ..., 0] += 30
    x[:, :, :, 1] *= 9
    x[:, :, -1] *= 5
    return x.to(DTYPES[dtype])


def laid(x: Tensor, order: str) -> Tensor:
    """A block with its axes in another order, written out by hand."""
    keys, values = x.unbind(1)
    if order == KEYS_BY_CHANNEL:
        return torch.cat([keys.transpose(2, 3).flatten(2), values.flatten(2)], -1)
    both = torch.stack([keys, values], -2)
    return both.transpose(1, 2) if order == BY_TOKEN else both


def payload_of(x: Tensor) -> memoryview:
    return memoryview(bytearray(x.contiguous().view(torch.uint8).numpy().tobytes()))


def through(codec: Codec, payload: memoryview, shape: BlockShape) -> tuple[memoryview, int]:
    into, back = memoryview(bytearray(len(payload))), memoryview(bytearray(len(payload)))
    size = codec.encode(payload, into, shape)
    assert size is not None
    assert codec.decode(into[:size], back, shape)
    return back, size


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", LOSSY)
@settings(max_examples=25)
@given(form=sizes, dtype=st.sampled_from(sorted(ITEM_BYTES)), seed=st.integers(0, 99))
def test_another_order_of_the_axes_changes_no_number(
    name: str, order: str, form: tuple[int, ...], dtype: str, seed: int
) -> None:
    x = block(form, dtype, seed)
    whole, part = BlockShape(dtype, form), BlockShape(dtype, form[2:], order)
    back, size = through(LOSSY[name], payload_of(x), whole)
    there, same = through(LOSSY[name], payload_of(laid(x, order)), part)
    assert same == size
    plain = torch.frombuffer(back, dtype=x.dtype).view(form)
    assert there == payload_of(laid(plain, order))


@pytest.mark.parametrize("order", ORDERS)
@given(form=sizes)
def test_keys_and_values_are_where_the_order_says(order: str, form: tuple[int, ...]) -> None:
    x = torch.arange(int(np.prod(form)), dtype=torch.float32).view(form)
    found = BlockShape("float32", form[2:], order).sides(laid(x, order).contiguous().numpy().ravel())
    assert found is not None
    for side, wanted in zip(found, x.unbind(1), strict=True):
        assert np.array_equal(side, wanted.numpy())


@given(form=sizes, order=st.sampled_from(("", *ORDERS)), at_once=st.integers(1, 5000))
def test_rows_are_all_numbers_once_and_the_first_view_is_the_largest(
    form: tuple[int, ...], order: str, at_once: int
) -> None:
    numbers = np.arange(int(np.prod(form)))
    shape = BlockShape("float32", form[2:] if order else form, order)
    views = shape.rows(numbers, at_once)
    assert np.array_equal(np.sort(np.concatenate([view.ravel() for view in views])), numbers)
    assert all(view.shape[-1] == shape.row and view.size <= views[0].size for view in views)
    assert all(np.shares_memory(view, numbers) for view in views)


def test_a_parts_shape_reads_back_and_covers_whole_parts() -> None:
    for order in ORDERS:
        shape = BlockShape("bfloat16", (3, 16, 64), order)
        assert BlockShape.parse(str(shape)) == shape
        assert shape.covers(7 * 3 * 16 * 64 * 2 * 2)
        assert not shape.covers(3 * 16 * 64 * 2)
        assert not shape.covers(0)
    texts = ("/htsc:3,16,64", "bfloat16/:64", "bfloat16/htsc:64", "bfloat16/hcts:3,16,64", "bfloat16:3,16,64",
             "bfloat16:30,1,3,256,64")  # fmt: skip
    assert not any(BlockShape.parse(text) for text in texts)


def test_only_where_channels_lie_apart_are_rows_not_all_that_is_left() -> None:
    assert BlockShape("float16", (3, 16, 64), BY_TOKEN).as_rows() == BlockShape("float16", (64,))
    assert BlockShape("float16", (3, 16, 64), KEYS_BY_CHANNEL).as_rows() is None
