"""What only a directory of files can get wrong: names, links, foreign files, half-written ones, dates."""

from __future__ import annotations

import errno
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tiercel.blocks import BlockKey, Identity, Scope, verify
from tiercel.blocks.record import HEADER_BYTES
from tiercel.testing.records import RECORD_BYTES, buffer, chain, record, records
from tiercel.tiers import Fate, FilesTier
from tiercel.tiers.folder import FORMAT_NAME, record_path, temp_name
from tiercel.tiers.transfer import Transfer

CHAIN = chain(8)
KEY = CHAIN.keys[0]
NAME_BYTES_MAX = 143  # what an encrypted file system leaves of 255


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def tier(root: Path) -> FilesTier:
    return FilesTier(root)


def put(tier: FilesTier, index: int = 0, *, fill: int | None = None) -> memoryview:
    made = record(CHAIN, index, fill=fill)
    assert tier.write([CHAIN.keys[index]], [made])[0].fate is Fate.OK
    return made


def get(tier: FilesTier, key: BlockKey = KEY) -> Fate:
    return tier.read([key], [buffer()])[0].fate


def temps(root: Path) -> list[Path]:
    return list(root.rglob("*.tmp"))


# Names.


def test_d29_many_records_of_one_scope_spread_over_small_folders() -> None:
    randomly = random.Random(29)
    tag = CHAIN.keys[0][:8]
    folders = Counter(
        os.path.dirname(record_path(BlockKey(tag + randomly.randbytes(24)))) for _ in range(100_000)
    )
    assert max(folders.values()) < 1000
    assert len(folders) <= 256


def test_d29_asking_for_a_record_never_lists_a_folder(
    tier: FilesTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tier)

    def listed(*_: object) -> None:
        raise AssertionError("a folder was listed")

    monkeypatch.setattr(os, "scandir", listed)
    monkeypatch.setattr(os, "listdir", listed)
    assert tier.contains(list(CHAIN.keys)) == [True] + [False] * 7
    assert get(tier) is Fate.OK
    with pytest.raises(AssertionError, match="listed"):
        list(tier.scan())


def test_d51_no_name_comes_near_the_limit_and_distinct_keys_have_distinct_paths() -> None:
    model = "/".join(["models"] * 29)[:200].ljust(200, "x")
    keys: list[BlockKey] = []
    for salt in (None, "a", "s" * 128, "é" * 128, "../" * 42):
        one = Identity(
            model=model, revision="r", kv_dtype="bfloat16", geometry=bytes(16), layout="l", block_tokens=4
        )
        for adapter in (None, b"a" * 64):
            keys += Scope(one, adapter=adapter, salt=salt).chain(range(400)).keys
    paths = [record_path(key) for key in keys]
    assert len(set(paths)) == len(keys) == 1000
    names = [part for path in paths for part in path.split("/")] + [
        temp_name().replace(".tmp", "0" * 12 + ".tmp")
    ]
    assert max(len(os.fsencode(name)) for name in names) <= NAME_BYTES_MAX
    assert not any(part in ("", ".", "..") for path in paths for part in path.split("/"))


# Half-written, rotten and foreign records.


