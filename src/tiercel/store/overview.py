"""What a person looks at: figures, whose blocks lie where, what prompts share, faults, decisions.

Plain data that names scopes and prefixes by short digests: no token, text, salt or session. Looking is
bounded: under the store's lock only a few hundred blocks are looked at in one go, and what is found there is
kept for a moment, however many look.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tiercel.blocks import TAG_BYTES, BlockKey, Chain, record_bytes
from tiercel.store.figures import RAM, Fault, StoreStats
from tiercel.store.policy import Decision, as_json
from tiercel.store.ram import State
from tiercel.store.scopes import label_of

if TYPE_CHECKING:
    from tiercel.store.store import TieredStore

LIMIT_MAX = 256
_KEPT_S = 3.0
# The latest blocks that others followed, half a million tokens in blocks of 256: those are looked at for what
# prompts share. With one tier that takes 7 ms, with eight 22; the lock is never held for a millisecond.
_LINKS_MAX = 2048
_AT_ONCE = 128
_SCOPES_MAX = 256
_SHORT_BYTES = 6

Links = Mapping[BlockKey, Sequence[BlockKey]]


@dataclass(frozen=True, slots=True)
class ScopeUse:
    """What a scope holds, by place. `tag` is hex; the names are empty where they are not known (yet)."""

    tag: str
    model: str
    adapter: str
    salt: str
    blocks: dict[str, int] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A run of blocks that no other prompt branches off within; `prefix` names it and all before it.

    It begins at block `start`, below the node `parent` (empty: none), `level` nodes deep. `blocks` and
    `nbytes` by place are its own, `below` counts the cached blocks of all its descendants.
    """

    prefix: str
    parent: str
    tag: str
    level: int
    start: int
    length: int
    blocks: dict[str, int]
    nbytes: dict[str, int]
    below: int
    branches: int


@dataclass(frozen=True, slots=True)
class Overview:
    """A store at `at_s` (Unix time). Prefixes come parents first; faults and decisions latest first.

    Scopes come largest first; `more_scopes` are not shown.
    """

    at_s: float
    stats: StoreStats
    scopes: tuple[ScopeUse, ...] = ()
    more_scopes: int = 0
    prefixes: tuple[PrefixNode, ...] = ()
    faults: tuple[Fault, ...] = ()
    decisions: tuple[Decision, ...] = ()


def overview_json(overview: Overview) -> dict[str, Any]:
    """An overview for people's programs: plain values."""
    told = asdict(overview)
    told["decisions"] = [as_json(one) for one in overview.decisions]
    told["stats"]["faults"] = len(overview.stats.faults)
    told["stats"]["left"] = overview.stats.left
    told["stats"]["requests"]["hit_rate"] = overview.stats.requests.hit_rate
    for shown, tier in zip(told["stats"]["tiers"], overview.stats.tiers, strict=True):
        shown["left"] = tier.left
    return told


class Watch:
    """Looks at one store for people. Thread-safe."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._looked_s = -_KEPT_S
        self._scopes: tuple[list[ScopeUse], int] = ([], 0)
        self._prefixes: list[PrefixNode] = []
        self._paths: dict[str, tuple[BlockKey, ...]] = {}

    def overview(self, limit: int) -> Overview:
        """At most `limit` of everything."""
        limit = max(1, min(limit, LIMIT_MAX))
        stats = self._store.stats()
        with self._lock:
            self._look()
            (scopes, in_all), prefixes = self._scopes, self._prefixes[:limit]
        return Overview(
            at_s=time.time(),
            stats=stats,
            scopes=tuple(scopes[:limit]),
            more_scopes=max(0, in_all - limit),
            prefixes=tuple(prefixes),
            faults=stats.faults[:limit],
            decisions=tuple(self._store.reports.latest(limit)),
        )

    def chain_of(self, prefix: str) -> Chain | None:
        """The blocks from a prompt's beginning to the end of a prefix that was shown."""
        with self._lock:
            keys = self._paths.get(prefix)
        if not keys:
            return None
        with self._store.lock:
            named = self._store.scopes.get(keys[0][:TAG_BYTES])
        return None if named is None else Chain(*named, keys)

    def _look(self) -> None:
        if time.monotonic() - self._looked_s < _KEPT_S:
            return
        self._scopes = self._used()
        with self._store.lock:
            links = dict(self._store.family.latest(_LINKS_MAX))
        keys = {key for parent, after in links.items() for key in (parent, *after)}
        where = self._where(keys - self._cut(links))
        self._prefixes, self._paths = tree(links, where)
        self._looked_s = time.monotonic()

    def _cut(self, links: Links) -> set[BlockKey]:
        """Blocks that follow nothing here and begin no prompt: of some only the end is among the latest."""
        followers = {one for after in links.values() for one in after}
        first = [key for key in links if key not in followers]
        with self._store.lock:
            return {key for key in first if not self._store.scopes.begins(key)}

    def _used(self) -> tuple[list[ScopeUse], int]:
        store = self._store
        slot_bytes = store.arena.slot_bytes
        with store.lock:
            held = [(RAM, tag, blocks, blocks * slot_bytes) for tag, blocks in store.ram.scopes(_SCOPES_MAX)]
            counts = [store.ram.scope_count]
        for index, name in store.below.indexes():
            with store.lock:
                held += [(name, tag, blocks, nbytes) for tag, blocks, nbytes in index.scopes(_SCOPES_MAX)]
                counts.append(index.scope_count)
        tags = {tag for _, tag, _, _ in held}
        with store.lock:
            infos = {tag: store.scopes.get(tag) for tag in tags}
        rows: dict[bytes, ScopeUse] = {}
        for place, tag, blocks, nbytes in held:
            if tag not in rows:
                label = label_of((infos[tag] or (b"", b""))[1])
                rows[tag] = ScopeUse(tag.hex(), label.model, label.adapter, label.salt)
            rows[tag].blocks[place] = blocks
            rows[tag].nbytes[place] = nbytes
        largest = sorted(rows.values(), key=lambda row: (-sum(row.nbytes.values()), row.tag))
        return largest, max(len(rows), *counts)

    def _where(self, keys: Iterable[BlockKey]) -> dict[BlockKey, dict[str, int]]:
        """The bytes of each block by place, of those that are anywhere."""
        store, asked, found = self._store, list(keys), {}
        for start in range(0, len(asked), _AT_ONCE):
            with store.lock:
                indexes = list(store.below.indexes())
                for key in asked[start : start + _AT_ONCE]:
                    places: dict[str, int] = {}
                    entry = store.ram.get(key)
                    if entry is not None and entry.state is State.READY and not entry.staged:
                        places[RAM] = record_bytes(entry.payload_bytes)
                    for index, name in indexes:
                        if (nbytes := index.bytes_of(key)) is not None:
                            places[name] = nbytes
                    if places:
                        found[key] = places
        return found


