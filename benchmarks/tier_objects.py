"""Cases of `bench_tiers` for object stores: SeaweedFS over S3, against the library used bare.

Both bare clients leave the body in memory of the library's own; only the tier brings it where it belongs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import obstore
from obstore.store import S3Store
from tests.servers.s3 import USER, S3Server

from benchmarks.bench_tiers import Case, Client
from tiercel.tiers.objects import open_objects
from tiercel.tiers.url import TierUrl


@contextmanager
def cases(folder: Path) -> Iterator[list[Case]]:
    """A server of its own; the second bare client signs the bodies, as the library does by default."""
    os.environ.update(USER.environment)
    with S3Server(folder) as server:
        url = TierUrl.parse(server.url(prefix="bench"))
        tier = open_objects(url, name="objects", deadline_s=30, slot_bytes=1 << 20)
        bare = {
            "obstore": _bare(server.bare(unsigned_payload=True)),
            "signed": _bare(server.bare(unsigned_payload=False)),
        }
        yield [Case("objects", tier, bare)]


def _bare(store: S3Store) -> Client:
    def put(name: str, record: memoryview) -> None:
        obstore.put(store, f"bare/{name}", record, use_multipart=False)

    def get(name: str, record: memoryview) -> None:
        body = obstore.get(store, f"bare/{name}").bytes()
        assert len(body) == len(record)
        if not any(record[:64]):
            record[:] = body

    return Client(put, get)
