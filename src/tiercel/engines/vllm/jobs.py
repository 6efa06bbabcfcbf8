"""What scheduler and workers tell each other: plain data that vLLM carries along with its own.

A block is named here by vLLM's hash of its last engine block; each rank makes its own keys from that.
Tables hold vLLM's block ids per KV cache group, in token order; 0 is vLLM's null block: nothing there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tiercel.blocks import Identity
from tiercel.store import Sight

HASH_BYTES = 32
NULL_BLOCK = 0

Table = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Owner:
    """Who may see a request's blocks: the digest of its adapter, and its tenant's salt, which is a secret."""

    adapter: bytes | None = None
    salt: str | None = field(default=None, repr=False)


NOBODY = Owner()


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Blocks `start..stop-1` of a prompt go into engine blocks.

    The engine holds the first `skip_tokens` tokens of block `start` itself; the tables begin behind them.
    `hashes` are those of blocks 0..stop-1, joined. After `patience_s` it goes on only if it is faster than
    computing these blocks, which takes `compute_s`; what it has not brought by then is computed.
    """

    request: str
    hashes: bytes
    start: int
    skip_tokens: int
    tables: tuple[Table, ...]
    owner: Owner = NOBODY
    patience_s: float = math.inf
    compute_s: float = 0.0

    @property
    def stop(self) -> int:
        """One past the last block."""
        return len(self.hashes) // HASH_BYTES

    def worth_waiting(self, at: int, took_s: float) -> bool:
        """Whether blocks came faster than computed ones when `at` was reached after `took_s`."""
        return took_s * (self.stop - self.start) < self.compute_s * (at - self.start)


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Engine blocks become blocks `start..stop-1`; workers report `number` when they no longer read them.

    `sight` is what the request says of them; with `pin_s` the whole prefix is kept for so long.
    """

    number: int
    request: str
    hashes: bytes
    start: int
    tables: tuple[Table, ...]
    owner: Owner = NOBODY
    sight: Sight = Sight.NEW
    pin_s: float = 0.0

    @property
    def stop(self) -> int:
        """One past the last block."""
        return len(self.hashes) // HASH_BYTES


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one engine step. `identity` is that of shard 0.

    `idle`: no token is computed in it. `waiting`: for a lookup or for news to publish.
    """

    identity: Identity | None = None
    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    idle: bool = False
    waiting: bool = False


@dataclass(frozen=True, slots=True)
class Shard:
    """What one worker has registered: which part of the KV it holds and in which form.

    `layout` digests form and meaning of a block's bytes, `unit_bytes` is the payload of one scheduler block,
    `computed` says what computes (backend, device kind): it changes the last bits. `shape` is what codecs may
    know of the payload (`tiercel.codecs.shape`), empty if nothing.
    """

    number: int
    shards: int
    writes: bool
    layout: bytes
    unit_bytes: int
    computed: str
    scales: bytes | None = None
    shape: str = ""


@dataclass(slots=True)
class Done:
    """What workers finished since the last step: how many ended each save; requests not loaded whole."""

    saves: dict[int, int] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def merged(self, other: Done) -> Done:
        """This and another worker's report as one."""
        saves = dict(self.saves)
        for number, workers in other.saves.items():
            saves[number] = saves.get(number, 0) + workers
        return Done(saves, self.failed | other.failed)


def split_hashes(joined: bytes, size: int = HASH_BYTES) -> list[bytes]:
    """The single hashes of a job."""
    return [joined[at : at + size] for at in range(0, len(joined), size)]


def writable_from(tables: Sequence[Table], per_block: Sequence[int], blocks: int) -> int:
    """The first of `blocks` blocks from which on every group still has all its engine blocks.

    Groups with a window give up their oldest blocks; a block without one of its parts cannot be stored.
    `per_block[g]` engine blocks of group g make one block.
    """
    first = 0
    for table, count in zip(tables, per_block, strict=True):
        for at in range(min(blocks * count, len(table)) - 1, -1, -1):
            if table[at] == NULL_BLOCK:
                first = max(first, at // count + 1)
                break
    return first
