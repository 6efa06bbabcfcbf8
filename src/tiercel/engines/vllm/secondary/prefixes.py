"""The order of a request's chunks, which vLLM's calls do not have: they name single chunks.

A chunk is worth nothing without those before it, and the store keeps and evicts by that. vLLM notes for each
key of a request where in the prompt it ends, group by group from the beginning; from that the prefix of any
chunk is put together, also of chunks whose beginning lies in faster tiers and is never asked for here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from tiercel.engines.vllm.jobs import HASH_BYTES

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext

# vLLM's hash of the chunk's last block, and the number of the KV cache group.
KEY_BYTES = HASH_BYTES + 4


@dataclass(frozen=True, slots=True)
class Run:
    """Chunks `start..stop-1` of a prompt in one group. `keys` are those of chunks 0..stop-1, joined."""

    request: str
    group: bytes
    keys: bytes
    start: int

    @property
    def stop(self) -> int:
        """One past the last chunk."""
        return len(self.keys) // KEY_BYTES

    def key(self, chunk: int) -> bytes:
        """The key of one chunk."""
        return self.keys[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES]


class Prefixes:
    """The keys of one request, each group's in order. Belongs to the scheduler's thread."""

    def __init__(self, context: ReqContext) -> None:
        self._request = context.req_id
        self._positions: dict[OffloadKey, int] = getattr(context, "_offload_key_positions", {})
        self._seen = 0
        self._joined: dict[bytes, bytearray] = {}
        self._at: dict[bytes, int] = {}

    def runs(self, keys: Collection[OffloadKey]) -> list[Run]:
        """`keys` as runs of neighbours, first chunks first."""
        self._learn()
        places: dict[bytes, list[int]] = {}
        for key in keys:
            places.setdefault(key[HASH_BYTES:], []).append(self._place(key))
        return [
            Run(self._request, group, bytes(self._joined[group][: stop * KEY_BYTES]), start)
            for group, chunks in sorted(places.items())
            for start, stop in _neighbours(sorted(chunks))
        ]

    def _learn(self) -> None:
        if len(self._positions) > self._seen:
            for key in islice(self._positions, self._seen, None):
                self._place(key)
            self._seen = len(self._positions)

    def _place(self, key: bytes) -> int:
        at = self._at.get(key)
        if at is None:
            joined = self._joined.setdefault(key[HASH_BYTES:], bytearray())
            at = self._at[key] = len(joined) // KEY_BYTES
            joined += key
        return at


def _neighbours(chunks: list[int]) -> Iterator[tuple[int, int]]:
    start = before = chunks[0]
    for chunk in chunks[1:]:
        if chunk > before + 1:
            yield start, before + 1
            start = chunk
        before = chunk
    yield start, before + 1
