"""Names of blocks: which identity an engine's KV has, and the keys a rank makes from vLLM's hashes.

The scheduler decides the identity, from the configuration and from what every worker says it registered;
workers get it with their work. Nothing of it depends on the process, the folder's place or Python's `hash`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from tiercel.blocks import BlockKey, Chain, Identity, Scope
from tiercel.engines.vllm.jobs import HASH_BYTES, NOBODY, Owner, Shard, split_hashes
from tiercel.engines.weights import model_revision
from tiercel.geometry.digest import config_fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PAYLOAD_BYTES_MIN = 1 << 20
_LAYOUT = "vllm-1"
_REQUESTS_KEPT = 256
_SCOPES_KEPT = 1024
_SALT_CHARS_MAX = 4096


def units_per_block(unit_bytes: int, slot_bytes: int | None = None) -> int:
    """How many of vLLM's scheduler blocks make one block: the fewest with 1 MiB, within what a slot holds."""
    wanted = max(1, -(-PAYLOAD_BYTES_MIN // unit_bytes))
    return wanted if slot_bytes is None else max(1, min(wanted, slot_bytes // unit_bytes))


def identity_of(config: VllmConfig, shards: Mapping[int, Shard], block_tokens: int) -> Identity:
    """The identity of the first shard's blocks; it covers what all of the `shards`, by number, registered.

    Reads the model's weight files (remembered from then on). Raises ModelError or EngineError when they
    cannot be found.
    """
    model = config.model_config
    # Served names are aliases; the digest of the weights is what tells models apart.
    name = Path(model.model).name if Path(model.model).exists() else str(model.model)
    revision = model_revision(str(model.model), model.revision, config.load_config.load_format)
    meaning = blake2b(digest_size=32, person=b"tiercel-vllm-geo")
    layouts = [shards[number].layout for number in sorted(shards)]
    for one in (config_fingerprint(model.hf_config.to_dict()), _speculation(config), *layouts):
        meaning.update(len(one).to_bytes(4, "little") + one)
    first = shards[min(shards)]
    return Identity(
        model=name,
        revision=revision,
        kv_dtype=str(config.cache_config.cache_dtype),
        geometry=meaning.digest(),
        layout=f"{_LAYOUT}+{_computed(config)}+{first.computed}",
        block_tokens=block_tokens,
        shard=first.number,
        shards=first.shards,
        scales=first.scales,
    )


def _computed(config: VllmConfig) -> str:
    """What computes, as far as the configuration says: it changes the last bits, and a hit must not."""
    model, parallel = config.model_config, config.parallel_config
    dtype = str(model.dtype).removeprefix("torch.")
    ranks = f"tp{parallel.tensor_parallel_size}pp{parallel.pipeline_parallel_size}"
    how = "eager" if model.enforce_eager else "compiled"
    return f"{dtype}+{model.quantization or 'plain'}+{ranks}+{how}"


def _speculation(config: VllmConfig) -> bytes:
    """Draft layers are cached too: what drafts is part of what their bytes mean."""
    draft = config.speculative_config
    if draft is None or draft.draft_model_config is None:
        return b""
    fingerprint = config_fingerprint(draft.draft_model_config.hf_config.to_dict())
    return f"{draft.method}+{draft.draft_model_config.model}".encode() + fingerprint


class Names:
    """The scopes of one rank: identity and owner to keys. Thread-safe; remembers those used last."""

    def __init__(self, identity: Identity, hash_bytes: int = HASH_BYTES) -> None:
        self.identity = identity
        self._hash_bytes = hash_bytes
        self._scopes: OrderedDict[Owner, Scope] = OrderedDict()
        self._known: OrderedDict[tuple[str, Owner], tuple[bytes, tuple[BlockKey, ...]]] = OrderedDict()
        self._lock = threading.Lock()

    def scope(self, owner: Owner) -> Scope:
        """The scope of an adapter's digest as a tenant's salt sees it."""
        with self._lock:
            found = self._scopes.pop(owner, None)
            if found is None:
                found = Scope(self.identity, adapter=owner.adapter, salt=_bounded(owner.salt))
            self._scopes[owner] = found
            while len(self._scopes) > _SCOPES_KEPT:
                self._scopes.popitem(last=False)
            return found

    def scopes(self) -> list[Scope]:
        """The scopes used last, that of the bare model among them."""
        self.scope(NOBODY)
        with self._lock:
            return list(self._scopes.values())

    def chain(self, request: str, hashes: bytes, owner: Owner) -> Chain:
        """Name all blocks of a prompt. A request's hashes only ever grow, so only new ones are worked on."""
        scope = self.scope(owner)
        with self._lock:
            joined, keys = self._known.pop((request, owner), (b"", ()))
        if not hashes.startswith(joined):
            # Shorter than last time (or another request of that name): a prefix of what is known, or nothing.
            keys = keys[: len(hashes) // self._hash_bytes] if joined.startswith(hashes) else ()
        chain = scope.rechain(split_hashes(hashes[len(keys) * self._hash_bytes :], self._hash_bytes), keys)
        with self._lock:
            self._known[request, owner] = (hashes, chain.keys)
            while len(self._known) > _REQUESTS_KEPT:
                self._known.popitem(last=False)
        return chain


def _bounded(salt: str | None) -> str | None:
    """A salt that a scope takes: vLLM accepts any length."""
    if salt is None or len(salt) <= _SALT_CHARS_MAX:
        return salt
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32, person=b"tiercel-long").hexdigest()


def names_of_shards(identity: Identity, shards: Mapping[int, Shard]) -> list[Names]:
    """One `Names` per distinct shard; they differ in number and scales."""
    return [
        Names(dataclasses.replace(identity, shard=number, scales=shard.scales))
        for number, shard in sorted(shards.items())
    ]
