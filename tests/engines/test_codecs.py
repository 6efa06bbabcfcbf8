"""Engines on stores with codecs: lossless changes no bit of an answer, lossy never meets exact."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tiercel.blocks import parse
from tiercel.codecs import LOSSY, LossyTiers, Mark
from tiercel.config import Config
from tiercel.engines.transformers import TransformersEngine
from tiercel.engines.transformers.layout import BlockLayout, LayerShape
from tiercel.engines.transformers.opening import open_engine
from tiercel.errors import ConfigError, EngineError
from tiercel.service import Daemon, connect
from tiercel.store import TieredStore

BLOCK, BLOCKS = 64, 3
Opened = tuple[TransformersEngine, TieredStore]
Prompt = Callable[..., list[int]]


@pytest.fixture
def opened(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> Callable[..., AbstractContextManager[TransformersEngine]]:
    """A function (codec) -> an engine whose store has one tier, always the same directory."""

    def make(codec: str, model: Path | None = None) -> AbstractContextManager[TransformersEngine]:
        settings = {
            "ram.size": "8MiB", "tiers.0.path": str(tmp_path / "disk"), "tiers.0.size": "64MiB",
            "tiers.0.codec": codec, "store.accept_lossy": "yes", "store.load": "always",
            "model.dtype": "float32", "model.device": "cpu", "model.block_tokens": str(BLOCK),
        }  # fmt: skip
        engine, store = open_engine(model or tiny_model(), Config.load(None, {}, settings))
        assert store.scanned(10)
        closer = closing(store)
        return _With(engine, closer)

    return make


class _With(AbstractContextManager[TransformersEngine]):
    def __init__(self, engine: TransformersEngine, store: closing[TieredStore]) -> None:
        self.engine, self.store = engine, store

    def __enter__(self) -> TransformersEngine:
        self.store.__enter__()
        return self.engine

    def __exit__(self, *fault: object) -> None:
        self.store.__exit__(None, None, None)


def codecs_at_rest(folder: Path) -> set[int]:
    found = set()
    for path in folder.rglob("*"):
        header = parse(path.read_bytes()[:4096]) if path.is_file() and path.stat().st_size > 4096 else ""
        found |= set() if isinstance(header, str) else {header.codec}
    return found


def test_answers_from_lossless_blocks_are_equal_bit_for_bit(
    opened: Callable[..., AbstractContextManager[TransformersEngine]], prompt: Prompt, tmp_path: Path
) -> None:
    tokens = prompt(BLOCK * BLOCKS + 5)
    with opened("lossless") as engine:
        cold = engine.prefill_logits(tokens)
        assert cold.reused_tokens == 0
    assert codecs_at_rest(tmp_path / "disk") == {1}
    for codec in ("lossless", "none"):
        with opened(codec) as engine:
            warm = engine.prefill_logits(tokens, store_blocks=False)
            assert warm.restored.sources == {"disk": BLOCKS}
            assert torch.equal(warm.logits, cold.logits)


@pytest.mark.parametrize("codec", LOSSY)
def test_a_lossy_store_serves_itself_nearly_and_an_exact_one_never(
    opened: Callable[..., AbstractContextManager[TransformersEngine]],
    prompt: Prompt,
    tmp_path: Path,
    codec: str,
) -> None:
    tokens = prompt(BLOCK * BLOCKS + 5)
    with opened(codec) as engine:
        cold = engine.prefill_logits(tokens)
        assert Mark.parse(engine.identity.lossy)
    assert codecs_at_rest(tmp_path / "disk") == {LOSSY[codec].number}
    with opened(codec) as engine:
        near = engine.prefill_logits(tokens, store_blocks=False)
        assert near.restored.sources == {"disk": BLOCKS}, "the control"
        assert not torch.equal(near.logits, cold.logits)
        assert torch.allclose(near.logits, cold.logits, atol=0.6 * cold.logits.std().item())
    with opened("none") as engine:
        assert engine.identity.lossy is None
        exact = engine.prefill_logits(tokens)
        assert exact.reused_tokens == 0
        assert torch.equal(exact.logits, cold.logits)
    with opened(codec) as engine:
        again = engine.prefill_logits(tokens, store_blocks=False)
        assert torch.equal(again.logits, near.logits), "nor does a lossy one find the exact blocks"


@pytest.mark.parametrize("codec", ["lossless", *LOSSY])
def test_answers_from_blocks_in_memory(tiny_model: Callable[..., Path], prompt: Prompt, codec: str) -> None:
    """Exact as ever with an exact codec; near, and under names of their own, with one that was agreed to."""
    settings = {
        "ram.size": "8MiB", "tiers.0.kind": "memory", "tiers.0.size": "8MiB", "tiers.0.codec": codec,
        "store.load": "always", "model.dtype": "float32", "model.device": "cpu",
        "model.block_tokens": str(BLOCK),
    }  # fmt: skip
    if codec in LOSSY:
        with pytest.raises(
            ConfigError, match=f"tiers.0.codec = {codec} changes answers; accepted: --accept-lossy"
        ):
            open_engine(tiny_model(), Config.load(None, {}, settings))
        settings["store.accept_lossy"] = "yes"
    engine, store = open_engine(tiny_model(), Config.load(None, {}, settings))
    with store:
        tokens = prompt(BLOCK * BLOCKS + 5)
        cold = engine.prefill_logits(tokens)
        assert bool(engine.identity.lossy) is (codec in LOSSY)
        assert store.demote(engine.chain(tokens), 10) == BLOCKS
        assert store.stats().tiers[0].used_bytes < BLOCKS * store.stats().slot_bytes
        warm = engine.prefill_logits(tokens, store_blocks=False)
        assert warm.restored.sources == {"memory": BLOCKS}
        assert torch.equal(warm.logits, cold.logits) is (codec not in LOSSY)
        assert torch.allclose(warm.logits, cold.logits, atol=0.6 * cold.logits.std().item())
        again = engine.prefill_logits(tokens, store_blocks=False)
        assert again.restored.sources == {"ram": BLOCKS}
        assert torch.equal(again.logits, warm.logits)


def test_a_daemons_codecs_mark_its_engines_blocks(
    tiny_model: Callable[..., Path], prompt: Prompt, tmp_path: Path
) -> None:
    settings = {
        "ram.size": "8MiB", "daemon.socket": str(tmp_path / "s"), "tiers.0.path": str(tmp_path / "disk"),
        "tiers.0.size": "64MiB", "tiers.0.codec": "int8", "store.accept_lossy": "yes",
    }  # fmt: skip
    config = Config.load(None, {}, settings)
    engine = TransformersEngine(tiny_model(), dtype="float32", device="cpu", block_tokens=BLOCK)
    daemon = Daemon(config, tmp_path / "s")
    import threading

    thread = threading.Thread(target=daemon.run, daemon=True)
    thread.start()
    with connect(config, engine.layout.payload_bytes) as store:
        assert store.lossy == LossyTiers(("int8",))
        engine.attach(store)  # type: ignore[arg-type]  # (it has the same calls)
        assert engine.identity.lossy == f"int8 {engine.layout.shape()} 5"
        tokens = prompt(BLOCK + 1)
        engine.prefill_logits(tokens)
        assert store.flush(20)
    daemon.stop()
    thread.join(20)
    daemon.close()
    assert codecs_at_rest(tmp_path / "disk") == {5}


def test_a_model_whose_layers_differ_is_refused_a_lossy_tier_in_one_line(
    tiny_model: Callable[..., Path],
) -> None:
    engine = TransformersEngine(tiny_model(), dtype="float32", device="cpu", block_tokens=BLOCK)
    first, *others = engine.layout.shapes
    odd = (replace(first, value_dim=first.value_dim // 2), *others)
    engine.layout = BlockLayout(odd, engine.layout.dtype, BLOCK)
    assert engine.layout.shape() is None

    class Store:
        lossy = LossyTiers(("int8",))

    with pytest.raises(EngineError, match=r"not described.*accepted: none, lossless"):
        engine.attach(Store())  # type: ignore[arg-type]


def test_the_shape_is_how_the_payload_lies() -> None:
    layout = BlockLayout((LayerShape(3, 64, 64),) * 30, torch.bfloat16, 256)
    assert str(layout.shape()) == "bfloat16:30,2,3,256,64"
    assert BlockLayout((LayerShape(3, 64, 64),), torch.float8_e4m3fn, 256).shape() is None
