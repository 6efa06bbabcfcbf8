"""vLLM itself with models of other kinds, tiny and random: tensor parallelism, windows, short of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engines.vllm.driver import Engine

BLOCK = 32
EXTRA = {"ram.size": "300MiB"}


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(1, 500, 400).tolist()
    made = []
    for number in range(count):
        length = int(rng.integers(1, 700))
        made.append((shared[: number * 37 % 400] + rng.integers(1, 500, length).tolist())[:length])
    return made


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=512, max_position_embeddings=2048,
    )  # fmt: skip
    return save(LlamaForCausalLM(config), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, vocab_size=512, max_position_embeddings=2048,
        sliding_window=128, sliding_window_pattern=3,
    )  # fmt: skip
    return save(Gemma3ForCausalLM(config), tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def parallel(llama: Path) -> Iterator[Engine]:
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    settings = {"tensor_parallel_size": 2, "skip_tokenizer_init": True, "block_size": BLOCK}
    engine = Engine(llama, EXTRA, environ, **settings)
    yield engine
    engine.close()


def answers(engine: Engine, asked: list[list[int]]) -> tuple[list[tuple[int, ...]], list[int]]:
    found = engine.ask(asked, 16, detokenize=False)
    return [one.tokens for one in found], [one.cached for one in found]


def check_one_by_one(engine: Engine, asked: list[list[int]], cold: list[tuple[int, ...]], block: int) -> None:
    """Alone each prompt finds its whole blocks, `block` tokens long, in the store and nowhere else."""
    for one, expected in zip(asked, cold, strict=True):
        engine.forget()
        tokens, cached = answers(engine, [one])
        assert tokens == [expected]
        assert cached == [(len(one) - 1) // block * block]


def test_two_ranks_each_store_their_heads(parallel: Engine) -> None:
    asked = prompts(12)
    cold = [answers(parallel, [one])[0][0] for one in asked]
    parallel.forget()
    assert answers(parallel, asked)[0] == cold
    # A vLLM block of 32 tokens has 128 KiB per rank; eight of them make one of ours.
    check_one_by_one(parallel, asked[:4], cold[:4], 8 * BLOCK)
    assert parallel.figure("loads_failed") == 0


def test_windows_and_full_attention_short_of_blocks(gemma: Path) -> None:
    """Two KV cache groups, and so few blocks that requests are preempted."""
    settings = {"skip_tokenizer_init": True, "block_size": BLOCK, "num_gpu_blocks_override": 120}
    engine = Engine(gemma, EXTRA, max_model_len=1024, **settings)
    asked = prompts(24, seed=3)
    cold = [answers(engine, [one])[0][0] for one in asked]
    for _ in range(2):
        engine.forget()
        assert answers(engine, asked)[0] == cold
    longest = sorted(range(len(asked)), key=lambda at: len(asked[at]))[-2:]
    check_one_by_one(engine, [asked[at] for at in longest], [cold[at] for at in longest], 6 * BLOCK)
    assert engine.figure("loads_failed") == 0
    assert engine.figure("loaded_tokens") > 1000
    engine.close()
