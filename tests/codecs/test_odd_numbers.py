"""Numbers as no engine should have them: denormal, huge, none at all. They come near, or stay as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.codecs import LOSSY, BlockShape, Codec
from tiercel.codecs.shape import BY_HEAD, BY_TOKEN, KEYS_BY_CHANNEL

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Heads, tokens, channels: int8 has keys by row in the first, by channel in the second.
FORMS = ((2, 32, 16), (1, 64, 16))
COUNT = 2 * 2 * 32 * 16
ODD = (
    0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 6e-8, 1e-38, -1e-38, 1e-30, 9e-31, 65504.0, -65504.0, 29999.0,
    30000.0, 99999.0, 1e5, 1.1e5, 3e38, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip


def payload_of(x: torch.Tensor) -> memoryview:
    return memoryview(bytearray(x.contiguous().view(torch.uint8).numpy().tobytes()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", LOSSY.values(), ids=list(LOSSY))
@settings(max_examples=60)
@given(data=st.data())
def test_odd_numbers_are_near_or_the_block_is_kept_as_it_is(
    codec: Codec, dtype: str, data: st.DataObject
) -> None:
    order = data.draw(st.sampled_from(["", BY_HEAD, BY_TOKEN, KEYS_BY_CHANNEL]))
    form = data.draw(st.sampled_from(FORMS))
    shape = BlockShape(dtype, form if order else (1, 2, *form), order)
    x = torch.zeros(COUNT)
    if data.draw(st.booleans()):
        x = torch.randn(COUNT, generator=torch.manual_seed(data.draw(st.integers(0, 9))))
    for _ in range(data.draw(st.integers(0, 6))):
        begin, length = data.draw(st.integers(0, COUNT - 1)), data.draw(st.sampled_from([1, 16, 500]))
        x[begin : begin + length] = data.draw(st.sampled_from(ODD))
    payload = payload_of(x.to(DTYPES[dtype]))
    into, back = memoryview(bytearray(len(payload))), memoryview(bytearray(b"\xa5" * len(payload)))
    size = codec.encode(payload, into, shape)
    plain = torch.frombuffer(payload, dtype=DTYPES[dtype]).float()
    if not bool(plain.isfinite().all()):
        assert size is None
    if size is None:
        return
    assert codec.decode(into[:size], back, shape)
    found = torch.frombuffer(back, dtype=DTYPES[dtype]).float()
    assert bool(found.isfinite().all())
    # Rough, for any grouping: a share of the largest number of all, and the smallest step of a float16.
    share = {"int8": 1 / 127, "fp8": 1 / 15, "int4": 2 / 14}[codec.name]
    assert bool(((found - plain).abs() <= plain.abs().max() * share + 1e-7).all())


@pytest.mark.parametrize("codec", LOSSY.values(), ids=list(LOSSY))
@settings(max_examples=40)
@given(body=st.binary(min_size=4, max_size=40), form=st.sampled_from(FORMS))
def test_what_nobody_encoded_gives_numbers_or_nothing_but_no_warning(
    codec: Codec, body: bytes, form: tuple[int, ...]
) -> None:
    """Warnings are errors here. A float16 has no room for what hostile scales and codes come to."""
    shape = BlockShape("float16", (1, 2, *form))
    payload = memoryview(bytearray(COUNT * 2))
    into = memoryview(bytearray(COUNT * 2))
    payload[:] = np.ones(COUNT, np.float16).tobytes()
    size = codec.encode(payload, into, shape)
    assert size is not None
    hostile = (body * (size // len(body) + 1))[:size]
    assert codec.decode(memoryview(hostile), payload, shape) in (True, False)


def test_the_largest_float16_with_codes_beyond_it_overflows_quietly() -> None:
    shape = BlockShape("float16", (16,))
    peaks, codes = np.full(2, 65504, np.float16).tobytes(), bytes([0x80]) * 32
    into = memoryview(bytearray(64))
    assert LOSSY["int8"].decode(memoryview(peaks + codes), into, shape)
    assert np.isneginf(np.frombuffer(into, np.float16)).all()


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_blocks_of_hardly_any_tokens(tokens: int) -> None:
    for form in ((1, 2, 1, tokens, 2), (2, 2, 3, tokens, 64)):
        shape = BlockShape("bfloat16", form)
        payload = payload_of(torch.randn(form, generator=torch.manual_seed(1)).bfloat16())
        for codec in LOSSY.values():
            if codec.name == "int4" and tokens % 2:
                assert not codec.fits(shape, len(payload))
                continue
            into, back = memoryview(bytearray(len(payload))), memoryview(bytearray(len(payload)))
            size = codec.encode(payload, into, shape)
            # A row of two numbers does not get shorter by a scale of its own.
            if size is not None:
                assert codec.decode(into[:size], back, shape)
