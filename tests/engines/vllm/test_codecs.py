"""Codecs under vLLM: rows of any registered layout, and a daemon whose codecs do not go with the model."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engines.vllm.toy import Toy, toy_cache, toy_views
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from tiercel.blocks import Identity
from tiercel.codecs import LOSSY, BlockShape, LossyTiers, Mark
from tiercel.engines.vllm.jobs import Shard
from tiercel.engines.vllm.layout import register
from tiercel.engines.vllm.mover import CpuMover
from tiercel.engines.vllm.opening import _marked

IDENTITY = Identity("m", "1", "auto", b"g", "vllm-1", 16)


def marked_by(lossy: LossyTiers, *shapes: str) -> Identity:
    shards = [Shard(n, len(shapes), True, b"l", 4096, "cpu", shape=one) for n, one in enumerate(shapes)]
    store: Any = SimpleNamespace(lossy=lossy)
    return _marked(IDENTITY, store, shards, 4096)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_every_layout_is_rows_that_int8_keeps_within_its_bound(tmp_path: Path, layout: str) -> None:
    toy = Toy(tmp_path, None, layout=layout, layers=3, blocks=7)
    cache = toy_cache(toy)
    views = toy_views(toy, cache)
    registered = register(cache, views)
    shape = registered.shape
    assert shape is not None
    assert shape.dtype == "float32"
    assert LOSSY["int8"].fits(shape, registered.unit_bytes(16))
    assert not LOSSY["int4"].fits(shape, registered.unit_bytes(16))
    for at, view in enumerate(views.values()):
        view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(at)))
    before = {name: view[3].clone() for name, view in views.items()}
    payload = memoryview(bytearray(registered.unit_bytes(16)))
    CpuMover().save(None, [(payload, registered.copies([[3]], 0, 16))])
    into, back = memoryview(bytearray(len(payload))), memoryview(bytearray(len(payload)))
    size = LOSSY["int8"].encode(payload, into, shape)
    assert size is not None
    assert LOSSY["int8"].decode(into[:size], back, shape)
    CpuMover().load(None, [(back, registered.copies([[3]], 0, 16))])
    for name, view in views.items():
        rows = before[name].reshape(-1, before[name].shape[-1])
        off = (view[3].reshape(rows.shape) - rows).abs()
        assert 0 < off.max() <= rows.abs().max() / 254 * 1.001
        assert bool((off <= rows.abs().amax(-1, keepdim=True) / 254 * 1.001).all()), "scales are of rows"


def test_a_quantised_cache_and_layers_that_differ_have_no_shape() -> None:
    def layers(*kinds: tuple[torch.dtype, int]) -> BlockShape | None:
        groups, views = [], {}
        for number, (dtype, width) in enumerate(kinds):
            spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=width, dtype=dtype)
            groups.append(KVCacheGroupSpec([f"l{number}"], spec))
            views[f"l{number}"] = torch.zeros(5, 2, 16, 2 * width, dtype=dtype)
        return register(KVCacheConfig(5, [], groups), views).shape

    assert layers((torch.bfloat16, 8)) == layers((torch.bfloat16, 8), (torch.bfloat16, 8))
    assert layers((torch.bfloat16, 8)) == BlockShape("bfloat16", (8,))
    assert layers((torch.uint8, 8)) is None
    assert layers((torch.bfloat16, 8), (torch.bfloat16, 16)) is None
    assert layers((torch.bfloat16, 8), (torch.float16, 8)) is None


def test_a_daemons_codecs_mark_the_identity_where_they_go_and_are_refused_in_one_line_where_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = "bfloat16:64"
    assert marked_by(LossyTiers(), rows) == IDENTITY
    assert Mark.parse(marked_by(LossyTiers(("int8",)), rows, rows).lossy) == Mark(
        ("int8",), BlockShape("bfloat16", (64,))
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
