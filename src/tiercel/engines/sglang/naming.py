"""Names of pages: which identity a rank's KV has, and the keys made from SGLang's chained page hashes.

SGLang names a page by a SHA-256 over its tokens and the page before it. Which model, weights, number
formats, layout and rank the bytes belong to is ours to add. Nothing of it depends on the process, the
folder's place or Python's `hash`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from tiercel.blocks import Chain, Identity, Scope
from tiercel.blocks.framing import frame
from tiercel.engines.sglang.pages import Pages
from tiercel.engines.sglang.server import Server

KV_POOL = "kv"
_LAYOUT = "sglang-1"
_NAME_CHARS_MAX = 1024
# A daemon's message holds the keys of a chain: of a longer prefix only the end is told.
_BEFORE_MAX = 4096
# Pools beside KV that hold the same bytes on every tensor-parallel rank of a model that SGLang calls MLA.
_SAME_ON_ALL_RANKS = (
    "MLATokenToKVPoolHost",
    "DSAIndexerPoolHost",
    "QSAIndexerPoolHost",
    "DeepSeekV4PagedHostPool",
    "DeepSeekV4StateHostPool",
)


@dataclass(frozen=True, slots=True)
class Rank:
    """Which part of the model's KV this process holds, as SGLang says."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    same_on_all: bool

    @classmethod
    def of(cls, config: Any) -> Rank:
        """Read a `HiCacheStorageConfig`."""
        return cls(
            config.tp_rank,
            config.tp_size,
            config.pp_rank,
            config.pp_size,
            config.attn_cp_rank,
            config.attn_cp_size,
            config.is_mla_model,
        )

    def shard(self, *, shared: bool) -> tuple[int, int]:
        """Number and count of distinct parts; `shared`: tensor-parallel ranks hold the same."""
        stage = self.pp_rank * self.cp_size + self.cp_rank
        stages = self.pp_size * self.cp_size
        return (stage, stages) if shared else (stage * self.tp_size + self.tp_rank, stages * self.tp_size)


@dataclass(frozen=True, slots=True)
class Named:
    """How pages of one kind are called and cut in a store: `parts` blocks of `part_bytes` for each."""

    scope: Scope
    page_bytes: int
    part_bytes: int
    parts: int

    def chain(self, before: Sequence[str], keys: Sequence[str]) -> tuple[Chain, int]:
        """The chain that ends with the pages `keys`, and the number of their first block."""
        before = before[-_BEFORE_MAX:]
        hashes = [key.encode("utf-8", "surrogatepass") for key in (*before, *keys)]
        if self.parts > 1:
            hashes = [b"%b#%d" % (one, part) for one in hashes for part in range(self.parts)]
        return self.scope.rechain(hashes), len(before) * self.parts


def base_identity(name: str | None, revision: str, rank: Rank, server: Server, device: str) -> Identity:
    """What all pools of an engine's KV have in common."""
    called = name or (server.model or ("unnamed",))[0]
    if len(called) > _NAME_CHARS_MAX:
        digest = blake2b(called.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        called = f"{called[: _NAME_CHARS_MAX - len(digest) - 1]}~{digest}"
    ranks = f"tp{rank.tp_size}pp{rank.pp_size}cp{rank.cp_size}"
    return Identity(
        model=called,
        revision=revision,
        kv_dtype="",
        geometry=server.computes,
        layout=f"{_LAYOUT}+{ranks}+{device}+{server.releases}",
        block_tokens=1,
    )


def identity_of(base: Identity, rank: Rank, pool: Any, name: str, pages: Pages) -> Identity:
    """The identity of one pool's pages on this rank."""
    shared = rank.same_on_all and (name == KV_POOL or type(pool).__name__ in _SAME_ON_ALL_RANKS)
    shard, shards = rank.shard(shared=shared)
    form = frame(base.geometry, name, pages.form)
    return replace(
        base,
        kv_dtype=str(pool.dtype).removeprefix("torch."),
        geometry=blake2b(form, digest_size=32, person=b"tiercel-sgl-pool").digest(),
        layout=f"{base.layout}+{name}",
        block_tokens=pages.page_tokens,
        shard=shard,
        shards=shards,
    )


def named(identity: Identity, page_bytes: int, slot_bytes: int) -> Named:
    """How pages of `page_bytes` are named in a store whose slots hold `slot_bytes` of payload."""
    parts = -(-page_bytes // slot_bytes)
    part_bytes = -(-page_bytes // parts)
    layout = f"{identity.layout}+{page_bytes}/{part_bytes}"
    return Named(Scope(replace(identity, layout=layout)), page_bytes, part_bytes, parts)
