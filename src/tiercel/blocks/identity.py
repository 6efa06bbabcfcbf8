"""What must be equal for two runs of KV bytes to be interchangeable, and the names made from it.

`Identity` says which model, weights and byte layout the bytes belong to; `Scope` adds who may see
them (adapter, tenant salt). A scope hashes once to 32 bytes, its root, from which every block key
of the scope is chained. Nothing here touches a disk, a tensor or a clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from tiercel.blocks.chain import BlockKey, Chain, Media, chain_keys, rechain_keys
from tiercel.blocks.framing import frame
from tiercel.errors import RequestError

TAG_BYTES = 8
ROOT_BYTES = 32
_NAME_CHARS_MAX = 1024
_SALT_CHARS_MAX = 4096
_KEY_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything that must match before a byte of KV may be reused.

    `revision` is the weights version (a digest of the weights where nothing better is known),
    `geometry` the digest of `KVGeometry` (shapes and position encoding), `layout` the engine's name
    and version of the payload layout, `shard`/`shards` which part of the heads or layers this is.
    `scales` is the digest of KV quantisation scales kept outside the payload, if any. `lossy` marks blocks
    that may come back nearly equal, and says how (`tiercel.codecs.mark`): they never meet exact ones.
    """

    model: str
    revision: str
    kv_dtype: str
    geometry: bytes
    layout: str
    block_tokens: int
    shard: int = 0
    shards: int = 1
    scales: bytes | None = None
    lossy: str | None = None

    def __post_init__(self) -> None:
        if not self.model or len(self.model) > _NAME_CHARS_MAX:
            raise RequestError(
                f"model name has {len(self.model)} characters; accepted are 1 to {_NAME_CHARS_MAX}"
            )
        if self.block_tokens < 1:
            raise RequestError(f"block_tokens is {self.block_tokens}; accepted is 1 or more")
        if not 0 <= self.shard < self.shards:
            raise RequestError(f"shard {self.shard} is outside 0..{self.shards - 1}")

    def describe(self) -> dict[str, str | int]:
        """The identity as plain values for record headers and listings (digests as hex)."""
        shown: dict[str, str | int] = {
            "model": self.model,
            "revision": self.revision,
            "kv_dtype": self.kv_dtype,
            "geometry": self.geometry.hex(),
            "layout": self.layout,
            "block_tokens": self.block_tokens,
            "shard": self.shard,
            "shards": self.shards,
        }
        if self.scales is not None:
            shown["scales"] = self.scales.hex()
        if self.lossy is not None:
            shown["lossy"] = self.lossy
        return shown


@dataclass(frozen=True, slots=True)
class Scope:
    """An identity as one tenant and adapter see it: the unit of isolation, listing and clearing."""

    identity: Identity
    adapter: bytes | None = None
    salt: str | None = None
    root: bytes = field(init=False, compare=False)
    info: bytes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if self.salt is not None and len(self.salt) > _SALT_CHARS_MAX:
            raise RequestError(
                f"cache salt has {len(self.salt)} characters; accepted are up to {_SALT_CHARS_MAX}"
            )
        object.__setattr__(self, "root", self._digest())
        object.__setattr__(self, "info", self._info())

    @property
    def tag(self) -> bytes:
        """The first 8 bytes of every key of this scope: lets a tier group and clear by scope."""
        return self.root[:TAG_BYTES]

    def chain(self, tokens: Sequence[int], media: Iterable[Media] = ()) -> Chain:
        """Name the full blocks of `tokens`; a trailing partial block has no name.

        Raises `RequestError` for a token id outside 0..2^32-1 or a malformed `media` span.
        """
        keys = chain_keys(self.root, self.tag, tokens, self.identity.block_tokens, tuple(media))
        return Chain(root=self.root, info=self.info, keys=keys)

    def rechain(self, hashes: Sequence[bytes], parents: Sequence[BlockKey] = ()) -> Chain:
        """Name blocks by an engine's own chained hashes, one each, following the keys of their `parents`."""
        keys = (*parents, *rechain_keys(self.root, self.tag, hashes))
        return Chain(root=self.root, info=self.info, keys=keys)

    def _digest(self) -> bytes:
        one = self.identity
        fields = frame(
            "tiercel-scope", _KEY_FORMAT, one.model, one.revision, one.kv_dtype, one.geometry, one.layout,
            one.block_tokens, one.shard, one.shards, one.scales, self.adapter, self.salt,
        )  # fmt: skip
        if one.lossy is not None:
            fields += frame("lossy", one.lossy)
        return blake2b(fields, digest_size=ROOT_BYTES, person=b"tiercel-scope").digest()

    def _info(self) -> bytes:
        shown = self.identity.describe()
        if self.adapter is not None:
            shown["adapter"] = self.adapter.hex()
        if self.salt is not None:
            # A salt is a secret of the tenant: listings show only a short digest of it.
            salt = self.salt.encode("utf-8", "surrogatepass")
            shown["salt"] = blake2b(salt, digest_size=4, person=b"tiercel-salt").hexdigest()
        return json.dumps(shown, separators=(",", ":")).encode()
