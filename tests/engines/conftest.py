"""Tiny random models of several families, a store that can be told to fail, and the demo model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiercel.codecs import LossyTiers  # noqa: E402

VOCAB = 128
# Several threads wait for each other at every operator; on cores shared with other work that costs minutes.
torch.set_num_threads(1)


@dataclass
class FakeBlock:
    index: int
    payload: memoryview
    source: str = "ram"


@dataclass
class FakeHit:
    blocks: int
    sources: tuple[str, ...]
    choice: None = None


@dataclass
class FakeStore:
    """The store's protocol over a dict, with faults.

    `fail_load_at` ends every load before that block, `refuse` raises from every call, `crowded` has room
    only for who waits for it.
    """

    blocks: dict[bytes, bytearray] = field(default_factory=dict)
    fail_load_at: int | None = None
    refuse: bool = False
    crowded: bool = False
    leases: int = 0
    writes: int = 0
    lossy: LossyTiers = field(default_factory=LossyTiers)
    loads: list[int] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)
    faults_fired: int = 0

    def lookup(self, chain: Any, deadline_s: float = 0.05, prompt: Any = None) -> FakeHit:
        self._maybe_refuse()
        length = 0
        while length < len(chain) and chain.keys[length] in self.blocks:
            length += 1
        return FakeHit(length, ("ram",) * length)

    def acquire(self, chain: Any, deadline_s: float) -> FakeLease:
        return FakeLease(self, chain)

    def begin_store(
        self,
        chain: Any,
        start: int,
        stop: int,
        payload_bytes: int,
        deadline_s: float = 1.0,
        sight: Any = None,
    ) -> FakeWrite:
        self._maybe_refuse()
        assert len(chain) >= stop
        if self.crowded and deadline_s == 0.0:
            self.faults_fired += 1
            stop = start
        return FakeWrite(self, chain, start, stop, payload_bytes)

    def report(self, decision: Any) -> Any:
        self._maybe_refuse()
        self.reports.append(decision)
        return decision

    def _maybe_refuse(self) -> None:
        if self.refuse:
            self.faults_fired += 1
            raise OSError("no store today")


class FakeLease:
    def __init__(self, store: FakeStore, chain: Any) -> None:
        self.store, self.chain = store, chain

    def __enter__(self) -> FakeLease:
        self.store.leases += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.store.leases -= 1

    def __iter__(self) -> Iterator[FakeBlock]:
        for index, key in enumerate(self.chain.keys):
            if index == self.store.fail_load_at:
                self.store.faults_fired += 1
                return
            self.store.loads.append(index)
            # Handed out as a copy that is spoiled afterwards: whoever keeps a reference sees garbage.
            slot = bytearray(self.store.blocks[key])
            yield FakeBlock(index, memoryview(slot))
            slot[:] = b"\xff" * len(slot)


class FakeWrite:
    def __init__(self, store: FakeStore, chain: Any, start: int, stop: int, payload_bytes: int) -> None:
        self.store, self.payload_bytes = store, payload_bytes
        self.todo = [
            (index, chain.keys[index])
            for index in range(start, stop)
            if chain.keys[index] not in store.blocks
        ]
        self.filled: list[tuple[bytes, bytearray]] = []

    def __enter__(self) -> FakeWrite:
        self.store.writes += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.store.writes -= 1

    def __iter__(self) -> Iterator[FakeBlock]:
        for index, key in self.todo:
            slot = bytearray(self.payload_bytes)
            yield FakeBlock(index, memoryview(slot))
            self.filled.append((key, slot))

    def commit(self) -> int:
        self.store.blocks.update(self.filled)
        return len(self.filled)


@pytest.fixture
def fake_store() -> FakeStore:
    return FakeStore()


def _common(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    } | more


def _dense(**more: Any) -> dict[str, Any]:
    return _common(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        **more,
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_dense()),
    "qwen3": lambda: transformers.Qwen3Config(**_dense(head_dim=24)),
    "mistral-window": lambda: transformers.MistralConfig(**_dense(sliding_window=24)),
    "gemma2": lambda: transformers.Gemma2Config(
        **_dense(
            head_dim=32,
            sliding_window=24,
            query_pre_attn_scalar=32,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=None,
            tie_word_embeddings=False,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_dense(
            head_dim=32,
            sliding_window=24,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            tie_word_embeddings=False,
        )
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=512, n_embd=64, n_layer=3, n_head=4, eos_token_id=1, bos_token_id=2
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(
        **_common(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4)
    ),
    "falcon-mqa": lambda: transformers.FalconConfig(
        **_common(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, multi_query=True, alibi=False)
    ),
    "gpt-bigcode": lambda: transformers.GPTBigCodeConfig(
        vocab_size=VOCAB, n_positions=512, n_embd=64, n_layer=3, n_head=4, multi_query=True, eos_token_id=1,
        bos_token_id=2,
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **_dense(
            head_dim=16,
            sliding_window=24,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **_common(
            hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1,
            num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=24,
            kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=24,
        )
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function (family, seed) -> folder of a tiny random model, made once per session."""
    made: dict[tuple[str, int], Path] = {}

    def make(family: str = "llama", seed: int = 0) -> Path:
        if (family, seed) not in made:
            folder = tmp_path_factory.mktemp("models") / f"{family}-{seed}" / "tiny"
            torch.manual_seed(seed)
            # Wide weights make the answers of a random model vary from token to token.
            config = CONFIGS[family]()
            if hasattr(config, "initializer_range"):
                config.initializer_range = 0.2
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            model.save_pretrained(folder)
            made[family, seed] = folder
        return made[family, seed]

    return make


@pytest.fixture
def prompt() -> Callable[..., list[int]]:
    """A function (length, seed) -> token ids without special ones."""

    def make(length: int, seed: int = 0) -> list[int]:
        drawn = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
        return [int(one) for one in drawn]

    return make
