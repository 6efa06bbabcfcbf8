"""`TiercelHiCache`: SGLang's HiCache storage interface, on the store of a daemon.

SGLang makes one in every scheduler process and calls it from its prefetch and backup threads. This module
only translates: what SGLang calls to pages, names and transfers. No call raises once the backend is attached:
what goes wrong is a miss, or a page not kept.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import sglang  # type: ignore[import-not-found]  # optional
import torch
from sglang.srt.mem_cache.hicache_storage import (  # type: ignore[import-not-found]  # optional
    HiCacheStorage,
    PoolHitPolicy,
    PoolTransferResult,
)

from tiercel.blocks import Identity
from tiercel.config import human_bytes
from tiercel.config.export import exported
from tiercel.engines.sglang.naming import KV_POOL, Named, Rank, base_identity, identity_of
from tiercel.engines.sglang.pages import Run, pages_of, tensor_run
from tiercel.engines.sglang.pools import Pool
from tiercel.engines.sglang.server import this_server
from tiercel.engines.sglang.stats import Tally
from tiercel.engines.sglang.support import check_ranks, check_version, read
from tiercel.engines.sglang.transfer import Transfer
from tiercel.errors import DaemonError
from tiercel.service import RemoteStore, connect

log = logging.getLogger("tiercel")
# A larger page is kept in parts: slots are all of one size.
_SLOT_BYTES_MAX = 16 << 20


class TiercelHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang is optional, so untyped here
    """KV pages of SGLang's host pools go to Tiercel's tiers and come back, across engines and restarts."""

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        """Read the options and name the weights. Raises TiercelError with one line."""
        check_version(sglang.__version__)
        check_ranks(storage_config)
        options = read(storage_config.extra_config or {})
        self._config = options.config
        self._rank = Rank.of(storage_config)
        self._server = this_server(sglang.__version__)
        self._name = storage_config.model_name
        self._revision = self._server.weights(options.revision)
        self._tally = Tally(wanted=bool(storage_config.enable_storage_metrics))
        self._base: Identity | None = None
        self._pools: dict[str, Pool] = {}
        self._store: RemoteStore | None = None
        self._transfer: Transfer | None = None

    # Pools.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Read the layout of the KV pool and connect. Raises TiercelError with one line."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV_POOL, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Read the layout of another pool. Raises TiercelError with one line."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if _plain(host_pool_name) not in self._pools:
            self._register(_plain(host_pool_name), host_pool)

    def _register(self, name: str, host_pool: Any) -> None:
        pages = pages_of(host_pool, name)
        if pages is None:
            self._pools[name] = Pool(torch.uint8, None, None)
            return
        if self._store is None:
            self._open(pages.nbytes)
        if self._base is None:
            self._base = base_identity(self._name, self._revision, self._rank, self._server, _device())
        identity = identity_of(self._base, self._rank, host_pool, name, pages)
        self._pools[name] = Pool(host_pool.dtype, pages, identity)
        log.info("tiercel: pool %s, pages of %s", name, human_bytes(pages.nbytes))

    def _open(self, page_bytes: int) -> None:
        """Connect to the named daemon or a private one, which all ranks of this engine share."""
        settings = "\0".join(f"{name}={value}" for name, value in sorted(exported(self._config).items()))
        digest = blake2b(settings.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        private = f"sglang {self._server.engine} {digest}"
        try:
            self._store = connect(self._config, min(page_bytes, _SLOT_BYTES_MAX), private=private)
        except DaemonError:
            # Perhaps its slots are smaller: then pages are kept in parts.
            self._store = connect(self._config, 1, private=private)
        self._transfer = Transfer(self._store, self._config.store.load_deadline_s)

    # Pages in pools.

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of the pages, in a row, are there."""
        return self._count(KV_POOL, keys, _before(extra_info))

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Fill pages of the KV pool. True for each that is whole; those behind the first miss are none."""
        return self._load(KV_POOL, keys, host_indices, _before(extra_info))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Keep pages of the KV pool. True for each that is there then."""
        return self._save(KV_POOL, keys, host_indices, _before(extra_info))

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Fill pages of several pools."""
        before = _before(extra_info)
        return {
            one.name: self._load(_plain(one.name), one.keys or [], one.host_indices, before)
            for one in transfers
        }

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Keep pages of several pools."""
        before = _before(extra_info)
        return {
            one.name: self._save(_plain(one.name), one.keys or [], one.host_indices, before)
            for one in transfers
        }

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """The longest prefix that every pool can restore, and what each of them has."""
        kv_pages = self._count(KV_POOL, keys, _before(extra_info))
        found: dict[Any, int] = {KV_POOL: kv_pages} if kv_pages else {}
        stops = set(range(1, kv_pages + 1))
        for transfer in pool_transfers or ():
            if not stops:
                break
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # a second form of pages, which never ends a hit
            own = self._stops(transfer, keys[:kv_pages])
            if own:
                found[transfer.name] = max(own)
            stops &= own
        return PoolTransferResult(max(stops, default=0), found, sorted(stops))

    def _stops(self, transfer: Any, keys: list[str]) -> set[int]:
        """The lengths of prefix for which a pool has what its policy wants."""
        name = _plain(transfer.name)
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return set(range(1, self._count(name, keys, ()) + 1))
        wanted = max(1, len(transfer.keys or ()))
        here = self._at(name)
        if here is None:
            return set()
        transfers, _, names = here
        there = transfers.present(names, keys, wanted)
        return {end for end in range(1, len(keys) + 1) if all(there[max(0, end - wanted) : end])}

    def _at(self, name: str) -> tuple[Transfer, Pool, Named] | None:
        """What a call about a pool needs; None for one that has no bytes or is not known."""
        pool, store, transfer = self._pools.get(name), self._store, self._transfer
        if pool is None or store is None or transfer is None:
            return None
        names = pool.named(store.slot_payload_bytes)
        return None if names is None else (transfer, pool, names)

    def _placed(
        self, name: str, keys: Sequence[str], indices: Any
    ) -> tuple[Transfer, Named, list[list[Run]]] | None:
        """The same with where the pages lie; None also where they cannot lie there."""
        here = self._at(name)
        places = None if here is None else here[1].places(keys, indices)
        return None if here is None or places is None else (here[0], here[2], places)

    def _without_bytes(self, name: str) -> bool:
        """Whether a pool only hands out indices: of its pages nothing is ever missing."""
        pool = self._pools.get(name)
        return pool is not None and pool.pages is None

    def _count(self, name: str, keys: Sequence[str], before: Sequence[str]) -> int:
        if self._without_bytes(name):
            return len(keys)
        here = self._at(name)
        return 0 if here is None else here[0].count(here[2], before, keys)

    def _load(self, name: str, keys: Sequence[str], indices: Any, before: Sequence[str]) -> list[bool]:
        if self._without_bytes(name):
            return [True] * len(keys)
        if (here := self._placed(name, keys, indices)) is None:
            return [False] * len(keys)
        transfer, names, places = here
        with self._tally.batch("prefetch", names.page_bytes) as moved:
            moved.append(transfer.read(names, before, keys, places))
        return [number < moved[0] for number in range(len(keys))]

    def _save(self, name: str, keys: Sequence[str], indices: Any, before: Sequence[str]) -> list[bool]:
        if self._without_bytes(name):
            return [True] * len(keys)
        if (here := self._placed(name, keys, indices)) is None:
            return [False] * len(keys)
        transfer, names, places = here
        with self._tally.batch("backup", names.page_bytes) as moved:
            kept = transfer.write(names, before, keys, places)
            moved.append(sum(kept))
        return kept

    # Pages as tensors: SGLang's older calls, used without `interface_v1`.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Fill a tensor with a page, and return it; None is a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Sequence[Any] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Fill tensors with pages, and return them; those behind the first miss are None."""
        targets = list(target_locations) if target_locations is not None else [None] * len(keys)
        targets = [self._empty() if one is None else one for one in targets]
        there = self._tensors(keys, targets)
        done = 0
        if there is not None:
            transfer, names, places = there
            with self._tally.batch("prefetch", names.page_bytes) as moved:
                moved.append(done := transfer.read(names, (), keys, places))
        return [target if number < done else None for number, target in enumerate(targets)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Keep a page. True if it is there then."""
        return self.batch_set([key], [target_location if value is None else value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[Any] | None = None,
        target_locations: Sequence[Any] | None = None,
        target_sizes: Any = None,
    ) -> bool:
        """Keep pages. True if all are there then."""
        given = values if values is not None else target_locations
        tensors = [one.contiguous() if isinstance(one, torch.Tensor) else one for one in given or ()]
        there = self._tensors(keys, tensors)
        if there is None:
            return not keys
        transfer, names, places = there
        with self._tally.batch("backup", names.page_bytes) as moved:
            kept = transfer.write(names, (), keys, places)
            moved.append(sum(kept))
        return all(kept)

    def _tensors(
        self, keys: Sequence[str], tensors: Sequence[Any]
    ) -> tuple[Transfer, Named, list[list[Run]]] | None:
        """Names and places of pages that come as tensors; None unless each is a whole page of the KV pool."""
        here = self._at(KV_POOL)
        runs = [run for one in tensors if (run := tensor_run(one)) is not None]
        if here is None or not len(keys) == len(tensors) == len(runs):
            return None
        transfer, pool, names = here
        if pool.pages is None or not pool.pages.flat or any(size != names.page_bytes for _, size in runs):
            return None
        return transfer, names, [[run] for run in runs]

    def _empty(self) -> torch.Tensor | None:
        """Room for a page of the KV pool, if there is one."""
        pool = self._pools.get(KV_POOL)
        if pool is None or pool.pages is None:
            return None
        return torch.empty(pool.pages.nbytes // pool.dtype.itemsize, dtype=pool.dtype)

    # Steering.

    def clear(self) -> bool:
        """Drop all pages of this engine, as this rank names them. Until that is done, nothing is served."""
        if self._store is None or self._transfer is None:
            return True
        slot_bytes = self._store.slot_payload_bytes
        for pool in self._pools.values():
            pool.named(slot_bytes)
        return self._transfer.clear([tag for pool in self._pools.values() for tag in pool.tags()])

    def get_stats(self) -> Any | None:
        """What SGLang's metrics show: pages and rates of the batches since the last time."""
        return self._tally.take()

    def close(self) -> None:
        """Leave the store; what it holds stays there."""
        if self._transfer is not None:
            self._transfer.close()


def _before(extra_info: Any) -> Sequence[str]:
    """The pages before those asked for, where SGLang passes them (`hicache_storage_pass_prefix_keys`)."""
    return getattr(extra_info, "prefix_keys", None) or ()


def _plain(name: Any) -> str:
    """A pool's name, be it an enum's member or a text."""
    return str(getattr(name, "value", name))


def _device() -> str:
    """What computes on this rank."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
