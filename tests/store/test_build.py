"""From configuration to a store: sizes, names, refusals, and memory that is ready before it is needed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tiercel.config import Config
from tiercel.errors import MemoryLimitError, TierError
from tiercel.store import open_store

PAYLOAD = 1 << 20


def configured(tmp_path: Path, **settings: str) -> Config:
    given = {"ram.size": "64MiB", "tiers.0.path": str(tmp_path / "cache"), "tiers.0.size": "1GiB"}
    return Config.load(environ={}, overrides=given | {k.replace("__", "."): v for k, v in settings.items()})


def test_sizes_and_names(tmp_path: Path) -> None:
    second = {"tiers__1__path": str(tmp_path / "second"), "tiers__1__size": "2GiB"}
    with open_store(configured(tmp_path, **second), PAYLOAD) as store:
        stats = store.stats()
        assert stats.slot_bytes == PAYLOAD + 4096
        assert stats.slots == (64 << 20) // stats.slot_bytes
        assert [(tier.name, tier.cap_bytes) for tier in stats.tiers] == [
            ("disk", 1 << 30),
            ("disk2", 2 << 30),
        ]


def test_ram_that_holds_only_the_reserved_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MemoryLimitError, match=r"ram\.size = 5\.0 MiB holds 4 blocks.*accepted is 6MiB"):
        open_store(configured(tmp_path, ram__size="5MiB"), PAYLOAD)
    open_store(configured(tmp_path, ram__size="6MiB"), PAYLOAD).close()


def test_ram_beyond_the_host_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MemoryLimitError, match="does not fit"):
        open_store(configured(tmp_path, ram__size="100TiB"), PAYLOAD)


def test_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "thesis.txt").write_text("mine")
    with pytest.raises(TierError, match="not a Tiercel cache"):
        open_store(configured(tmp_path), PAYLOAD)
    assert (tmp_path / "cache" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_memory_without_huge_pages_is_touched_ahead(tmp_path: Path, kind: str) -> None:
    before = resident_pages()
    with open_store(configured(tmp_path, ram__size="200MiB", ram__kind=kind), PAYLOAD) as store:
        ahead = not store.arena.huge_pages
        assert ahead or kind == "private"
        until_s = time.monotonic() + 20
        while ahead and resident_pages() - before < 45_000 and time.monotonic() < until_s:
            time.sleep(0.01)
        grown = resident_pages() - before
        assert grown > 45_000 if ahead else grown < 20_000


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_admission_and_budgets_are_applied(tmp_path: Path) -> None:
    with open_store(configured(tmp_path), PAYLOAD) as store:
        assert store.admission is None
        assert store.below.traffic[0].lane.options.write_per_day_bytes is None
    settings = {"store__admission": "second-sight", "tiers__0__write_per_day": "50GB"}
    with open_store(configured(tmp_path, **settings), PAYLOAD) as store:
        assert store.admission is not None
        assert store.below.traffic[0].lane.options.write_per_day_bytes == 50 * 10**9
