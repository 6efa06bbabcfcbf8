"""`tiercel cache` on a Mooncake pool: the same as on other kinds, in a network of the pool's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers.mooncake import Master, Peer, own_network, why_not

from tiercel.cli import run
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


def shown(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> dict[str, object]:
    assert run(["cache", *map(str, args), "--json"]) == code, capsys.readouterr()
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_a_pool_is_filled_from_a_directory_listed_checked_copied_back_and_cleared(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = FilesTier(tmp_path / "src")
    chains = [chain(8), chain(4, salt="s3cret")]
    for one in chains:
        assert set(source.write(*records(one))) == {OK}
    assert shown(capsys, "copy", tmp_path / "src", url)["copied"] == 12
    listed = shown(capsys, "ls", url)
    assert (listed["blocks"], listed["bytes"]) == (12, 12 * RECORD_BYTES)
    assert shown(capsys, "verify", url)["checked"] == 12
    assert shown(capsys, "copy", url, tmp_path / "dst")["copied"] == 12
    assert all(FilesTier(tmp_path / "dst").contains([key for one in chains for key in one.keys]))
    assert shown(capsys, "clear", "--salt", "s3cret", "--yes", url)["deleted_blocks"] == 4
    assert shown(capsys, "ls", url)["blocks"] == 8
