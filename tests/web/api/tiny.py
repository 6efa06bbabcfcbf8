"""`tiercel serve`'s application around a real engine with a model of a few kilobytes, and a real store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from starlette.testclient import TestClient

from tiercel.blocks import record_bytes
from tiercel.config import ServeConfig
from tiercel.engines.transformers import TransformersEngine
from tiercel.memory import Arena
from tiercel.store import LaneOptions, TieredStore
from tiercel.tiers.base import Tier
from tiercel.web.api.app import make_app
from tiercel.web.api.completions import Service
from tiercel.web.api.engine import Loaded, ModelFacts
from tiercel.web.api.tracing import Tracing

BLOCK = 16
PROMPT = [3 + at % 100 for at in range(5 * BLOCK + 3)]
FACTS = ModelFacts("tiny", "fp_0", 512, 128, False, False, "cpu")


@contextmanager
def tiny_server(
    folder: Path,
    tiers: Sequence[tuple[Tier, LaneOptions]] = (),
    tracing: Tracing | None = None,
    batch: int = 1,
) -> Iterator[tuple[TestClient, TieredStore]]:
    """A client of it and its store. The model is written to `folder`; it never ends an answer by itself."""
    write_tiny(folder)
    with tiny_engine(folder, tiers, batch) as (engine, store):
        service = Service(Loaded(engine, store, FACTS), ServeConfig())
        with TestClient(make_app(service, tracing=tracing)) as client:
            yield client, store


def write_tiny(folder: Path) -> None:
    """The model, the same every time."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=1, bos_token_id=2,
        initializer_range=0.2,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@contextmanager
def tiny_engine(
    folder: Path, tiers: Sequence[tuple[Tier, LaneOptions]] = (), batch: int = 1
) -> Iterator[tuple[TransformersEngine, TieredStore]]:
    """It in float32 with a store of 64 blocks; answers end with their last token only."""
    arena = Arena(record_bytes(3 * 2 * 2 * BLOCK * 16 * 4), 64, reserved=8)
    with TieredStore(arena, list(tiers)) as store:
        assert store.scanned(10)
        engine = TransformersEngine(
            folder, store, dtype="float32", device="cpu", block_tokens=BLOCK, load_always=True, batch=batch
        )
        object.__setattr__(engine.model, "eos_ids", frozenset())
        yield engine, store
