"""Codecs under vLLM: which numbers of a block belong together, in every layout and as CPU kernels write them,
and a daemon whose codecs do not go with the model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)

from tiercel.blocks import Identity
from tiercel.codecs import LOSSY, BlockShape, LossyTiers, Mark
from tiercel.codecs.shape import BY_HEAD, BY_TOKEN, KEYS_BY_CHANNEL
from tiercel.engines.vllm.arrangement import Interior, interiors
from tiercel.engines.vllm.layout import Layout, register
from tiercel.engines.vllm.mover import CpuMover
from tiercel.engines.vllm.opening import mark_for

IDENTITY = Identity("m", "1", "auto", b"g", "vllm-1", 16)
LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 2, 5, 3, 32, 64
# So many tokens together that int8 has its keys by channel.
LONG = 128
# Blocks of the engine that make up one of ours, in the order of its tokens.
TABLE = [3, 1]
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
SIDE_BY_SIDE = {f"layer{number}": Interior.SIDE_BY_SIDE for number in range(LAYERS)}
BY_CHANNEL = {f"layer{number}": Interior.KEYS_BY_CHANNEL for number in range(LAYERS)}


def made(
    layout: str, dtype: torch.dtype = torch.bfloat16, tokens: int = TOKENS
) -> tuple[KVCacheConfig, dict[str, Tensor]]:
    """vLLM's own views of a cache in this layout."""
    spec = FullAttentionSpec(block_size=tokens, num_kv_heads=HEADS, head_size=WIDTH, dtype=dtype)
    kind, names = KVCacheLayout[layout], [f"layer{number}" for number in range(LAYERS)]
    strides = compute_layout_strides(spec, BLOCKS, LAYERS, kind)
    total = spec.page_size_bytes * LAYERS * BLOCKS
    tensor = KVCacheTensor(total, names, layer_stride=strides[0], block_stride=strides[1])
    views = create_kv_cache_views(torch.zeros(total, dtype=torch.int8), spec, BLOCKS, kind, tensor)
    config = KVCacheConfig(
        BLOCKS, [tensor], [KVCacheGroupSpec(names, spec)], kv_cache_layout=layout, hash_block_size=tokens
    )
    return config, dict(zip(names, views, strict=True))


