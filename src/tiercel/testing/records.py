"""Sealed records for tests of tiers: small, page aligned, each recognisable by its bytes."""

from __future__ import annotations

import mmap
import time

from tiercel.blocks import BlockKey, Chain, Identity, Scope, payload_of, record_bytes, seal

PAYLOAD_BYTES = 8192
RECORD_BYTES = record_bytes(PAYLOAD_BYTES)


def identity(model: str = "model") -> Identity:
    """What names a made-up model of tiny blocks."""
    return Identity(
        model=model, revision="r1", kv_dtype="bfloat16", geometry=bytes(16), layout="test-1", block_tokens=4
    )


def chain(blocks: int = 8, *, model: str = "model", salt: str | None = None, first: int = 0) -> Chain:
    """A chain of `blocks` blocks; `first` is its first token, so that chains differ."""
    return Scope(identity(model), salt=salt).chain(range(first, first + 4 * blocks))


def buffer(size_bytes: int = RECORD_BYTES) -> memoryview:
    """Page-aligned memory, as an arena slot is."""
    return memoryview(mmap.mmap(-1, size_bytes))


def record(
    chain: Chain, index: int = 0, *, fill: int | None = None, payload_bytes: int = PAYLOAD_BYTES
) -> memoryview:
    """Block `index` of `chain`, sealed, its payload filled with one byte value."""
    made = buffer(record_bytes(payload_bytes))
    payload_of(made, payload_bytes)[:] = bytes([(index if fill is None else fill) % 256]) * payload_bytes
    seal(made, chain, index, payload_bytes, time.time_ns())
    return made


def records(chain: Chain) -> tuple[list[BlockKey], list[memoryview]]:
    """Every block of `chain`, sealed, with its key."""
    return list(chain.keys), [record(chain, index) for index in range(len(chain))]
