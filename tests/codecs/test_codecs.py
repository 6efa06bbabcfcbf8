"""Codecs against direct references: how far a number may move, what is kept exactly, what is refused."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
import xxhash
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tiercel.codecs import LOSSY, BlockShape, Codec, codec_named, codec_numbered
from tiercel.codecs.shape import ITEM_BYTES, KEYS_BY_CHANNEL

LOSSLESS = codec_named("lossless")
EVERY = [LOSSLESS, *LOSSY.values()]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Half a step between neighbouring numbers of the dtype, relative to them.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
# Half a step near zero, where numbers lie evenly.
FINEST = {"bfloat16": 0.0, "float16": 2.0**-25, "float32": 0.0}

shapes = st.builds(
    lambda dtype, layers, heads, half, width: BlockShape(dtype, (layers, 2, heads, 2 * half, 2 * width)),
    st.sampled_from(sorted(ITEM_BYTES)),
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.sampled_from([2, 3, 8, 16, 32, 48]),
)  # fmt: skip


# Blocks as engines have them: groups of which there are eight numbers or more.
blocks = st.builds(
    lambda dtype, layers, heads, tokens, width: BlockShape(dtype, (layers, 2, heads, tokens, width)),
    st.sampled_from(sorted(ITEM_BYTES)),
    st.integers(1, 3), st.integers(1, 3), st.sampled_from([8, 16, 40, 64]), st.sampled_from([8, 48, 64]),
)  # fmt: skip


def numbers(shape: BlockShape, seed: int, scale: float = 1.0) -> torch.Tensor:
    """KV as it is: some channels of keys are large in all tokens, some tokens are large, some zero."""
    made = torch.manual_seed(seed)
    x = torch.randn(shape.sizes, generator=made) * scale
    x[:, 0, ..., 0] += 20 * scale
    x[:, :, :, 0] *= 8
    x[:, 1, :, -1] = 0
    return x.to(DTYPES[shape.dtype])


def payload_of(x: torch.Tensor) -> memoryview:
    return memoryview(bytearray(x.contiguous().view(torch.uint8).numpy().tobytes()))


def tensor_of(payload: memoryview, shape: BlockShape) -> torch.Tensor:
    return torch.frombuffer(payload, dtype=DTYPES[shape.dtype]).view(shape.sizes).float()


def encode(codec: Codec, payload: memoryview, shape: BlockShape | None) -> memoryview | None:
    before, into = bytes(payload), memoryview(bytearray(len(payload)))
    size = codec.encode(payload, into, shape)
    assert bytes(payload) == before
    return None if size is None else into[:size]


def through(codec: Codec, x: torch.Tensor, shape: BlockShape) -> tuple[torch.Tensor, int]:
    encoded = encode(codec, payload_of(x), shape)
    assert encoded is not None
    back = memoryview(bytearray(b"\xa5" * (x.numel() * x.itemsize)))
    assert codec.decode(encoded, back, shape)
    return tensor_of(back, shape), len(encoded)


def test_numbers_in_headers_never_change_and_name_one_codec_each() -> None:
    assert {one.name: one.number for one in EVERY} == {"lossless": 1, "int8": 5, "fp8": 6, "int4": 4}
    assert all(codec_numbered(one.number) is one for one in EVERY)
    assert codec_numbered(0) is codec_numbered(63) is None
    assert codec_numbered(2) is codec_numbered(3) is None, "formats that nobody writes any more"
    assert [one.exact for one in EVERY] == [True, False, False, False]


def whole_steps(codes: torch.Tensor, step: torch.Tensor, slack: torch.Tensor) -> bool:
    """Whether numbers are whole steps, as near as they are rounded."""
    nearest = (codes / step.clamp(min=1e-30)).round() * step
    return bool(((codes - nearest).abs() <= slack + 1e-4 * step).all())


@settings(max_examples=40, deadline=None)
@given(shape=shapes, seed=st.integers(0, 99), scale=st.sampled_from([1e-3, 1.0, 50.0]))
def test_int8_moves_no_number_by_more_than_half_a_step_of_its_row(
    shape: BlockShape, seed: int, scale: float
) -> None:
    assert shape.sizes[3] <= 80
    keys = slice(1, None) if shape.sizes[3] == 64 else slice(None)
    x = numbers(shape, seed, scale)
    back, size = through(LOSSY["int8"], x, shape)
    rounding = ROUNDING[shape.dtype] * 1.01 * back.abs() + FINEST[shape.dtype]
    step = x.float().abs().amax(-1, keepdim=True) / 127
    near = (back - x.float()).abs() <= step / 2 * 1.0001 + rounding
    assert bool(near[:, keys].all())
    assert whole_steps(back[:, keys], step[:, keys], rounding[:, keys])
    if shape.sizes[3] != 64:
        assert size == x.numel() // shape.row * (shape.row + shape.item_bytes)


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(sorted(ITEM_BYTES)), layers=st.integers(1, 3), heads=st.integers(1, 6),
    tokens=st.sampled_from([64, 128, 192, 256]), width=st.sampled_from([1, 2, 3, 8, 48, 64]),
    seed=st.integers(0, 99), scale=st.sampled_from([1e-3, 1.0, 50.0]),
)  # fmt: skip
def test_int8_moves_keys_by_half_a_step_between_the_ends_of_their_channel(
    dtype: str, layers: int, heads: int, tokens: int, width: int, seed: int, scale: float
) -> None:
    shape = BlockShape(dtype, (layers, 2, heads, tokens, width))
    span = 128 if tokens % 128 == 0 else 64
    x = numbers(shape, seed, scale)
    encoded = encode(LOSSY["int8"], payload_of(x), shape)
    if encoded is None:
        assert width == 1, "a scale for each number of the values"
        return
    back, size = through(LOSSY["int8"], x, shape)
    groups, found = (one[:, 0].unflatten(2, (-1, span)) for one in (x.float(), back))
    low, high = groups.amin(3, keepdim=True), groups.amax(3, keepdim=True)
    step = (high - low) / 255
    slack = ROUNDING[dtype] * 1.01 * found.abs() + FINEST[dtype] + 2e-7 * (low.abs() + high.abs())
    assert bool(((found - groups).abs() <= step / 2 * 1.0001 + slack).all())
    assert whole_steps(found - low, step, slack)
    assert torch.equal(found.amin(3, keepdim=True), low), "the lowest comes back as it was"
    peak = x[:, 1].float().abs().amax(-1, keepdim=True)
    values = (back[:, 1] - x[:, 1].float()).abs()
    assert bool((values <= peak / 254 * 1.0001 + ROUNDING[dtype] * 1.01 * peak + FINEST[dtype]).all())
    half = x.numel() // 2
    assert size == 2 * half + shape.item_bytes * (half // width + 2 * (half // span))


def test_int8_of_keys_is_less_than_half_as_far_off_by_channel_in_about_the_same_room() -> None:
    shape = BlockShape("bfloat16", (2, 2, 2, 256, 64))
    x = torch.randn(shape.sizes, generator=torch.manual_seed(1))
    x[:, 0] += 12 * torch.randn(shape.sizes[-1], generator=torch.manual_seed(2))
    x = x.bfloat16()
    by_channel, size = through(LOSSY["int8"], x, shape)
    by_row = memoryview(bytearray(x.numel() * 2))
    encoded = encode(LOSSY["int8"], payload_of(x), BlockShape("bfloat16", (64,)))
    assert encoded is not None
    assert LOSSY["int8"].decode(encoded, by_row, BlockShape("bfloat16", (64,)))
    off = [(one - x.float())[:, 0].norm() for one in (by_channel, tensor_of(by_row, shape))]
    assert off[0] < 0.5 * off[1]
    assert torch.equal(by_channel[:, 1], tensor_of(by_row, shape)[:, 1]), "values have rows in both"
    assert size == len(encoded)


@settings(max_examples=40, deadline=None)
@given(shape=shapes, seed=st.integers(0, 99), scale=st.sampled_from([1e-3, 1.0, 50.0]))
def test_fp8_is_what_a_cast_to_e4m3_gives_for_rows_scaled_to_its_range(
    shape: BlockShape, seed: int, scale: float
) -> None:
    x = numbers(shape, seed, scale)
    back, _ = through(LOSSY["fp8"], x, shape)
    peak = x.float().abs().amax(-1, keepdim=True)
    inverse = torch.where(peak > 0, 448 / peak, torch.zeros(()))
    reference = (x.float() * inverse).to(torch.float8_e4m3fn).float() * (peak / 448)
    # The last bit of the scaled number may decide a tie: then it is the neighbouring code.
    half_a_step = ROUNDING[shape.dtype] * reference.abs() * 2.1 + FINEST[shape.dtype]
    off = (back - reference).abs() > half_a_step + 1e-6 * peak
    assert off.float().mean() < 0.01
    bound = torch.maximum(x.float().abs() / 16, peak / 448 / 1024) * 1.001 + half_a_step
    assert bool(((back - x.float()).abs() <= bound).all())


def kivi4(rows: list[float]) -> tuple[float, float, list[float]]:
    """The reference for one group: low, step and what comes back, one number at a time."""
    low = np.float16(min(rows))
    if float(low) > min(rows):
        low = np.nextafter(low, np.float16(-np.inf))
    exact = (max(rows) - float(low)) / 15
    step = np.float16(exact)
    if float(step) < exact:
        step = np.nextafter(step, np.float16(np.inf))
    codes = [round((one - float(low)) / float(step)) if step > 0 else 0 for one in rows]
    assert all(0 <= one <= 15 for one in codes)
    return float(low), float(step), [float(low) + one * float(step) for one in codes]


@settings(max_examples=20, deadline=None)
@given(shape=blocks, seed=st.integers(0, 99), scale=st.sampled_from([1e-2, 1.0, 20.0]))
def test_int4_groups_keys_by_channel_and_values_by_token(shape: BlockShape, seed: int, scale: float) -> None:
    x = numbers(shape, seed, scale)
    back, size = through(LOSSY["int4"], x, shape)
    tokens, width = shape.sizes[3], shape.row
    group = {n: next(one for one in (32, 16, 8, 4, 2) if n % one == 0) for n in (tokens, width)}
    assert size == x.numel() // 2 + 4 * (x[:, 0].numel() // group[tokens] + x[:, 1].numel() // group[width])
    plain = x.float()
    picks = [(0, 0, 0), (len(plain) - 1, plain.shape[2] - 1, min(tokens, width) - 1)]
    for layer, head, at in picks:
        for start in range(0, tokens, group[tokens]):
            part = (layer, 0, head, slice(start, start + group[tokens]), at)
            near(kivi4(plain[part].tolist()), plain[part], back[part], shape)
        for start in range(0, width, group[width]):
            part = (layer, 1, head, at, slice(start, start + group[width]))
            near(kivi4(plain[part].tolist()), plain[part], back[part], shape)


def near(
    reference: tuple[float, float, list[float]], x: torch.Tensor, back: torch.Tensor, shape: BlockShape
) -> None:
    low, step, wanted = reference
    slack = ROUNDING[shape.dtype] * (abs(low) + 16 * step) * 1.01 + 1e-6 * abs(low) + FINEST[shape.dtype]
    assert bool(((back - x).abs() <= step / 2 + slack).all())
    differs = (back - torch.tensor(wanted)).abs() > slack + step * 1e-3
    assert int(differs.sum()) <= max(1, len(wanted) // 8), "more than a tie in a group"


@settings(max_examples=40, deadline=None)
@given(shape=shapes, seed=st.integers(0, 9))
def test_lossless_gives_back_every_bit_of_every_dtype(shape: BlockShape, seed: int) -> None:
    payload = payload_of(numbers(shape, seed))
    encoded = encode(LOSSLESS, payload, None)
    if encoded is not None:
        back = memoryview(bytearray(len(payload)))
        assert LOSSLESS.decode(encoded, back, None)
        assert back == payload


@settings(max_examples=50, deadline=None)
@given(body=st.binary(max_size=400), times=st.integers(1, 700), tail=st.binary(max_size=9))
@example(body=b"a", times=26, tail=b"")  # comes to exactly as many bytes
def test_lossless_works_on_any_bytes_and_never_makes_them_longer(
    body: bytes, times: int, tail: bytes
) -> None:
    payload = memoryview(bytearray(body * times + tail))
    encoded = encode(LOSSLESS, payload, None)
    if encoded is None:
        return
    assert len(encoded) < len(payload)
    back = memoryview(bytearray(len(payload)))
    assert LOSSLESS.decode(encoded, back, None)
    assert back == payload


def test_what_is_like_kv_gets_smaller_and_noise_is_left_alone() -> None:
    shape = BlockShape("bfloat16", (4, 2, 2, 256, 64))
    encoded = encode(LOSSLESS, payload_of(numbers(shape, 1)), None)
    assert encoded is not None
    assert len(encoded) < 0.75 * 4 * 2 * 2 * 256 * 64 * 2
    noise = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
    assert encode(LOSSLESS, memoryview(bytearray(noise.tobytes())), None) is None


@pytest.mark.parametrize("codec", LOSSY.values(), ids=list(LOSSY))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_block_with_numbers_that_cannot_be_scaled_is_kept_as_it_is(
    codec: Codec, bad: float, dtype: str
) -> None:
    for tokens in (32, 64):
        shape = BlockShape(dtype, (2, 2, 2, tokens, 16))
        for side in (0, 1):
            x = numbers(shape, 3)
            assert encode(codec, payload_of(x), shape) is not None
            x[1, side, 1, 7, 3] = bad
            assert encode(codec, payload_of(x), shape) is None


@pytest.mark.parametrize("codec", LOSSY.values(), ids=list(LOSSY))
def test_zeros_stay_zeros(codec: Codec) -> None:
    for tokens in (32, 64):
        shape = BlockShape("float16", (1, 2, 1, tokens, 16))
        back, _ = through(codec, torch.zeros(shape.sizes, dtype=torch.float16), shape)
        assert not back.any()


def test_the_outermost_numbers_of_a_row_or_group_survive() -> None:
    shape = BlockShape("bfloat16", (1, 2, 1, 32, 32))
    x = numbers(shape, 5)
    top = x.float().abs().argmax(-1, keepdim=True)
    for name in ("int8", "fp8"):
        back, _ = through(LOSSY[name], x, shape)
        assert torch.equal(back.gather(-1, top), x.float().gather(-1, top))
    long = numbers(BlockShape("bfloat16", (1, 2, 1, 64, 32)), 5)
    back, _ = through(LOSSY["int8"], long, BlockShape("bfloat16", (1, 2, 1, 64, 32)))
    for end in (torch.amin, torch.amax):
        assert torch.equal(end(back[:, 0], 2), end(long[:, 0].float(), 2))


def test_int4_needs_the_whole_shape_and_rows_are_enough_for_int8_and_fp8() -> None:
    rows, full = BlockShape("bfloat16", (64,)), BlockShape("bfloat16", (2, 2, 2, 16, 64))
    assert [one.name for one in LOSSY.values() if one.fits(rows, 4096)] == ["int8", "fp8"]
    assert all(one.fits(full, 16384) for one in LOSSY.values())
    assert not any(one.fits(shape, 4097) for one in LOSSY.values() for shape in (rows, full, None))
    assert not LOSSY["int4"].fits(BlockShape("bfloat16", (2, 2, 2, 15, 64)), 15360)


def test_what_is_at_rest_is_the_same_bytes_for_ever() -> None:
    """A change here is another format: it needs another number, which makes other names of its blocks."""
    waves = np.arange(14 * 2 * 3 * 128 * 64, dtype=np.uint32) * np.uint32(2654435761)
    bits = 0x3F00 + (waves >> 25) + ((waves & 1) << 15)
    payload = memoryview(bytearray(bits.astype(np.uint16).tobytes()))
    whole = BlockShape("bfloat16", (14, 2, 3, 128, 64))
    parts = BlockShape("bfloat16", (3, 128, 64), KEYS_BY_CHANNEL)
    digests = {
        name: [xxhash.xxh3_64_hexdigest(encode(codec, payload, shape) or b"") for shape in (whole, parts)]
        for name, codec in LOSSY.items()
    }
    assert digests == {
        "int8": ["36e034548c0bade0", "b45a238bd50b840d"],
        "fp8": ["cc0e4ef60b989e7d", "830c2a501633a652"],
        "int4": ["5fe1d8b44cd568ad", "9c7efe86d1de3700"],
    }


# Bytes that nobody of us made.


@pytest.mark.parametrize("codec", EVERY, ids=[one.name for one in EVERY])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_other_bytes_are_refused_or_decoded_but_never_more_than_that(
    codec: Codec, data: st.DataObject
) -> None:
    shape = BlockShape("bfloat16", (2, 2, 1, data.draw(st.sampled_from([32, 64])), 16))
    payload = payload_of(numbers(shape, 1))
    encoded = encode(codec, payload, shape)
    assert encoded is not None
    hostile = bytearray(encoded)
    for _ in range(data.draw(st.integers(0, 3))):
        hostile[data.draw(st.integers(0, len(hostile) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.sampled_from([0, 1, 7, len(hostile) // 2]))
    hostile = hostile[: len(hostile) - cut] + data.draw(st.sampled_from([b"", b"\0", b"\xff" * 40]))
    guarded = bytearray(b"\x5a" * (len(payload) + 64))
    into = memoryview(guarded)[: len(payload)]
    assert codec.decode(memoryview(hostile), into, shape) in (True, False)
    assert guarded[len(payload) :] == b"\x5a" * 64
    if cut and len(hostile) != len(encoded):
        assert not codec.decode(memoryview(hostile), into, shape)


@pytest.mark.parametrize("codec", EVERY, ids=[one.name for one in EVERY])
@settings(max_examples=40, deadline=None)
@given(body=st.binary(max_size=3000))
def test_random_bytes_never_raise(codec: Codec, body: bytes) -> None:
    for tokens in (32, 64):
        shape = BlockShape("float16", (1, 2, 1, tokens, 16))
        into = memoryview(bytearray(2 * tokens * 16 * 2))
        assert codec.decode(memoryview(body), into, shape) in (True, False)


@pytest.mark.parametrize("claimed", [1 << 20, 1 << 40])
def test_a_plane_that_unpacks_to_more_than_there_is_room_for_is_not_unpacked(claimed: int) -> None:
    if claimed == 1 << 20:
        frame = zstandard.ZstdCompressor().compress(bytes(claimed))
    else:
        # Magic, descriptor (8 bytes of content size, a window), window, size, then one empty last block.
        frame = b"\x28\xb5\x2f\xfd\xc0\x58" + struct.pack("<Q", claimed) + b"\x01\0\0"
    assert zstandard.get_frame_parameters(frame).content_size == claimed
    encoded = b"\x01" + len(frame).to_bytes(8, "little") + frame
    assert not LOSSLESS.decode(memoryview(encoded), memoryview(bytearray(4096)), None)


def test_a_plane_with_bytes_behind_its_frame_is_refused() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(4096))
    good = b"\x01" + len(frame).to_bytes(8, "little") + frame
    assert LOSSLESS.decode(memoryview(good), memoryview(bytearray(4096)), None)
    assert not LOSSLESS.decode(memoryview(good + b"x"), memoryview(bytearray(4096)), None)


@given(text=st.text(max_size=40))
def test_a_shape_is_only_read_from_what_one_writes(text: str) -> None:
    found = BlockShape.parse(text)
    assert found is None or str(found) == text


def test_shapes_read_back() -> None:
    for shape in (BlockShape("float32", (128,)), BlockShape("bfloat16", (30, 2, 3, 256, 64))):
        assert BlockShape.parse(str(shape)) == shape
    for text in ("bfloat16:", "bfloat16:0", "bfloat16:1,2", "int3:64", "bfloat16:64 ", "bfloat16:9999999999"):
        assert BlockShape.parse(text) is None
