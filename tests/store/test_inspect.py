"""A cache directory seen from outside: what is listed, found bad and deleted, and that no more changes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tiercel.blocks import BlockKey, Chain
from tiercel.blocks.record import HEADER_BYTES
from tiercel.errors import TierError
from tiercel.store.inspect import CachePlace
from tiercel.testing.records import PAYLOAD_BYTES, RECORD_BYTES, chain, record, records
from tiercel.tiers import Fate, FilesTier, Outcome
from tiercel.tiers.memory import MemoryTier

CHAINS = {
    "plain": chain(8),
    "tenant": chain(4, salt="s3cret"),
    "other": chain(2, model="org/other-model"),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tier = FilesTier(tmp_path / "cache")
    for one in CHAINS.values():
        tier.write(*records(one))
    return tmp_path / "cache"


def tag(name: str) -> bytes:
    return CHAINS[name].keys[0][:8]


def state(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in root.rglob("*")}


def path_of(root: Path, one: Chain, index: int) -> Path:
    return FilesTier(root).path(one.keys[index])


def test_scopes_are_listed_with_what_they_are_and_hold(root: Path) -> None:
    before = state(root)
    rows = CachePlace.directory(root).scopes()
    assert [row.tag for row in rows] == [tag("plain"), tag("tenant"), tag("other")]
    assert [row.blocks for row in rows] == [8, 4, 2]
    assert [row.file_bytes for row in rows] == [8 * RECORD_BYTES, 4 * RECORD_BYTES, 2 * RECORD_BYTES]
    assert [row.info["model"] for row in rows] == ["model", "model", "org/other-model"]
    assert all(time.time() - 60 < row.oldest_s <= row.newest_s <= time.time() for row in rows)
    assert state(root) == before


def test_one_header_per_scope_is_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = os.preadv

    def counting(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = real(fd, buffers, offset)
        read.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counting)
    CachePlace.directory(root).scopes()
    assert read == [HEADER_BYTES] * 3


def test_a_scope_with_a_spoilt_record_is_still_described(root: Path) -> None:
    first = min(path_of(root, CHAINS["plain"], index) for index in range(8))
    first.write_bytes(b"\0" * RECORD_BYTES)
    rows = CachePlace.directory(root).scopes()
    assert rows[0].info["model"] == "model"


def test_a_scope_is_not_described_by_the_record_of_another(root: Path) -> None:
    first = min(path_of(root, CHAINS["plain"], index) for index in range(8))
    first.write_bytes(path_of(root, CHAINS["other"], 0).read_bytes())
    (row,) = [row for row in CachePlace.directory(root).scopes() if row.tag == tag("plain")]
    assert row.info["model"] == "model"


def test_a_salt_is_recognised_only_by_itself(root: Path) -> None:
    plain, tenant, _ = CachePlace.directory(root).scopes()
    assert tenant.has_salt("s3cret")
    assert not tenant.has_salt("s3cre")
    assert not plain.has_salt("s3cret")
    assert not plain.has_salt("")
    assert "s3cret" not in str(tenant)


def test_a_sound_directory_verifies_and_keeps_its_dates(root: Path) -> None:
    before = state(root)
    seen: list[int] = []
    report = CachePlace.directory(root).verify(
        repair=True, progress=lambda so_far: seen.append(so_far.checked)
    )
    assert (report.checked, report.checked_bytes) == (14, 14 * RECORD_BYTES)
    assert (report.bad, report.leftovers, report.other_files) == ([], 0, 0)
    assert seen[-1] == 14
    assert state(root) == before


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda raw: raw[:HEADER_BYTES] + bytes(PAYLOAD_BYTES), id="torn-payload"),
        pytest.param(lambda raw: raw[:-4096] + bytes(4096), id="torn-last-page"),
        pytest.param(lambda raw: bytes(4096) + raw[4096:], id="torn-header"),
        pytest.param(lambda raw: raw[:HEADER_BYTES], id="header-only"),
        pytest.param(lambda raw: raw[:-1], id="odd-size"),
        pytest.param(lambda raw: raw + bytes(4096), id="a-page-more"),
        pytest.param(lambda raw: b"", id="empty"),
        pytest.param(lambda raw: raw[:5000] + bytes([raw[5000] ^ 1]) + raw[5001:], id="one-bit"),
    ],
)
@pytest.mark.parametrize("repair", [True, False])
def test_bad_records_are_named_and_only_they_deleted(
    root: Path, spoil: Callable[[bytes], bytes], repair: bool
) -> None:
    path = path_of(root, CHAINS["plain"], 3)
    path.write_bytes(spoil(path.read_bytes()))
    report = CachePlace.directory(root).verify(repair=repair)
    assert [root / bad.path for bad in report.bad] == [path]
    assert report.bad[0].deleted is repair
    assert path.exists() is not repair
    assert len(list(root.rglob("*.kv"))) == 14 - repair
    again = CachePlace.directory(root).verify(repair=repair)
    assert len(again.bad) == (0 if repair else 1)


def test_a_record_of_another_key_and_a_huge_sparse_file_are_bad(root: Path) -> None:
    swapped, sparse = path_of(root, CHAINS["plain"], 3), path_of(root, CHAINS["plain"], 4)
    swapped.write_bytes(path_of(root, CHAINS["plain"], 2).read_bytes())
    os.truncate(sparse, 1 << 42)
    report = CachePlace.directory(root).verify(repair=True)
    assert sorted(root / bad.path for bad in report.bad) == sorted([swapped, sparse])
    assert {bad.reason.split()[0] for bad in report.bad} == {"another", "file"}


def test_leftovers_are_removed_and_foreign_files_counted_and_kept(root: Path) -> None:
    folder = path_of(root, CHAINS["plain"], 0).parent
    leftover = folder / ".00000000-1-00000000-1.tmp"
    leftover.touch()
    os.utime(leftover, (0, 0))
    (folder / "notes").touch()
    dry = CachePlace.directory(root).verify(repair=False)
    assert (dry.leftovers, dry.other_files, leftover.exists()) == (1, 1, True)
    CachePlace.directory(root).verify(repair=True)
    assert not leftover.exists()
    assert (folder / "notes").exists()


def test_clear_takes_the_scopes_named_and_their_folders(root: Path) -> None:
    assert CachePlace.directory(root).clear([tag("tenant")]) == (4, 4 * RECORD_BYTES)
    assert [row.tag for row in CachePlace.directory(root).scopes()] == [tag("plain"), tag("other")]
    assert not (root / tag("tenant").hex()).exists()


def test_clear_by_age_keeps_what_was_used_since(root: Path) -> None:
    for index in (2, 5):
        os.utime(path_of(root, CHAINS["plain"], index), (time.time() - 1e6,) * 2)
    directory = CachePlace.directory(root)
    assert [(row.tag, row.blocks) for row in directory.scopes(older_than_s=5e5)] == [(tag("plain"), 2)]
    assert directory.clear([tag("plain"), tag("other")], older_than_s=5e5) == (2, 2 * RECORD_BYTES)
    assert [row.blocks for row in directory.scopes()] == [6, 4, 2]


def test_clear_leaves_foreign_files_and_links(root: Path, tmp_path: Path) -> None:
    folder = path_of(root, CHAINS["other"], 0).parent
    (folder / "notes").write_text("mine")
    outside = tmp_path / "outside"
    (root / tag("tenant").hex()).rename(outside)
    (root / tag("tenant").hex()).symlink_to(outside)
    CachePlace.directory(root).clear([tag("other"), tag("tenant")])
    assert (folder / "notes").read_text() == "mine"
    assert len(list(outside.rglob("*.kv"))) == 4


def test_what_a_store_deletes_meanwhile_is_not_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.unlink

    def twice(*args: object, **named: object) -> None:
        real(*args, **named)  # type: ignore[arg-type]
        real(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "unlink", twice)
    assert CachePlace.directory(root).clear([tag("plain")]) == (0, 0)
    assert len(list(root.rglob("*.kv"))) == 6


def test_no_cache_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.kv").write_text("mine")
    before = state(tmp_path)
    with pytest.raises(TierError, match="not a Tiercel cache"):
        CachePlace.directory(tmp_path)
    assert state(tmp_path) == before


def test_a_directory_that_went_away_is_one_line(root: Path) -> None:
    directory = CachePlace.directory(root)
    root.rename(root.with_name("away"))
    for call in (
        directory.scopes,
        lambda: directory.verify(repair=True),
        lambda: directory.clear([tag("plain")]),
    ):
        with pytest.raises(TierError, match=f"{root}: No such file or directory"):
            call()


def test_a_record_that_cannot_be_read_is_bad(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = record(CHAINS["plain"], 3)
    real = os.preadv

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}") == str(path_of(root, CHAINS["plain"], 3)):
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    report = CachePlace.directory(root).verify(repair=False)
    assert [bad.reason for bad in report.bad] == ["Input/output error"]
    assert report.bad[0].file_bytes == len(made)


def memory_place() -> tuple[MemoryTier, CachePlace]:
    tier = MemoryTier(64 << 20)
    for one in CHAINS.values():
        tier.write(*records(one))
    return tier, CachePlace(tier, "memory")


def test_a_tier_without_extras_is_listed_checked_and_cleared_too() -> None:
    tier, place = memory_place()
    assert [(row.blocks, row.info["model"]) for row in place.scopes()] == [
        (8, "model"), (4, "model"), (2, "org/other-model"),
    ]  # fmt: skip
    spoilt = record(CHAINS["plain"], 3)
    spoilt[-1] ^= 1
    tier.write([CHAINS["plain"].keys[3]], [spoilt])
    report = place.verify(repair=True)
    assert [(bad.key, bad.deleted) for bad in report.bad] == [(CHAINS["plain"].keys[3], True)]
    assert place.clear([tag("tenant")]) == (4, 4 * RECORD_BYTES)
    assert [row.blocks for row in place.scopes()] == [7, 2]


def test_what_cannot_be_read_is_named_never_deleted_and_many_in_a_row_end_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier, place = memory_place()
    real, fails = tier.read, {CHAINS["plain"].keys[2]}

    def read(keys: list[BlockKey], buffers: list[memoryview]) -> list[Outcome]:
        return [Outcome(Fate.FAILED, "timed out")] if keys[0] in fails else real(keys, buffers)

    monkeypatch.setattr(tier, "read", read)
    report = place.verify(repair=True)
    assert [(bad.reason, bad.deleted) for bad in report.bad] == [("timed out", False)]
    assert tier.contains(list(fails)) == [True]
    for number in range(8):
        more = chain(8, first=1000 * number)
        tier.write(*records(more))
        fails.update(more.keys)
    with pytest.raises(TierError, match="memory: does not answer: timed out"):
        place.verify(repair=True)
    assert len(list(tier.scan())) >= 64


def test_a_block_that_would_not_go_ends_a_clear_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    tier, place = memory_place()
    monkeypatch.setattr(tier, "delete", lambda keys: [Outcome(Fate.FAILED, "read-only")] * len(keys))
    with pytest.raises(TierError, match="memory: a block could not be deleted: read-only"):
        place.clear([tag("plain")])


@pytest.mark.parametrize(("age_s", "goes"), [(299, False), (301, True), (-7200, True)])
def test_d50_an_age_is_counted_from_the_last_use_also_when_a_clock_was_wrong(
    root: Path, age_s: float, goes: bool
) -> None:
    path = path_of(root, CHAINS["plain"], 0)
    os.utime(path, (time.time() - age_s,) * 2)
    assert CachePlace.directory(root).clear([tag("plain")], older_than_s=300) == (
        (1, RECORD_BYTES) if goes else (0, 0)
    )
    assert path.exists() is not goes
