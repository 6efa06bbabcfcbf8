"""A cache directory that cannot be had, or no longer: users, permissions, formats, full disks.

What needs another user or a file system of its own runs in a child process, as root only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiercel.blocks import Chain, record_bytes
from tiercel.errors import TierError
from tiercel.memory import Arena
from tiercel.store import LaneOptions, TieredStore
from tiercel.testing.records import PAYLOAD_BYTES, RECORD_BYTES, chain, record
from tiercel.tiers import Fate, FilesTier
from tiercel.tiers.folder import FORMAT_NAME, FORMAT_TEXT

SOURCE = Path(__file__).parents[2]
STRANGER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
CHAIN = chain(8)
KEY = CHAIN.keys[0]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    # pytest keeps others out of its directories; the other user has to get as far as ours.
    for folder in tmp_path.parents:
        if folder.stat().st_uid == os.geteuid() and "pytest" in folder.name:
            folder.chmod(0o755)
    tmp_path.chmod(0o755)
    return tmp_path / "cache"


def as_stranger(script: str, *args: Path, uid: int = STRANGER, gid: int = STRANGER) -> list[str]:
    """Run `script`, with `root` the first of `args`, as another user, without a home; returns its lines."""
    for folder in args[0].parents:
        if not folder.stat().st_mode & 0o001:
            pytest.skip(f"needs a temporary directory that other users can enter, which {folder} is not")
    begin = f"""
    import os, sys
    sys.path[:0] = [{str(SOURCE / "src")!r}, {str(SOURCE)!r}]
    from pathlib import Path
    from tiercel.testing.records import buffer, chain, record
    from tiercel.errors import TierError
    from tiercel.tiers import FilesTier
    CHAIN = chain(8)
    KEY = CHAIN.keys[0]
    os.environ.pop("HOME", None)
    os.setgroups([])
    os.setgid({gid})
    os.setuid({uid})
    root = Path(sys.argv[1])
    """
    code = textwrap.dedent(begin) + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


OPEN = """
try:
    FilesTier(root)
    print("opened")
except TierError as fault:
    print(fault)
