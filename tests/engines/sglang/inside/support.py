"""One rank of an engine: SGLang's host pools, and the backend its factory makes for them."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache import hicache_storage as interface
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

from tiercel.engines.sglang import transfer
from tiercel.service import client, link

MHA, MLA = MHATokenToKVPoolHost, MLATokenToKVPoolHost
PAGES = 8
# What an engine rather does without than waits for, a test on a busy machine waits for: a daemon that cannot
# answer within a second would be a miss where a hit is expected, and then a pause.
PATIENT_S = 8.0
client._GRACE_S = link.CONNECT_S = transfer._SEARCH_S = PATIENT_S


def hashes(pages: int, what: str) -> list[str]:
    """Names as SGLang gives them."""
    return [sha256(f"{what} {page}".encode()).hexdigest() for page in range(pages)]


def mha(layout: str, dtype: torch.dtype, page_size: int, layers: int) -> Any:
    device = MHATokenToKVPool(
        size=PAGES * page_size, page_size=page_size, dtype=dtype, head_num=2, head_dim=64, layer_num=layers,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    return MHATokenToKVPoolHost(
        device._mha_buffer_info(), 1.0, 0, page_size, layout, pin_memory=False,
        device_capacity_tokens=PAGES * page_size, start_layer=0, end_layer=layers,
        host_token_capacity=PAGES * page_size,
    )  # fmt: skip


def mla(layout: str, dtype: torch.dtype, page_size: int, layers: int) -> Any:
    device = MLATokenToKVPool(
        size=PAGES * page_size, page_size=page_size, dtype=dtype, kv_lora_rank=192, qk_rope_head_dim=64,
        layer_num=layers, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    return MLATokenToKVPoolHost(
        device._mla_buffer_info(), 1.0, 0, page_size, layout, pin_memory=False,
        device_capacity_tokens=PAGES * page_size, start_layer=0, end_layer=layers, target_layer_num=layers,
        host_token_capacity=PAGES * page_size,
    )  # fmt: skip


def mamba() -> Any:
    states = MambaStateBufferInfo(
        temporal=torch.zeros((2, PAGES, 2, 16, 8), dtype=torch.float32),
        conv=(torch.zeros((2, PAGES, 96, 3), dtype=torch.bfloat16),),
    )
    return MambaPoolHost(states, 1.0, 0, device_capacity=PAGES, pin_memory=False, layout="page_first")


class Rig:
    """An engine's rank on the daemon at `socket` (None: a private one)."""

    def __init__(
        self,
        socket: Path | None,
        kind: Any = MHA,
        *,
        model: str = "org/model",
        revision: str | None = "1",
        layout: str = "layer_first",
        dtype: torch.dtype = torch.bfloat16,
        page_size: int = 4,
        layers: int = 2,
        tp_rank: int = 0,
        tp_size: int = 1,
        pp_size: int = 1,
        metrics: bool = False,
        mamba: bool = False,
        swa: bool = False,
        draft: bool = False,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.sglang = SimpleNamespace(**vars(interface))
        self.page_size = page_size
        self.pool = (mha if kind is MHA else mla)(layout, dtype, page_size, layers)
        self.page_bytes = page_size * self.pool.size_per_token
        options = {
            "backend_name": "tiercel",
            "module_path": "tiercel.engines.sglang",
            "class_name": "TiercelHiCache",
            "interface_v1": 1,
            "revision": revision,
            **({"daemon.socket": str(socket)} if socket else {}),
            **(extra or {}),
        }
        config = interface.HiCacheStorageConfig(
            tp_rank=tp_rank, tp_size=tp_size, pp_rank=0, pp_size=pp_size, attn_cp_rank=0, attn_cp_size=1,
            is_mla_model=kind is MLA, enable_storage_metrics=metrics,
            is_page_first_layout=layout == "page_first", model_name=model, extra_config=options,
        )  # fmt: skip
        self.backend = StorageBackendFactory.create_backend("dynamic", config, self.pool)
        self.backend.register_mem_pool_host(self.pool)
        self.backend.register_mem_host_pool_v2(self.pool, interface.PoolName.KV)
        if mamba:
            self.mamba = globals()["mamba"]()
            self.mamba.temporal_buffer.random_(0, 1000)
            self.backend.register_mem_host_pool_v2(self.mamba, interface.PoolName.MAMBA)
        for wanted, name in [(swa, interface.PoolName.SWA), (draft, interface.PoolName.DRAFT)]:
            if wanted:
                self.side = mha("page_first", dtype, page_size, layers)
                self.backend.register_mem_host_pool_v2(self.side, name)
        self.backend.on_host_pools_registered()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.close()

    def indices(self, *pages: int) -> torch.Tensor:
        """The host indices of these pages."""
        tokens = torch.arange(self.page_size)
        return torch.cat([tokens + page * self.page_size for page in pages]) if pages else tokens[:0]

    def fill(self, seed: int | None = None) -> None:
        """Random bytes in the whole KV pool; 0: zeros."""
        buffer = self.pool.kv_buffer.view(torch.int16)
        if seed == 0:
            buffer.zero_()
        else:
            made = torch.Generator().manual_seed(seed or 1)
            buffer.random_(generator=made)

    def content(self) -> list[bytes]:
        """The bytes of every page of the KV pool."""
        pages = (self.pool.get_data_page(page * self.page_size, flat=True) for page in range(PAGES))
        return [page.contiguous().view(torch.uint8).numpy().tobytes() for page in pages]

    def stored(self) -> int:
        """Blocks that the daemon's store took in so far."""
        return int(self.backend._store.stats().counters.stored)

    def flush(self) -> bool:
        """Write down what tiers should have."""
        return bool(self.backend._store.flush())

    def file_of(self, disk: Path, key: str) -> Path:
        """The file of a page in a directory of the files tier."""
        _, _, names = self.backend._at("kv")
        chain, _ = names.chain((), [key])
        name = chain.keys[0].hex()
        found = [path for path in disk.rglob("*") if path.is_file() and _named(path, name)]
        assert len(found) == 1, (name, [os.fspath(path) for path in disk.rglob("*")])
        return found[0]


def _named(path: Path, key: str) -> bool:
    return len(path.stem) >= 32 and key.endswith(path.stem)
