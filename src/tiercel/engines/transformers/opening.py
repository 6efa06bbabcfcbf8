"""One call from a configuration to an engine with its store."""

from __future__ import annotations

from pathlib import Path

from tiercel.attention.registry import servable_policy
from tiercel.codecs.consent import lossy_attention, lossy_chunks
from tiercel.config import Config
from tiercel.engines.transformers.chunks import ChunkReuse
from tiercel.engines.transformers.engine import TransformersEngine
from tiercel.errors import EngineError
from tiercel.store import TieredStore, open_store


def open_engine(model_dir: str | Path, config: Config) -> tuple[TransformersEngine, TieredStore]:
    """Load a model and open the store that `config` describes, with slots of that model's block size.

    The caller closes the store. Raises ModelError, MemoryLimitError or TierError, and for a lossy codec that
    does not go with the model or was not accepted EngineError or ConfigError; so for a policy of attention
    and for chunks.
    """
    policy = lossy_attention(config)
    if policy is not None:
        servable_policy(policy.policy)
    chunks = lossy_chunks(config)
    engine = TransformersEngine(
        model_dir,
        dtype=config.model.dtype,
        device=config.model.device,
        block_tokens=config.model.block_tokens,
        load_deadline_s=config.store.load_deadline_s,
        kv_device_bytes=config.model.kv_device_budget_bytes,
        batch=config.model.batch,
        policy=policy,
        chunks=None if chunks is None else ChunkReuse.parse(chunks.setting),
    )
    if chunks is not None:
        chunks.check(engine.identity)
    store = open_store(config, engine.layout.payload_bytes)
    try:
        engine.attach(store)
    except EngineError:
        store.close()
        raise
    return engine, store