@dataclass(slots=True)
class _Run:
    """A node while the tree is made."""

    keys: list[BlockKey]
    parent: int
    level: int
    start: int
    below: int = 0
    children: list[int] = field(default_factory=list)


def tree(
    links: Links, where: Mapping[BlockKey, Mapping[str, int]], nodes_max: int = LIMIT_MAX
) -> tuple[list[PrefixNode], dict[str, tuple[BlockKey, ...]]]:
    """The largest runs of cached blocks as a tree, parents first, and by name all blocks up to a run's end.

    `links` says which blocks followed which, `where` the bytes of cached blocks by place.
    """
    runs = _runs(links, where)
    for run in reversed(runs):
        if run.parent >= 0:
            runs[run.parent].below += run.below + len(run.keys)
    nodes: list[PrefixNode] = []
    paths: dict[str, tuple[BlockKey, ...]] = {}
    for at in _largest(runs, nodes_max):
        run = runs[at]
        name, parent = _short(run.keys[-1]), _short(runs[run.parent].keys[-1]) if run.parent >= 0 else ""
        paths[name] = (*paths.get(parent, ()), *run.keys)
        blocks: dict[str, int] = {}
        nbytes: dict[str, int] = {}
        for key in run.keys:
            for place, size in where[key].items():
                blocks[place] = blocks.get(place, 0) + 1
                nbytes[place] = nbytes.get(place, 0) + size
        tag = run.keys[0][:TAG_BYTES].hex()
        nodes.append(
            PrefixNode(
                name, parent, tag, run.level, run.start, len(run.keys), blocks, nbytes, run.below,
                len(run.children),
            )
        )  # fmt: skip
    return nodes, paths


def _runs(links: Links, cached: Container[BlockKey]) -> list[_Run]:
    """The forest of runs, parents first. What lies behind a block that is gone is of no use: left out."""
    followers = {one for after in links.values() for one in after}
    runs: list[_Run] = []
    todo = [(key, -1, 0, 0) for key in links if key not in followers and key in cached]
    seen: set[BlockKey] = set()

    def following(key: BlockKey) -> list[BlockKey]:
        # Keys that a client made up may go in circles.
        return [one for one in dict.fromkeys(links.get(key, ())) if one in cached and one not in seen]

    while todo:
        key, parent, level, start = todo.pop()
        keys = [key]
        while len(after := following(keys[-1])) == 1:
            keys.append(after[0])
            seen.add(after[0])
        number = len(runs)
        runs.append(_Run(keys, parent, level, start))
        if parent >= 0:
            runs[parent].children.append(number)
        seen.update(after)
        todo += [(one, number, level + 1, start + len(keys)) for one in after]
    return runs


def _largest(runs: Sequence[_Run], nodes_max: int) -> list[int]:
    """The runs to show, each below its parent and after it, larger subtrees first."""

    def size(at: int) -> tuple[int, int]:
        return -(runs[at].below + len(runs[at].keys)), at

    heap = [size(at) for at, run in enumerate(runs) if run.parent < 0]
    heapq.heapify(heap)
    chosen: set[int] = set()
    while heap and len(chosen) < nodes_max:
        _, at = heapq.heappop(heap)
        chosen.add(at)
        for child in runs[at].children:
            heapq.heappush(heap, size(child))
    shown: list[int] = []
    todo = sorted((at for at in chosen if runs[at].parent < 0), key=size, reverse=True)
    while todo:
        at = todo.pop()
        shown.append(at)
        todo += sorted((one for one in runs[at].children if one in chosen), key=size, reverse=True)
    return shown


def _short(key: BlockKey) -> str:
    return key[TAG_BYTES : TAG_BYTES + _SHORT_BYTES].hex()