"""


# Refused at once, in one line.


def test_another_format_is_refused_and_left_as_it_is(root: Path) -> None:
    root.mkdir()
    (root / FORMAT_NAME).write_text("tiercel-files 2\nmore\n")
    with pytest.raises(TierError, match=r"format .*tiercel-files 2.*accepted is 'tiercel-files 1'") as caught:
        FilesTier(root)
    assert "\n" not in str(caught.value)
    assert (root / FORMAT_NAME).read_text() == "tiercel-files 2\nmore\n"


def test_a_directory_with_other_things_in_it_is_refused_and_left_as_it_is(root: Path) -> None:
    root.mkdir()
    (root / "thesis.txt").write_text("mine")
    with pytest.raises(TierError, match=f"cache directory {root}: not a Tiercel cache"):
        FilesTier(root)
    assert os.listdir(root) == ["thesis.txt"]


def test_a_directory_that_is_not_yet_a_cache_is_only_made_one_when_asked(root: Path) -> None:
    with pytest.raises(TierError, match=r"No such file or directory"):
        FilesTier(root, create=False)
    root.mkdir()
    with pytest.raises(TierError, match="not a Tiercel cache"):
        FilesTier(root, create=False)
    assert os.listdir(root) == []
    FilesTier(root)
    FilesTier(root, create=False)


def test_a_fresh_volume_and_a_start_that_was_cut_short_count_as_empty(root: Path) -> None:
    (root / "lost+found").mkdir(parents=True)
    (root / f".{FORMAT_NAME}-1-00000000").write_text("tierc")
    FilesTier(root)
    assert (root / FORMAT_NAME).read_text() == FORMAT_TEXT


def test_a_file_in_place_of_the_directory_is_refused(root: Path) -> None:
    root.write_text("mine")
    with pytest.raises(TierError, match=f"cache directory {root}: is not a directory"):
        FilesTier(root)
    assert root.read_text() == "mine"


@pytest.mark.parametrize("plant", [os.mkdir, os.mkfifo, lambda path: os.symlink("/etc/hostname", path)])
def test_an_odd_format_mark_is_one_line(root: Path, plant: object) -> None:
    root.mkdir()
    assert callable(plant)
    plant(root / FORMAT_NAME)
    with pytest.raises(TierError, match=f"cache directory {root}: "):
        FilesTier(root)


@as_root
@pytest.mark.parametrize(
    ("mode", "made"),
    [(0o750, True), (0o750, False), (0o555, True), (0o555, False), (0o755, True)],
    ids=["0750 of another user", "0750 and new", "read-only", "read-only and new", "not ours to write"],
)
def test_d52_a_user_without_a_home_gets_one_line_with_directory_and_uid(
    root: Path, mode: int, made: bool
) -> None:
    if made:
        FilesTier(root)
    else:
        root.mkdir()
    root.chmod(mode)
    lines = as_stranger(OPEN, root)
    assert len(lines) == 1
    assert str(root) in lines[0]
    assert f"user id {STRANGER}" in lines[0]
    # The control: the same user, given the directory, opens it.
    for path in (root, *root.iterdir()):
        os.chown(path, STRANGER, STRANGER)
    root.chmod(0o700)
    assert as_stranger(OPEN, root) == ["opened"]


@as_root
def test_d52_a_directory_that_cannot_be_made_is_one_line(root: Path) -> None:
    root.mkdir(mode=0o755)
    (line,) = as_stranger(OPEN.replace("root", "root / 'a' / 'b'"), root)
    assert str(root / "a" / "b") in line
    assert f"user id {STRANGER}" in line


@as_root
def test_d52_a_group_shares_a_cache_whose_directory_it_may_write_and_nobody_else_does(root: Path) -> None:
    root.mkdir()
    os.chown(root, 0, STRANGER)
    root.chmod(0o2770)
    tier = FilesTier(root)
    tier.write([KEY], [record(CHAIN)])
    script = """
    tier = FilesTier(root)
    print(tier.read([KEY], [buffer()])[0].fate.value)
    print(tier.write([CHAIN.keys[1]], [record(CHAIN, 1)])[0].fate.value)
    print(tier.write([KEY], [record(CHAIN)])[0].fate.value)
    print(tier.delete([KEY])[0].fate.value)
    """
    os.utime(tier.path(KEY), (0, 0))
    assert as_stranger(script, root, uid=STRANGER + 1) == ["ok"] * 4
    everything = [path for path in root.rglob("*") if path.name != FORMAT_NAME]
    assert all(path.stat().st_mode & 0o007 == 0 for path in everything)
    assert tier.read([CHAIN.keys[1]], [memoryview(bytearray(RECORD_BYTES))])[0].fate is Fate.OK


def test_a_cache_of_our_own_is_for_our_eyes_only(root: Path) -> None:
    old = os.umask(0)
    try:
        tier = FilesTier(root)
        tier.write([KEY], [record(CHAIN)])
    finally:
        os.umask(old)
    folders = [tier.path(KEY).parent, tier.path(KEY).parents[1], root]
    assert [oct(path.stat().st_mode & 0o777) for path in folders] == ["0o700"] * 3
    assert oct(tier.path(KEY).stat().st_mode & 0o777) == "0o600"


# Lost while running.


@as_root
def test_permission_lost_while_running_is_failed_and_comes_back(root: Path) -> None:
    root.mkdir()
    os.chown(root, STRANGER, STRANGER)
    script = """
    def show(label):
        fates = [tier.read([KEY], [buffer()]), tier.write([CHAIN.keys[1]], [record(CHAIN, 1)])]
        print(label, *[outcomes[0].fate.value for outcomes in fates], tier.contains([KEY]))

    tier = FilesTier(root)
    tier.write([KEY], [record(CHAIN)])
    show("before")
    for path, label in ((root, "root"), (tier.path(KEY).parent, "folder")):
        path.chmod(0)
        show(label)
        try:
            print(len(list(tier.scan())))
        except OSError as fault:
            print("scan", type(fault).__name__)
        path.chmod(0o700)
        show("after")
    tier.path(KEY).chmod(0)
    show("file")
    """
    folder_of_both = CHAIN.keys[0][8] == CHAIN.keys[1][8]
    assert not folder_of_both
    assert as_stranger(script, root) == [
        "before ok ok [True]",
        "root failed failed [False]",
        "scan PermissionError",
        "after ok ok [True]",
        "folder failed ok [False]",
        "scan PermissionError",
        "after ok ok [True]",
        "file failed ok [True]",
    ]


@pytest.fixture
def small_disk(root: Path) -> Path:
    """A file system of about ten records."""
    root.mkdir()
    size_kib = 10 * RECORD_BYTES // 1024 + 64
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tiercel-test", str(root)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"needs a small file system of its own; mounting one: {done.stderr.strip()}")
    return root


@pytest.fixture
def disk(small_disk: Path) -> Iterator[Path]:
    yield small_disk
    subprocess.run(["umount", "--lazy", str(small_disk)], check=True)


@pytest.mark.parametrize("direct", [True, False])
def test_a_full_disk_is_full_leaves_nothing_half_written_and_takes_more_when_there_is_room(
    disk: Path, direct: bool
) -> None:
    tier = FilesTier(disk, direct=direct)
    many = chain(40)
    keys, wrote = list(many.keys), [record(many, index) for index in range(40)]
    fates = [outcome.fate for outcome in tier.write(keys, wrote)]
    assert fates[0] is Fate.OK
    assert fates[-1] is Fate.FULL
    assert set(fates) == {Fate.OK, Fate.FULL}
    there = [key for key, fate in zip(keys, fates, strict=True) if fate is Fate.OK]
    assert sorted(one.key for one in tier.scan()) == sorted(there)
    assert list(disk.rglob("*.tmp")) == []
    assert all(one.record_bytes == RECORD_BYTES for one in tier.scan())
    free_bytes = tier.usage().free_bytes
    assert free_bytes is not None
    assert free_bytes < RECORD_BYTES + 16384

    large = record(many, 39, payload_bytes=40 * PAYLOAD_BYTES)
    assert len(large) == record_bytes(40 * PAYLOAD_BYTES)
    assert tier.write([keys[39]], [large])[0].fate is Fate.FULL
    assert list(disk.rglob("*.tmp")) == []
    assert tier.contains([keys[39]]) == [False]

    tier.delete(there[:4])
    assert tier.write([keys[39]], [wrote[39]])[0].fate is Fate.OK


def test_a_disk_that_was_unmounted_is_not_written_to_beneath(disk: Path) -> None:
    tier = FilesTier(disk)
    assert tier.write([KEY], [record(CHAIN)])[0].fate is Fate.OK
    subprocess.run(["umount", str(disk)], check=True)
    try:
        assert tier.write([KEY], [record(CHAIN)])[0].fate is Fate.FAILED
        assert tier.contains([KEY]) == [False]
        assert os.listdir(disk) == []
    finally:
        subprocess.run(["mount", "-t", "tmpfs", "tiercel-test", str(disk)], check=True)


def test_a_store_outlives_its_directory_and_uses_it_again_when_it_is_back(root: Path, tmp_path: Path) -> None:
    with TieredStore(Arena(RECORD_BYTES, 16, reserved=2), [(FilesTier(root), LaneOptions())]) as store:
        store_chain(store, CHAIN)
        assert store.flush(10)
        other = chain(14, first=1000)
        store_chain(store, other)  # takes RAM from the first chain
        assert store.lookup(CHAIN, 0).sources[-1:] == ("disk",)
        root.rename(tmp_path / "away")
        with store.acquire(CHAIN, deadline_s=10) as lease:
            assert [block.index for block in lease if block.source == "disk"] == []
        assert store.stats().tiers[0].counters.failed > 0
        store_chain(store, chain(4, first=2000))
        store.flush(10)
        assert not root.exists()
        (tmp_path / "away").rename(root)
        until_s = time.monotonic() + 60
        while store.stats().tiers[0].breaker == "open":
            assert time.monotonic() < until_s, "the directory is back, and not tried"
            time.sleep(0.05)
        later = chain(4, first=3000)
        store_chain(store, later)
        assert store.flush(10)
        assert all(FilesTier(root).contains(list(later.keys)))
    with TieredStore(Arena(RECORD_BYTES, 16, reserved=2), [(FilesTier(root), LaneOptions())]) as store:
        assert store.scanned(10)
        with store.acquire(CHAIN, deadline_s=10) as lease:
            assert [block.index for block in lease] == list(range(8)), "something was lost"


def store_chain(store: TieredStore, one: Chain) -> None:
    with store.begin_store(one, 0, len(one), PAYLOAD_BYTES, deadline_s=10) as lease:
        for block in lease:
            block.payload[:] = bytes([block.index]) * PAYLOAD_BYTES
        lease.commit()
