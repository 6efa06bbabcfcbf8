"""Which of an engine's blocks lie in which place, as routers should know it: pure bookkeeping.

A block counts as being in a place once every shard of it is there, and no longer once one is gone: so what a
router is told can be loaded. Nothing is told of blocks whose tokens this engine has not seen.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiercel.blocks import BlockKey
from tiercel.store import Event

_BLOCKS_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Described:
    """A block in vLLM's terms, as `BlockStored` wants it. `tokens` are those of the block alone."""

    block_hash: bytes
    parent_hash: bytes | None
    tokens: Sequence[int]
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """A block that came to a place, or left it."""

    stored: bool
    block: Described
    place: str


@dataclass(slots=True)
class _Row:
    block: Described
    keys: tuple[BlockKey, ...]
    places: dict[str, set[int]] = field(default_factory=dict)


class Ledger:
    """Belongs to one thread. Remembers the blocks noted last, a bounded number of them."""

    def __init__(self, shards: int, blocks_max: int = _BLOCKS_MAX) -> None:
        self._shards = shards
        self._blocks_max = blocks_max
        self._rows: OrderedDict[BlockKey, _Row] = OrderedDict()
        self._owner: dict[BlockKey, tuple[BlockKey, int]] = {}

    def note(self, keys: tuple[BlockKey, ...], block: Described) -> Iterator[Change]:
        """Learn what a block is, by its key on each shard. Forgetting the oldest may mean a change."""
        assert len(keys) == self._shards
        if keys[0] in self._rows:
            self._rows.move_to_end(keys[0])
            return
        self._rows[keys[0]] = _Row(block, keys)
        self._owner.update((key, (keys[0], shard)) for shard, key in enumerate(keys))
        while len(self._rows) > self._blocks_max:
            _, row = self._rows.popitem(last=False)
            for key in row.keys:
                self._owner.pop(key, None)
            yield from (Change(False, row.block, place) for place in self._whole(row))

    def happened(self, events: Iterable[Event]) -> Iterator[Change]:
        """Take in what the store tells."""
        for event in events:
            owner = self._owner.get(event.key)
            if owner is None:
                continue
            row, shard = self._rows[owner[0]], owner[1]
            there = row.places.setdefault(event.place, set())
            before = len(there)
            (there.add if event.stored else there.discard)(shard)
            if len(there) == self._shards and before < self._shards:
                yield Change(True, row.block, event.place)
            elif before == self._shards and len(there) < before:
                yield Change(False, row.block, event.place)

    def lost(self) -> Iterator[Change]:
        """Events were missed: nothing told so far is certain any more."""
        for row in self._rows.values():
            yield from (Change(False, row.block, place) for place in self._whole(row))
            row.places.clear()

    def again(self) -> Iterator[Change]:
        """All that was told and still holds, for who has forgotten it; a block after the one before it.

        Each is taken back first: who has not forgotten it, and counts, counts it once.
        """
        waiting = {row.block.block_hash: row for row in self._rows.values()}
        while waiting:
            chain = [next(iter(waiting.values()))]
            while (before := waiting.get(chain[-1].block.parent_hash or b"")) is not None:
                chain.append(before)
                del waiting[before.block.block_hash]
            waiting.pop(chain[0].block.block_hash, None)
            for row in reversed(chain):
                for place in self._whole(row):
                    yield Change(False, row.block, place)
                    yield Change(True, row.block, place)

    def _whole(self, row: _Row) -> list[str]:
        return [place for place, there in row.places.items() if len(there) == self._shards]