def test_d31_a_record_is_not_there_while_its_writer_is_stuck(
    tier: FilesTier, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halfway, go_on = threading.Event(), threading.Event()
    write = os.pwritev

    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = write(fd, [buffers[0][:HEADER_BYTES]], offset)
        halfway.set()
        assert go_on.wait(30)
        return count

    monkeypatch.setattr(os, "pwritev", slow)
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(tier.write, [KEY], [record(CHAIN)])
        try:
            assert halfway.wait(30)
            assert len(temps(root)) == 1
            assert tier.contains([KEY]) == [False]
            assert get(tier) is Fate.MISSING
            assert list(tier.scan()) == []
            assert len(temps(root)) == 1, "the scan took a live writer's file away"
        finally:
            go_on.set()
        assert writer.result()[0].fate is Fate.OK
    assert tier.contains([KEY]) == [True]
    assert temps(root) == []


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda raw: b"", id="empty"),
        pytest.param(lambda raw: raw[:100], id="part-of-a-header"),
        pytest.param(lambda raw: raw[:HEADER_BYTES], id="header-only"),
        pytest.param(lambda raw: raw[:-1], id="one-byte-short"),
        pytest.param(lambda raw: raw[:-4096], id="one-page-short"),
        pytest.param(lambda raw: raw + b"\0", id="one-byte-long"),
        pytest.param(lambda raw: raw * 100, id="much-longer-than-a-slot"),
        pytest.param(lambda raw: bytes(len(raw)), id="all-zeros"),
        pytest.param(lambda raw: raw[:HEADER_BYTES] + bytes(len(raw) - HEADER_BYTES), id="torn-payload"),
        pytest.param(lambda raw: bytes(HEADER_BYTES) + raw[HEADER_BYTES:], id="torn-header"),
        pytest.param(lambda raw: raw[:-4096] + bytes(4096), id="torn-last-page"),
    ],
)
def test_a_spoilt_file_never_passes_for_its_block(tier: FilesTier, spoil: Callable[[bytes], bytes]) -> None:
    put(tier, fill=7)
    assert not isinstance(_verdict(tier), str)
    path = tier.path(KEY)
    path.write_bytes(spoil(path.read_bytes()))
    assert isinstance(_verdict(tier), str)


@pytest.mark.parametrize("at", [0, 8, 12, 16, 47, 48, 80, 83, 88, 96, 100, 104, 112, 128, 144, 4096, 12287])
def test_d32_one_flipped_bit_is_noticed(tier: FilesTier, at: int) -> None:
    put(tier)
    path = tier.path(KEY)
    raw = bytearray(path.read_bytes())
    assert not isinstance(_verdict(tier), str)
    raw[at] ^= 1
    path.write_bytes(raw)
    assert isinstance(_verdict(tier), str)


def test_a_record_under_another_key_is_noticed(tier: FilesTier) -> None:
    put(tier, 0)
    put(tier, 1)
    tier.path(KEY).write_bytes(tier.path(CHAIN.keys[1]).read_bytes())
    assert _verdict(tier) == "another block's record"


def test_d10_a_planted_pickle_is_corrupt_and_never_runs(tier: FilesTier, tmp_path: Path) -> None:
    trap = tmp_path / "ran"

    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (os.mkdir, (str(trap),))

    planted = pickle.dumps(Attack())
    put(tier)
    for raw in (planted, planted.ljust(RECORD_BYTES, b"\0")):
        tier.path(KEY).write_bytes(raw)
        assert isinstance(_verdict(tier), str)
        list(tier.scan())
        assert not trap.exists()
    pickle.loads(planted)  # noqa: S301 - the control: the trap does work
    assert trap.is_dir()


@pytest.mark.parametrize("plant", [os.mkdir, os.mkfifo], ids=["a directory", "a pipe"])
def test_what_is_no_file_is_corrupt_and_hangs_nobody(tier: FilesTier, plant: Callable[[Path], None]) -> None:
    put(tier)
    tier.path(KEY).unlink()
    plant(tier.path(KEY))
    assert tier.contains([KEY]) == [False]
    assert get(tier) is Fate.CORRUPT
    assert list(tier.scan()) == []
    assert tier.direct, "what is no file says nothing about direct I/O"


# Links.


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to("disk")
    tier = FilesTier(tmp_path / "cache")
    put(tier)
    assert get(tier) is Fate.OK
    assert (tmp_path / "disk" / record_path(KEY)).is_file()


def test_a_link_for_a_record_is_corrupt_and_only_the_link_goes(tier: FilesTier, tmp_path: Path) -> None:
    put(tier)
    outside = tmp_path / "outside"
    outside.write_bytes(tier.path(KEY).read_bytes())
    before = outside.stat().st_mtime_ns
    tier.path(KEY).unlink()
    tier.path(KEY).symlink_to(outside)
    assert tier.contains([KEY]) == [False]
    assert get(tier) is Fate.CORRUPT
    assert list(tier.scan()) == []
    put(tier)
    assert not tier.path(KEY).is_symlink()
    tier.path(KEY).unlink()
    tier.path(KEY).symlink_to(outside)
    assert tier.delete([KEY])[0].fate is Fate.OK
    assert outside.stat().st_mtime_ns == before