def outliers(dtype: torch.dtype = torch.bfloat16, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """Keys and values [layers, blocks, heads, tokens, width]: a head, a token, channels of keys are large."""
    chance = torch.Generator().manual_seed(1)
    both = torch.randn(2, LAYERS, BLOCKS, HEADS, tokens, WIDTH, generator=chance)
    both[..., 1, :, :] *= 40
    both[..., 5, :] *= 30
    both[0, ..., 7] += 100
    both[0, ..., 30] -= 60
    keys, values = both.to(dtype)
    return keys, values


def fill(views: Mapping[str, Tensor], keys: Tensor, values: Tensor) -> None:
    """As backends do that keep K and V of a token side by side."""
    for view, key, value in zip(views.values(), keys, values, strict=True):
        view.copy_(torch.cat([key, value], -1))


def fill_on_cpu(views: Mapping[str, Tensor], keys: Tensor, values: Tensor, isa: str) -> None:
    """As vLLM's kernels for CPUs write them."""
    tokens = keys.shape[3]
    for view, key, value in zip(views.values(), keys, values, strict=True):
        key_cache, value_cache = view.view(BLOCKS, HEADS, tokens * 2, WIDTH).chunk(2, dim=2)
        flat = [one.transpose(1, 2).reshape(BLOCKS * tokens, HEADS, WIDTH) for one in (key, value)]
        ops.cpu_attn_reshape_and_cache(
            flat[0], flat[1], key_cache, value_cache, torch.arange(BLOCKS * tokens), isa
        )


def saved(layout: Layout, tokens: int = TOKENS) -> memoryview:
    payload = memoryview(bytearray(layout.unit_bytes(tokens * len(TABLE))))
    CpuMover().save(None, [(payload, layout.copies([TABLE], 0, tokens * len(TABLE)))])
    return payload


def sides(payload: memoryview, shape: BlockShape) -> list[Tensor]:
    """Keys and values of a payload as float32 [parts, heads, tokens, width], as its shape sees them."""
    if shape.dtype == "bfloat16":
        numbers = (np.frombuffer(payload, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        numbers = np.frombuffer(payload, shape.dtype).astype(np.float32)
    seen = shape.sides(numbers)
    assert seen is not None
    return [torch.from_numpy(side.copy()) for side in seen]


def parts(one: Tensor) -> Tensor:
    """What a payload should hold of `one`: block after block, in each layer after layer."""
    return one[:, TABLE].transpose(0, 1).flatten(0, 1).float()


def back(codec: str, payload: memoryview, shape: BlockShape) -> memoryview:
    into, found = memoryview(bytearray(len(payload))), memoryview(bytearray(len(payload)))
    size = LOSSY[codec].encode(payload, into, shape)
    assert size is not None
    assert LOSSY[codec].decode(into[:size], found, shape)
    return found


def within(codec: str, payload: memoryview, shape: BlockShape, as_if: BlockShape | None = None) -> bool:
    """Whether every number of a payload that was coded `as_if` is as near as the codec promises."""
    near = sides(back(codec, payload, as_if or shape), shape)
    for axis, x, y in zip((2, 3), sides(payload, shape), near, strict=True):
        if codec == "int8" and axis == 2 and shape.tokens == LONG:
            bound = (x.amax(2, keepdim=True) - x.amin(2, keepdim=True)) / 510
        elif codec == "int8":
            bound = x.abs().amax(3, keepdim=True) / 254
        elif codec == "fp8":
            bound = torch.maximum(x.abs() / 16, x.abs().amax(3, keepdim=True) / 448 / 1024)
        else:
            groups = x.unflatten(axis, (-1, 32))
            low, high = groups.amin(axis + 1, keepdim=True), groups.amax(axis + 1, keepdim=True)
            step = (high - low + low.abs() / 512) / 15 * 1.002
            bound = (step / 2).expand(groups.shape).flatten(axis, axis + 1)
        rounding = y.abs() * (2.0**-8 if shape.dtype == "bfloat16" else 2.0**-23)
        if bool(((y - x).abs() > bound * 1.001 + rounding).any()):
            return False
    return True


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_layout_numbers_are_scaled_with_those_they_belong_to(layout: str) -> None:
    config, views = made(layout)
    keys, values = outliers()
    fill(views, keys, values)
    registered = register(config, views, SIDE_BY_SIDE)
    order, other = (BY_TOKEN, BY_HEAD) if "NH" in layout else (BY_HEAD, BY_TOKEN)
    shape = registered.shape
    assert shape == BlockShape("bfloat16", (HEADS, TOKENS, WIDTH), order)
    payload = saved(registered)
    for found, wanted in zip(sides(payload, shape), (keys, values), strict=True):
        assert torch.equal(found, parts(wanted))
    assert all(within(codec, payload, shape) for codec in LOSSY)
    assert not within("int4", payload, shape, replace(shape, order=other)), "the control: other axes"
    assert not within("int8", payload, shape, replace(shape, order=KEYS_BY_CHANNEL))
    before = {name: view.clone() for name, view in views.items()}
    copies = registered.copies([TABLE], 0, TOKENS * len(TABLE))
    CpuMover().load(None, [(back("int8", payload, shape), copies)])
    for name, view in views.items():
        assert not torch.equal(view[TABLE], before[name][TABLE])
        assert torch.equal(view[[0, 2, 4]], before[name][[0, 2, 4]])


@pytest.mark.parametrize("isa", ["vec", "vec16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_vllms_cpu_kernels_write_is_scaled_with_what_it_belongs_to(isa: str, dtype: torch.dtype) -> None:
    config, views = made("LBHNC", dtype)
    keys, values = outliers(dtype)
    fill_on_cpu(views, keys, values, isa)
    registered = register(config, views, BY_CHANNEL)
    shape = registered.shape
    assert shape == BlockShape(str(dtype).removeprefix("torch."), (HEADS, TOKENS, WIDTH), KEYS_BY_CHANNEL)
    payload = saved(registered)
    for found, wanted in zip(sides(payload, shape), (keys, values), strict=True):
        assert torch.equal(found, parts(wanted))
    assert all(within(codec, payload, shape) for codec in LOSSY)
    for codec in LOSSY:
        assert not within(codec, payload, shape, replace(shape, order=BY_HEAD)), "the control: other axes"


@pytest.mark.parametrize("layout", [*LAYOUTS, "cpu"])
def test_int8_has_keys_by_channel_where_enough_tokens_lie_together(layout: str) -> None:
    cpu = layout == "cpu"
    config, views = made("LBHNC" if cpu else layout, tokens=LONG)
    keys, values = outliers(tokens=LONG)
    if cpu:
        fill_on_cpu(views, keys, values, "vec")
    else:
        fill(views, keys, values)
    registered = register(config, views, BY_CHANNEL if cpu else SIDE_BY_SIDE)
    shape, payload = registered.shape, saved(registered, LONG)
    assert shape is not None
    assert shape.tokens == LONG
    assert all(within(codec, payload, shape) for codec in LOSSY)
    for order in {BY_HEAD, BY_TOKEN, KEYS_BY_CHANNEL} - {shape.order}:
        assert not within("int8", payload, shape, replace(shape, order=order)), "the control: other axes"


def attention(name: str, isa: str | None = None) -> Any:
    backend = SimpleNamespace(get_name=lambda: name)
    return SimpleNamespace(get_attn_backend=lambda: backend, **({} if isa is None else {"isa": isa}))


def test_only_contents_that_were_read_in_vllms_code_are_known() -> None:
    layers = {
        "flash": attention("FLASH_ATTN"), "cpu": attention("CPU_ATTN", "vec"),
        "amx": attention("CPU_ATTN", "amx"), "early": attention("CPU_ATTN"),
        "rocm": attention("ROCM_ATTN"), "mlp": object(),
    }  # fmt: skip
    assert interiors(layers) == {"flash": Interior.SIDE_BY_SIDE, "cpu": Interior.KEYS_BY_CHANNEL}


def test_the_backends_that_are_known_by_name_are_vllms() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from tiercel.engines.vllm.arrangement import _CPU, _SIDE_BY_SIDE

    assert {_CPU, *_SIDE_BY_SIDE} <= set(AttentionBackendEnum.__members__)


def test_kernel_blocks_smaller_than_vllms_follow_each_other() -> None:
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.bfloat16)
    config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer0"], spec)])
    split = torch.zeros(BLOCKS * 2, HEADS, TOKENS // 2, 2 * WIDTH, dtype=torch.bfloat16)
    shape = register(config, {"layer0": split}, SIDE_BY_SIDE).shape
    assert shape == BlockShape("bfloat16", (HEADS, TOKENS // 2, WIDTH), BY_HEAD)
    heads_first = split.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3)
    assert register(config, {"layer0": heads_first}, SIDE_BY_SIDE).shape is None, (
        "not one part after the other"
    )


def test_a_quantised_cache_unknown_contents_and_layers_that_differ_have_no_shape_or_only_rows() -> None:
    def layers(*kinds: tuple[torch.dtype, int, int], known: Interior | None = Interior.SIDE_BY_SIDE) -> Any:
        groups, views = [], {}
        for number, (dtype, width, tokens) in enumerate(kinds):
            spec = FullAttentionSpec(block_size=tokens, num_kv_heads=2, head_size=width, dtype=dtype)
            groups.append(KVCacheGroupSpec([f"l{number}"], spec))
            views[f"l{number}"] = torch.zeros(5, 2, tokens, 2 * width, dtype=dtype)
        told = {} if known is None else dict.fromkeys(views, known)
        return register(KVCacheConfig(5, [], groups), views, told).shape

    plain = (torch.bfloat16, 8, 16)
    assert layers(plain) == layers(plain, plain) == BlockShape("bfloat16", (2, 16, 8), BY_HEAD)
    assert layers(plain, known=None) is None
    assert layers((torch.uint8, 8, 16)) is None
    assert layers(plain, (torch.bfloat16, 16, 16)) is None
    assert layers(plain, (torch.float16, 8, 16)) is None
    assert layers(plain, (torch.bfloat16, 8, 32)) == BlockShape("bfloat16", (8,))
    assert layers(plain, (torch.bfloat16, 8, 32), known=Interior.KEYS_BY_CHANNEL) is None


def marked_by(lossy: LossyTiers, *shapes: str) -> Identity:
    store: Any = SimpleNamespace(lossy=lossy)
    return mark_for(IDENTITY, store, set(shapes), 4096)


def test_a_daemons_codecs_mark_the_identity_where_they_go_and_are_refused_in_one_line_where_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows, whole = "bfloat16:64", "bfloat16/htsc:1,16,64"
    assert marked_by(LossyTiers(), rows) == IDENTITY
    assert Mark.parse(marked_by(LossyTiers(("int8",)), rows, rows).lossy) == Mark(
        ("int8",), BlockShape("bfloat16", (64,))
    )
    assert Mark.parse(marked_by(LossyTiers(("int4", "int8")), whole).lossy) == Mark(
        ("int4", "int8"), BlockShape("bfloat16", (1, 16, 64), BY_HEAD)
    )
    assert not caplog.records
    refused = [
        (LossyTiers(("int4",)), [rows]),
        (LossyTiers(("int8",)), [rows, "float16:64"]),
        (LossyTiers(("int8",)), [""]),
        (LossyTiers(("int8",), ("another",)), [rows]),
    ]
    with caplog.at_level(logging.WARNING, "tiercel"):
        for lossy, shapes in refused:
            assert marked_by(lossy, *shapes) == IDENTITY
    assert len(caplog.records) == len(refused)
    assert all("kept exactly" in one.getMessage() for one in caplog.records)
