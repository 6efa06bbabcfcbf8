"""Cases of `bench_tiers` for Mooncake: a storage process over TCP, against the client's own calls.

Runs in a network namespace of its own (see `tests.servers.mooncake`). A name that exists is not sent again by
either side, so both remove it before they put: what is measured is a new record.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mooncake.store import MooncakeDistributedStore
from tests.servers.mooncake import Master, Peer, own_network

from benchmarks.bench_tiers import Case, Client
from tiercel.blocks import BlockKey
from tiercel.tiers import Outcome
from tiercel.tiers.mooncake import MooncakeTier
from tiercel.tiers.mooncake_client import Client as PoolClient
from tiercel.tiers.mooncake_url import read_url
from tiercel.tiers.url import TierUrl

SEGMENT_BYTES = 1 << 30


class _Afresh(MooncakeTier):
    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        self.delete(keys)
        return super().write(keys, records)


@contextmanager
def cases(folder: Path) -> Iterator[list[Case]]:
    """A master and a storage process of their own."""
    with own_network(), Master(folder) as master, Peer(master, SEGMENT_BYTES) as peer:
        master.start()
        peer.start()
        tier = _Afresh(PoolClient(read_url(TierUrl.parse(master.url())), 30.0), name="mooncake tcp")
        bare = MooncakeDistributedStore()
        assert bare.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master.address) == 0
        _touch(bare)
        yield [Case("mooncake tcp", tier, {"own client": _bare(bare)})]
        tier.close()
        bare.close()


def _touch(store: MooncakeDistributedStore) -> None:
    """Write to all of the pool once: its pages are not there before."""
    block = memoryview(bytearray(16 << 20))
    client = _bare(store)
    with suppress(AssertionError):
        for number in range(SEGMENT_BYTES // len(block)):
            client.put(f"touch{number}", block)
    store.remove_all(True)


def _bare(store: MooncakeDistributedStore) -> Client:
    def address(record: memoryview) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(record))

    def put(name: str, record: memoryview) -> None:
        store.batch_remove(["bare:" + name], True)
        assert store.batch_put_from(["bare:" + name], [address(record)], [len(record)]) == [0]

    def get(name: str, record: memoryview) -> None:
        assert store.batch_get_into(["bare:" + name], [address(record)], [len(record)]) == [len(record)]

    return Client(put, get)