@pytest.mark.parametrize("up", [0, 1], ids=["the folder of records", "the folder of the scope"])
def test_a_link_for_a_folder_leads_nowhere(tier: FilesTier, tmp_path: Path, up: int) -> None:
    put(tier)
    folder = tier.path(KEY).parents[up]
    outside = tmp_path / "outside"
    folder.rename(outside)
    leftover = outside / tier.path(KEY).parent.relative_to(folder) / ".00000000-1-00000000-1.tmp"
    leftover.touch()
    os.utime(leftover, (0, 0))
    folder.symlink_to(outside)
    before = {path: path.stat().st_mtime_ns for path in outside.rglob("*")}
    assert get(tier) is Fate.MISSING
    assert tier.write([KEY], [record(CHAIN, fill=9)])[0].fate is Fate.FAILED
    assert tier.delete([KEY])[0].fate is Fate.MISSING
    assert list(tier.scan()) == []
    assert {path: path.stat().st_mtime_ns for path in outside.rglob("*")} == before
    folder.unlink()
    outside.rename(folder)
    assert get(tier) is Fate.OK, "the control: the record was sound all the time"


# The directory as a whole.


def test_foreign_files_are_left_alone(tier: FilesTier, root: Path) -> None:
    put(tier)
    folder = tier.path(KEY).parent
    foreign = [
        root / "notes.txt",
        root / "ab" / "x.kv",
        folder / "README",
        folder / "x.kv",
        folder / ".x.tmp",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
        os.utime(path, (0, 0))
    assert [one.key for one in tier.scan()] == [KEY]
    tier.delete(list(CHAIN.keys))
    assert [path.read_text() for path in foreign] == ["mine"] * len(foreign)


@pytest.mark.parametrize("when", ["removed", "emptied", "another format"])
def test_a_directory_that_went_away_does_not_grow_back_and_is_used_again_when_it_returns(
    tier: FilesTier, root: Path, tmp_path: Path, when: str
) -> None:
    put(tier)
    root.rename(tmp_path / "away")
    if when != "removed":
        root.mkdir()
    if when == "another format":
        (root / FORMAT_NAME).write_text("tiercel-files 2\n")
    held = sorted(root.rglob("*"))
    assert tier.contains([KEY]) == [False]
    assert get(tier) is Fate.FAILED
    assert tier.write([KEY], [record(CHAIN)])[0].fate is Fate.FAILED
    assert tier.delete([KEY])[0].fate is Fate.FAILED
    with pytest.raises(OSError, match=r"No such file|no longer a cache"):
        list(tier.scan())
    tier.usage()
    assert root.exists() == (when != "removed")
    assert sorted(root.rglob("*")) == held
    if root.exists():
        for path in held:
            path.unlink()
        root.rmdir()
    (tmp_path / "away").rename(root)
    assert get(tier) is Fate.OK
    put(tier, 1)


def test_a_folder_that_was_cleared_meanwhile_is_made_again(
    tier: FilesTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = os.open
    cleared: list[str] = []

    def racing(path: str, flags: int, *args: int, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT and not cleared:
            cleared.append(path)
            tier.path(KEY).parent.rmdir()
            tier.path(KEY).parents[1].rmdir()
        return create(path, flags, *args, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", racing)
    put(tier)
    assert cleared
    assert get(tier) is Fate.OK


# Dates.


def test_parents_are_dated_younger_than_children_and_so_they_stay_when_read(
    tier: FilesTier, root: Path
) -> None:
    keys, wrote = records(CHAIN)
    for key, one in zip(keys, wrote, strict=True):
        tier.write([key], [one])
        time.sleep(0.02)
    assert _youngest_first(FilesTier(root)) == keys
    for key in keys:
        os.utime(tier.path(key), (0, 0))
    for key in keys:
        assert get(tier, key) is Fate.OK
        time.sleep(0.02)
    assert _youngest_first(FilesTier(root)) == keys


def test_what_was_read_is_younger_than_what_was_not_after_a_restart(tier: FilesTier, root: Path) -> None:
    keys, wrote = records(CHAIN)
    tier.write(keys, wrote)
    for key in keys:
        os.utime(tier.path(key), (1e9, 1e9))
    get(tier, keys[5])
    assert _youngest_first(FilesTier(root))[0] == keys[5]


@pytest.mark.parametrize("ahead_s", [-1e9, 1e6, 1e9], ids=["long ago", "days ahead", "years ahead"])
def test_a_date_of_a_clock_that_was_wrong_is_mended_by_the_next_read(tier: FilesTier, ahead_s: float) -> None:
    put(tier)
    os.utime(tier.path(KEY), (time.time() + ahead_s,) * 2)
    get(tier)
    (found,) = tier.scan()
    assert abs(found.used_s - time.time()) < 60


def test_a_fresh_date_is_not_written_again(tier: FilesTier) -> None:
    put(tier)
    before = tier.path(KEY).stat().st_mtime_ns
    get(tier)
    assert tier.path(KEY).stat().st_mtime_ns == before


def test_a_depth_from_a_damaged_header_cannot_overflow_a_date(tier: FilesTier) -> None:
    made = record(CHAIN)
    made[96:100] = b"\xff\xff\xff\xff"
    assert tier.write([KEY], [made])[0].fate is Fate.OK
    assert get(tier) is Fate.OK
    (found,) = tier.scan()
    assert time.time() - found.used_s < 3600, "so old that a file being written would pass for a leftover"


# Leftovers.


def test_leftovers_of_dead_writers_go_and_files_of_live_ones_stay(tier: FilesTier, root: Path) -> None:
    put(tier)
    folder = tier.path(KEY).parent
    host, _, process = temp_name()[1:].split("-")[:3]
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    ).stdout.strip()
    leftovers = {
        f".{host}-{dead}-{process}-1.tmp": "a process that is gone",
        f".{host}-{os.getpid()}-00000000-1.tmp": "an earlier process with our number",
        ".00000000-1-00000000-1.tmp": "another host, long ago",
        ".00000000-1-00000000-2.tmp": "another host, its clock long ahead",
    }
    live = [
        f".{host}-{os.getpid()}-{process}-9.tmp",
        f".{host}-1-{process}-1.tmp",
        ".00000000-1-00000000-3.tmp",
    ]
    for name in [*leftovers, *live]:
        (folder / name).touch()
    os.utime(folder / ".00000000-1-00000000-1.tmp", (0, 0))
    os.utime(folder / ".00000000-1-00000000-2.tmp", (time.time() + 1e6,) * 2)
    assert [one.key for one in FilesTier(root).scan()] == [KEY]
    assert sorted(path.name for path in temps(root)) == sorted(live)


# Direct I/O.


def test_direct_io_is_given_up_once_where_it_cannot_be_had(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    asked: list[int] = []
    control = fcntl.fcntl

    def refuse(fd: int, what: int, flags: int = 0) -> int:
        if what == fcntl.F_SETFL and flags & os.O_DIRECT:
            asked.append(fd)
            raise OSError(errno.EINVAL, "no direct I/O here")
        return control(fd, what, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    tier = FilesTier(root)
    assert tier.direct
    put(tier, 0)
    assert not tier.direct
    put(tier, 1)
    assert get(tier) is Fate.OK
    assert len(asked) == 1
    assert temps(root) == []


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_direct_io_refused_at_the_first_transfer_becomes_buffered(
    tier: FilesTier, root: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    import fcntl

    real = getattr(os, call)
    refused: list[int] = []

    def refuse(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "alignment")
        return int(real(fd, buffers, offset))

    monkeypatch.setattr(os, call, refuse)
    made = put(tier)
    into = buffer()
    assert tier.read([KEY], [into])[0].fate is Fate.OK
    assert bytes(into) == bytes(made)
    assert (len(refused), tier.direct) == (1, False)


def test_transfers_go_on_after_short_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwritev, os.preadv
    calls: list[int] = []

    def short(real: Callable[..., int]) -> Callable[..., int]:
        def call(fd: int, buffers: list[memoryview], offset: int) -> int:
            calls.append(offset)
            return real(fd, [buffers[0][:1000]], offset)

        return call

    monkeypatch.setattr(os, "pwritev", short(write))
    monkeypatch.setattr(os, "preadv", short(read))
    tier = FilesTier(tmp_path / "cache", direct=False)
    made = put(tier, fill=3)
    into = buffer()
    assert tier.read([KEY], [into])[0].fate is Fate.OK
    assert bytes(into) == bytes(made)
    assert len(calls) > 2


@pytest.mark.parametrize("call", ["pwritev", "utime", "close", "rename"])
@pytest.mark.parametrize(
    ("code", "fate"), [(errno.EIO, Fate.FAILED), (errno.ENOSPC, Fate.FULL), (errno.EDQUOT, Fate.FULL)]
)
def test_a_write_that_fails_at_any_step_leaves_nothing(
    tier: FilesTier, root: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, fate: Fate
) -> None:
    put(tier, 0, fill=1)
    with monkeypatch.context() as patch:
        fired = _fail(patch, call, code)
        (outcome,) = tier.write([KEY], [record(CHAIN, 0, fill=2)])
    assert fired
    assert outcome.fate is fate
    assert temps(root) == []
    into = buffer()
    assert tier.read([KEY], [into])[0].fate is Fate.OK
    assert into[HEADER_BYTES] == 1


@pytest.mark.parametrize("call", ["open", "fstat", "preadv"])
def test_a_read_that_fails_at_any_step_is_failed_and_no_descriptor_leaks(
    tier: FilesTier, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    put(tier)
    get(tier)
    held = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        fired = _fail(patch, call, errno.EIO)
        assert get(tier) is Fate.FAILED
    assert fired
    assert len(os.listdir("/proc/self/fd")) == held
    assert get(tier) is Fate.OK


def test_a_file_that_shrinks_while_it_is_read_is_corrupt(
    tier: FilesTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tier)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: real(fd, buffers, at + RECORD_BYTES - 4096))
    assert get(tier) is Fate.CORRUPT


def test_no_call_leaks_a_descriptor(tier: FilesTier, root: Path) -> None:
    held = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        put(tier)
        get(tier)
        tier.contains(list(CHAIN.keys))
        list(tier.scan())
        tier.read(list(CHAIN.keys), [buffer() for _ in CHAIN.keys])
        tier.delete(list(CHAIN.keys))
        tier.path(KEY).parent.rmdir()
        get(tier)
    assert len(os.listdir("/proc/self/fd")) == held


def test_transfer_reports_where_a_file_ends(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"x" * 4096)
    fd = os.open(path, os.O_RDONLY)
    try:
        assert Transfer(direct=True).read(fd, buffer(8192)) == 4096
    finally:
        os.close(fd)


def _verdict(tier: FilesTier) -> object:
    """What the store would make of the record: its header, or what is wrong with it."""
    into = buffer()
    (outcome,) = tier.read([KEY], [into])
    return verify(into, KEY) if outcome.fate is Fate.OK else outcome.reason


def _youngest_first(tier: FilesTier) -> list[BlockKey]:
    return [one.key for one in sorted(tier.scan(), key=lambda one: one.used_s, reverse=True)]


def _fail(patch: pytest.MonkeyPatch, call: str, code: int) -> list[str]:
    """Let the next `os.<call>` on a record fail; the list fills when it did."""
    real = getattr(os, call)
    fired: list[str] = []

    def failing(*args: object, **named: object) -> object:
        # Folders are opened on the way to every record: the fault is for the record itself.
        on_record = call != "open" or str(args[0]).endswith(".kv")
        if fired or not on_record or (call == "fstat" and not _is_record(args[0])):
            return real(*args, **named)
        if call == "close" and not _is_record(args[0]):
            return real(*args, **named)
        fired.append(call)
        if call == "close":
            real(*args, **named)
        raise OSError(code, os.strerror(code))

    patch.setattr(os, call, failing)
    return fired


def _is_record(fd: object) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}").endswith((".kv", ".tmp"))
