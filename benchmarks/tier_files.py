"""The files tier for `bench_tiers`: against direct I/O by hand, one file a block, from the same memory.

Both as in a cache at its cap: from the second round on the tier evicts a block for each it writes, and the
bare client writes over its files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.bench_tiers import Case, Client
from tiercel.blocks import BlockKey
from tiercel.tiers import FilesTier, Outcome

_DIRECT = getattr(os, "O_DIRECT", 0)


class _AtItsCap(FilesTier):
    def write(self, keys: Sequence[BlockKey], records: Sequence[memoryview]) -> list[Outcome]:
        self.recycle(keys)
        return super().write(keys, records)


@contextmanager
def cases(folder: Path) -> Iterator[list[Case]]:
    """One case: a cache directory, and the bare calls in a directory beside it."""
    tier = _AtItsCap(folder / "cache")
    # One directory for each first byte, as the tier has them.
    for fan in range(256):
        (folder / f"{fan:02x}").mkdir()
    direct = _DIRECT if tier.direct else 0

    def put(name: str, record: memoryview) -> None:
        fd = os.open(folder / name[:2] / name, os.O_WRONLY | os.O_CREAT | direct, 0o600)
        try:
            assert os.pwritev(fd, [record], 0) == len(record)
        finally:
            os.close(fd)

    def get(name: str, record: memoryview) -> None:
        fd = os.open(folder / name[:2] / name, os.O_RDONLY | direct)
        try:
            assert os.preadv(fd, [record], 0) == len(record)
        finally:
            os.close(fd)

    yield [Case("files", tier, {"direct": Client(put, get)})]
