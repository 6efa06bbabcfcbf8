"""Chunks on the real model: moving keys helps most, computing heads anew helps further."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.engines.conftest import FakeStore

from tiercel.engines.transformers import Request, TransformersEngine
from tiercel.engines.transformers.chunks import ChunkReuse
from tiercel.engines.transformers.kv_cache import KVCache

pytestmark = pytest.mark.model
ROOT = Path(__file__).parents[2]
CHUNK, SCORED = 256, 64


def test_answers_come_nearer_with_moved_keys_and_nearer_still_with_heads(
    model_dir: Path, fake_store: FakeStore
) -> None:
    engine = TransformersEngine(
        model_dir, fake_store, device="cpu", block_tokens=64, load_always=True, chunks=ChunkReuse(),  # type: ignore[arg-type]
    )  # fmt: skip
    assert engine.chunks is not None
    text = engine.encode((ROOT / "docs/architecture.md").read_text())
    move = engine.chunks.rotate
    off = dict.fromkeys(("unmoved", "moved", "heads", "deviating"), 0.0)
    for start in (3000,):
        tokens = text[start : start + 2 * CHUNK]
        new = torch.tensor([text[start + 2 * CHUNK : start + 2 * CHUNK + SCORED]])
        exact = KVCache(engine.layout, engine.model.device)
        engine.run_blocks(tokens, exact)
        right = said(engine, new, exact)
        for name in off:
            engine.chunks.reuse = ChunkReuse(16 if name == "heads" else 0, 0.3 if name == "deviating" else 0)
            engine.chunks.rotate = (lambda keys, by: keys) if name == "unmoved" else move
            cache = KVCache(engine.layout, engine.model.device)
            request = Request(tokens, chunks=((0, CHUNK), (CHUNK, 2 * CHUNK)))
            engine.chunks.blend(request, request.chunks, cache, lambda: False, None)
            near = said(engine, new, cache)
            off[name] += float((right.exp() * (right - near)).sum(-1).mean())
    assert off["unmoved"] > 2 * off["moved"]
    assert off["moved"] > off["heads"] > 0
    assert off["moved"] > off["deviating"] > 0


@torch.inference_mode()
def said(engine: TransformersEngine, new: torch.Tensor, cache: KVCache) -> torch.Tensor:
    logits: torch.Tensor = engine.model.module(input_ids=new, past_key_values=cache, use_cache=True).logits
    return logits[0].float().log_softmax(-1)
