"""What a directory tells those who share it: changes, dates, headers, and what is no record."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tiercel.blocks import HEADER_BYTES, BlockKey, parse
from tiercel.testing.records import RECORD_BYTES, buffer, chain, record, records
from tiercel.tiers import MISSING, OK, Fate, FilesTier
from tiercel.tiers.extras import Oddments, Part, Peeks, Shared, Tidies

CHAIN = chain(8)
OTHER = chain(3, model="other")
LONG_AGO_S = time.time() - 1e6


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def tier(root: Path) -> FilesTier:
    made = FilesTier(root)
    assert set(made.write(*records(CHAIN))) == {OK}
    return made


def settle(root: Path) -> None:
    """Let the folders have changed long ago, but one, which shows that the clock has moved on since."""
    folders = sorted(root.glob("*/*"))
    for folder in folders[1:]:
        os.utime(folder, (LONG_AGO_S, LONG_AGO_S))


def listed(parts: list[Part]) -> set[BlockKey]:
    return {one.key for part in parts for one in part.records}


def test_it_offers_all_extras(tier: FilesTier) -> None:
    assert isinstance(tier, Shared)
    assert isinstance(tier, Peeks)
    assert isinstance(tier, Tidies)


def test_the_first_look_is_a_whole_listing_and_later_ones_only_what_changed(
    tier: FilesTier, root: Path
) -> None:
    assert listed(list(tier.changes(False))) == set(CHAIN.keys)
    settle(root)
    list(tier.changes(False))
    list(tier.changes(False))
    assert list(tier.changes(False)) == []
    FilesTier(root).write(*records(OTHER))
    assert listed(list(tier.changes(False))) >= set(OTHER.keys)
    FilesTier(root).delete([CHAIN.keys[3]])
    parts = list(tier.changes(False))
    assert [part.prefix for part in parts if CHAIN.keys[3].startswith(part.prefix)]
    assert CHAIN.keys[3] not in listed(parts)
    assert listed(list(tier.changes(True))) == set(CHAIN.keys[:3] + CHAIN.keys[4:] + OTHER.keys)


def test_a_change_in_the_same_tick_of_a_coarse_clock_is_not_missed(tier: FilesTier, root: Path) -> None:
    now_s = time.time()
    key = CHAIN.keys[0]
    folder = tier.path(key).parent

    def coarse() -> None:
        for one in root.glob("*/*"):
            os.utime(one, (now_s, now_s))

    coarse()
    assert key in listed(list(tier.changes(False)))
    FilesTier(root).delete([key])
    folder.mkdir(exist_ok=True)
    coarse()  # as if the file system counted in seconds
    assert [part for part in tier.changes(False) if key.startswith(part.prefix)]


@pytest.mark.parametrize("remove", ["folder", "scope"])
def test_folders_that_went_away_are_empty_parts(tier: FilesTier, root: Path, remove: str) -> None:
    list(tier.changes(False))
    gone = tier.path(CHAIN.keys[0]).parent
    shutil.rmtree(gone if remove == "folder" else gone.parent)
    parts = list(tier.changes(False))
    assert Part(CHAIN.keys[0][:9], []) in parts
    assert [part for part in tier.changes(False) if not part.records] == []


def test_what_was_not_taken_to_its_end_is_told_again(tier: FilesTier) -> None:
    looking = tier.changes(False)
    first = next(looking)
    looking.close()
    assert first in list(tier.changes(False))


def test_a_place_that_is_gone_raises_and_nothing_is_forgotten(tier: FilesTier, root: Path) -> None:
    list(tier.changes(False))
    root.rename(root.with_name("away"))
    with pytest.raises(OSError, match="No such file"):
        list(tier.changes(False))
    root.with_name("away").rename(root)
    assert [part for part in tier.changes(False) if not part.records] == []


def test_links_and_odd_names_are_not_followed_or_listed(tier: FilesTier, root: Path, tmp_path: Path) -> None:
    outside = FilesTier(tmp_path / "outside")
    outside.write(*records(OTHER))
    tag = OTHER.keys[0][:8].hex()
    (root / tag).symlink_to(tmp_path / "outside" / tag)
    folder = tier.path(CHAIN.keys[0]).parent
    for name in ("...kv", "..%2f..kv", "a" * 45 + ".kv", "A" * 46 + ".kv", "g" * 46 + ".kv"):
        (folder / name).touch()
    (folder / ("a" * 46 + ".kv")).symlink_to(tmp_path / "outside" / "FORMAT")
    assert listed(list(tier.changes(True))) == set(CHAIN.keys)
    assert tier.dates(list(OTHER.keys)) == [None] * 3
    assert tier.touch(list(OTHER.keys), [0.0] * 3)[0].fate in (Fate.FAILED, Fate.MISSING)
    assert tier.peek([OTHER.keys[0]])[0] == tier.read([OTHER.keys[0]], [buffer()])[0]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "outside").rglob("*")}
    tier.prune([OTHER.keys[0][:8]])
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "outside").rglob("*")}


def test_dates_are_those_of_the_files_and_touch_sets_them(tier: FilesTier) -> None:
    keys = list(CHAIN.keys)
    assert tier.touch([*keys, OTHER.keys[0]], [500.0] * 9) == [OK] * 8 + [MISSING]
    assert tier.dates([OTHER.keys[0]]) == [None]
    assert all(date is not None and abs(time.time() - 500 - date) < 5 for date in tier.dates(keys))
    assert tier.touch([], []) == []


@pytest.mark.parametrize("ahead_s", [1e5, 1e9])
def test_a_date_far_ahead_does_not_keep_a_record_for_ever(tier: FilesTier, ahead_s: float) -> None:
    key = CHAIN.keys[0]
    now_s = time.time()
    os.utime(tier.path(key), (now_s + ahead_s,) * 2)
    (date,) = tier.dates([key])
    assert date is not None
    assert abs(date - (now_s - ahead_s)) < 5, "as old as it is early"
    assert min(tier.scan(), key=lambda one: one.used_s).key == key
    os.utime(tier.path(key), (now_s + 1800,) * 2)
    assert abs((tier.dates([key])[0] or 0) - now_s - 1800) < 5, "clocks may be half an hour apart"


def test_a_user_who_may_only_read_shares_nothing_and_breaks_nothing(
    tier: FilesTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "utime", denied)
    assert tier.touch([CHAIN.keys[0]], [0.0]) == [OK]


def test_peek_is_the_header_and_no_use(tier: FilesTier) -> None:
    keys = list(CHAIN.keys)
    os.utime(tier.path(keys[0]), (LONG_AGO_S,) * 2)
    pages = tier.peek([*keys, OTHER.keys[0]])
    assert pages[-1] == MISSING
    for key, page in zip(keys, pages, strict=False):
        assert isinstance(page, bytes)
        assert len(page) == HEADER_BYTES
        header = parse(page)
        assert not isinstance(header, str)
        assert header.key == key
    assert abs(tier.path(keys[0]).stat().st_mtime - LONG_AGO_S) < 1
    tier.path(keys[1]).write_bytes(b"short")
    assert tier.peek([keys[1]]) == [b"short"]


def test_oddments_are_counted_and_only_those_of_the_dead_removed(tier: FilesTier, root: Path) -> None:
    folder = tier.path(CHAIN.keys[0]).parent
    (folder / "notes").touch()
    leftover = folder / ".00000000-1-00000000-1.tmp"
    leftover.touch()
    os.utime(leftover, (0, 0))
    assert tier.oddments(remove=False) == Oddments(leftovers=1, other_files=1)
    assert leftover.exists()
    assert tier.oddments(remove=True) == Oddments(leftovers=1, other_files=1)
    assert not leftover.exists()
    assert (folder / "notes").exists()


@pytest.mark.parametrize("look", ["scan", "changes", "read", "peek"])
def test_who_looks_from_outside_changes_nothing(tier: FilesTier, root: Path, look: str) -> None:
    leftover = tier.path(CHAIN.keys[0]).parent / ".00000000-1-00000000-1.tmp"
    leftover.touch()
    os.utime(leftover, (0, 0))
    for key in CHAIN.keys:
        os.utime(tier.path(key), (LONG_AGO_S,) * 2)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    acts: dict[str, Callable[[FilesTier], object]] = {
        "scan": lambda one: list(one.scan()),
        "changes": lambda one: list(one.changes(True)),
        "read": lambda one: one.read([CHAIN.keys[0]], [buffer()]),
        "peek": lambda one: one.peek(list(CHAIN.keys)),
    }
    acts[look](FilesTier(root, create=False))
    assert before == {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    acts[look](FilesTier(root))
    changed = before != {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.exists()}
    assert changed == (look != "peek"), "the control: a store does refresh and tidy"


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_file_another_host_removed_while_it_was_open_is_missing(
    tier: FilesTier, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    real = getattr(os, call)
    path = tier.path(CHAIN.keys[0]).name

    def stale(*args: object, **named: object) -> object:
        if call == "preadv" or args[0] == path:
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(*args, **named)

    monkeypatch.setattr(os, call, stale)
    assert tier.read([CHAIN.keys[0]], [buffer()]) == [MISSING]
    monkeypatch.undo()
    assert tier.read([CHAIN.keys[0]], [buffer()]) == [OK]


def test_two_tiers_of_one_process_write_one_directory_at_once(root: Path) -> None:
    tiers = [FilesTier(root) for _ in range(4)]
    for index, key in enumerate(CHAIN.keys):
        outcomes = [tier.write([key], [record(CHAIN, index)]) for tier in tiers]
        assert outcomes == [[OK]] * 4
    assert len(list(root.rglob("*.kv"))) == 8
    assert all(path.stat().st_size == RECORD_BYTES for path in root.rglob("*.kv"))


@pytest.mark.parametrize("blocks", [10_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_d29_asking_takes_as_long_among_many_blocks_as_among_few(root: Path, blocks: int) -> None:
    tier = FilesTier(root)

    def fill(count: int, first: int) -> list[BlockKey]:
        keys = [BlockKey(bytes(8) + (first + n).to_bytes(8, "big") * 3) for n in range(count)]
        # Spread over the folders as hashes are.
        keys = [BlockKey(key[:8] + bytes([at % 256]) + key[9:]) for at, key in enumerate(keys)]
        for at in range(256):
            (root / ("00" * 8) / f"{at:02x}").mkdir(parents=True, exist_ok=True)
        for key in keys:
            os.mknod(tier.path(key))
        return keys

    def ask(keys: list[BlockKey]) -> float:
        started_s = time.perf_counter()
        assert all(tier.contains(keys[:1000]))
        return time.perf_counter() - started_s

    few = fill(1000, 0)
    among_few = min(ask(few) for _ in range(5))
    many = fill(blocks - 1000, 10**6)
    among_many = min(ask(many[:: len(many) // 1000]) for _ in range(5))
    assert among_many < 10 * among_few
    assert max(len(os.listdir(folder)) for folder in root.glob("*/*")) < 1000
    assert sum(1 for _ in tier.scan()) == blocks
