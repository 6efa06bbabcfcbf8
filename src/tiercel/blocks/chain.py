"""Block keys: 32 bytes that name a whole prefix, the same in every process for ever.

    key_i = tag (8 bytes of the scope) + blake2b-192(key_{i-1} | token ids of block i | media in block i)

The parent of block 0 is the scope's root, so a key covers model, weights, dtype, layout, adapter,
salt and every token and picture before it. Python's `hash()` is never involved.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NewType

from tiercel.blocks.framing import frame
from tiercel.errors import RequestError

BlockKey = NewType("BlockKey", bytes)
KEY_BYTES = 32
_DIGEST_BYTES = 24
_TOKEN_BYTES = 4
_MEDIA_DIGEST_BYTES_MIN = 16
assert array("I").itemsize == _TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Media:
    """A picture, sound or video that stands in the prompt as placeholder tokens `start..start+length-1`.

    `digest` is a cryptographic digest of its content, 16 bytes or more: shorter ones collide.
    """

    start: int
    length: int
    digest: bytes

    def __post_init__(self) -> None:
        if self.start < 0 or self.length < 1:
            raise RequestError(f"media span {self.start}+{self.length} is empty or negative")
        if len(self.digest) < _MEDIA_DIGEST_BYTES_MIN:
            raise RequestError(
                f"media digest has {len(self.digest)} bytes; accepted are {_MEDIA_DIGEST_BYTES_MIN} or more"
            )


@dataclass(frozen=True, slots=True)
class Chain:
    """The keys of a prompt's full blocks, in order, with the scope they belong to."""

    root: bytes
    info: bytes
    keys: tuple[BlockKey, ...]

    def __len__(self) -> int:
        return len(self.keys)

    def prefix(self, blocks: int) -> Chain:
        """The chain of the first `blocks` blocks."""
        return Chain(self.root, self.info, self.keys[:blocks])

    def __getitem__(self, part: slice) -> Chain:
        if part.start not in (None, 0) or part.step not in (None, 1):
            raise ValueError("a chain can only be cut to a prefix")
        return Chain(self.root, self.info, self.keys[part])


def chain_keys(
    root: bytes, tag: bytes, tokens: Sequence[int], block_tokens: int, media: tuple[Media, ...]
) -> tuple[BlockKey, ...]:
    """Chain the keys of all full blocks of `tokens` (see the module's formula).

    A 32k-token prompt takes about 0.4 ms: the token ids are packed once and hashed from there.
    """
    packed = _pack(tokens)
    step = block_tokens * _TOKEN_BYTES
    parent = root
    keys: list[BlockKey] = []
    for offset in range(0, len(packed) - step + 1, step):
        hashed = blake2b(parent, digest_size=_DIGEST_BYTES, person=b"tiercel-block")
        hashed.update(packed[offset : offset + step])
        if media:
            hashed.update(_media_in(offset // _TOKEN_BYTES, block_tokens, media))
        parent = tag + hashed.digest()
        keys.append(BlockKey(parent))
    return tuple(keys)


def rechain_keys(root: bytes, tag: bytes, hashes: Sequence[bytes]) -> tuple[BlockKey, ...]:
    """Name blocks by an engine's own chained hashes, each of which covers the whole prefix it ends.

    key_i = tag + blake2b-192(root | hash_i): the engine's hash says which tokens, salt and media, the root
    which model, weights and layout. The hashes must be cryptographic. About 1 µs each.
    """
    named = (blake2b(root + one, digest_size=_DIGEST_BYTES, person=b"tiercel-rechain") for one in hashes)
    return tuple(BlockKey(tag + one.digest()) for one in named)


def _pack(tokens: Sequence[int]) -> memoryview:
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError, ValueError) as fault:
        raise RequestError(f"token ids must be whole numbers from 0 to 4294967295: {fault}") from None
    if sys.byteorder != "little":
        packed.byteswap()
    return memoryview(packed).cast("B")


def _media_in(first: int, block_tokens: int, media: tuple[Media, ...]) -> bytes:
    """Frame the media that touch tokens `first..first+block_tokens-1`, positions relative to the block.

    Tokens fill a fixed number of bytes, so what follows them cannot be mistaken for tokens; a block
    without media adds nothing, which keeps text-only keys equal with and without a media list.
    """
    touching = [one for one in media if one.start < first + block_tokens and first < one.start + one.length]
    touching.sort(key=lambda one: (one.start, one.length, one.digest))
    return b"".join(frame(one.start - first, one.length, one.digest) for one in touching)
