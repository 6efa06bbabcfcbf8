"""`tiercel cache` on a Mooncake pool: the same as on other kinds, in a network of the pool's own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers.mooncake import Master, Peer, own_network, why_not

from tiercel.testing.records import RECORD_BYTES, chain, records
from tiercel.tiers import OK, FilesTier

SKIP = why_not()
pytestmark = pytest.mark.skipif(SKIP is not None, reason=SKIP or "")


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with own_network():
        master = Master(tmp_path)
        peer = Peer(master, 64 << 20)
        master.start()
        peer.start()
        yield master.url()
        peer.kill()
        master.kill()


def shown(*args: object) -> dict[str, object]:
    """In a process of its own: the native client's threads stay in the network they began in."""
    call = [sys.executable, "-m", "tiercel", "cache", *map(str, args), "--json"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_a_pool_is_filled_from_a_directory_listed_checked_copied_back_and_cleared(
    url: str, tmp_path: Path
) -> None:
    source = FilesTier(tmp_path / "src")
    chains = [chain(8), chain(4, salt="s3cret")]
    for one in chains:
        assert set(source.write(*records(one))) == {OK}
    assert shown("copy", tmp_path / "src", url)["copied"] == 12
    listed = shown("ls", url)
    assert (listed["blocks"], listed["bytes"]) == (12, 12 * RECORD_BYTES)
    assert shown("verify", url)["checked"] == 12
    assert shown("copy", url, tmp_path / "dst")["copied"] == 12
    assert all(FilesTier(tmp_path / "dst").contains([key for one in chains for key in one.keys]))
    assert shown("clear", "--salt", "s3cret", "--yes", url)["deleted_blocks"] == 4
    assert shown("ls", url)["blocks"] == 8
