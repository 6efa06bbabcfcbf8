"""The arena: no slot has two owners, staging always has its share, what does not fit is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiercel.errors import MemoryLimitError
from tiercel.memory import Arena, ArenaKind, filesystem_free_bytes, host_limit


class ArenaMachine(RuleBasedStateMachine):
    @initialize(slots=st.integers(1, 8), reserved=st.integers(0, 7))
    def start(self, slots: int, reserved: int) -> None:
        self.arena = Arena(100, slots, reserved=min(reserved, slots - 1))
        self.kept: set[int] = set()
        self.staged: set[int] = set()
        self.written: dict[int, int] = {}
        self.serial = 0

    def own(self, slot: int, owners: set[int]) -> None:
        assert slot not in self.kept | self.staged, "two owners"
        assert 0 <= slot < self.arena.slots
        owners.add(slot)
        self.serial += 1
        self.written[slot] = self.serial % 256
        self.arena.view(slot)[:] = bytes([self.serial % 256]) * self.arena.slot_bytes

    @rule()
    def keep(self) -> None:
        slot = self.arena.allocate()
        full = len(self.kept) == self.arena.slots - self.arena.reserved or self.arena.free_slots == 0
        if slot is not None:
            self.own(slot, self.kept)
        else:
            assert full, "refused with room"

    @rule()
    def stage(self) -> None:
        free = self.arena.slots - len(self.kept) - len(self.staged)
        slot = self.arena.allocate(staging=True)
        assert (slot is not None) == (free > 0)
        if slot is not None:
            self.own(slot, self.staged)

    @precondition(lambda self: self.kept or self.staged)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.kept | self.staged)))
        assert self.arena.view(slot) == bytes([self.written[slot]]) * self.arena.slot_bytes, "views overlap"
        self.arena.free(slot)
        self.kept.discard(slot)
        self.staged.discard(slot)

    @invariant()
    def counts_are_right(self) -> None:
        if not hasattr(self, "arena"):
            return
        assert len(self.kept) <= self.arena.slots - self.arena.reserved
        assert self.arena.free_slots == self.arena.slots - len(self.kept) - len(self.staged)


ArenaMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestArena = ArenaMachine.TestCase


def test_a_slot_is_freed_once() -> None:
    arena = Arena(10, 2)
    slot = arena.allocate()
    assert slot is not None
    arena.free(slot)
    with pytest.raises(AssertionError):
        arena.free(slot)


@pytest.mark.parametrize(("slot_bytes", "slots", "reserved"), [(0, 1, 0), (1, 0, 0), (1, 2, 2), (1, 2, -1)])
def test_a_senseless_arena_is_refused(slot_bytes: int, slots: int, reserved: int) -> None:
    with pytest.raises(MemoryLimitError):
        Arena(slot_bytes, slots, reserved=reserved)


CHILD = """
import mmap, os, sys
seen = mmap.mmap(int(sys.argv[1]), 0)
assert seen[4096:4101] == b"hello", seen[4096:4101]
seen[0:3] = b"yes"
"""


@pytest.mark.parametrize("in_directory", [False, True])
def test_a_shared_arena_is_the_same_memory_in_another_process(tmp_path: Path, in_directory: bool) -> None:
    arena = Arena(4096, 4, kind=ArenaKind.SHARED, shared_dir=tmp_path if in_directory else None)
    arena.view(1)[:5] = b"hello"
    child = [sys.executable, "-c", CHILD, str(arena.fileno())]
    subprocess.run(child, pass_fds=[arena.fileno()], check=True)
    assert arena.view(0)[:3] == b"yes"
    assert not list(tmp_path.iterdir()), "no name is left behind"
    arena.close()
    assert arena.fileno() == -1


def test_an_arena_larger_than_the_host_is_refused_with_both_numbers() -> None:
    wanted = host_limit().available_bytes * 2
    with pytest.raises(MemoryLimitError, match=str(wanted // 4096 * 4096)) as refused:
        Arena(4096, wanted // 4096)
    assert "bytes are left" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.fixture
def small_shm(tmp_path: Path) -> Iterator[Path]:
    """A real shared-memory file system of 64 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", tmp_path], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"this host lets nobody mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_shared_memory_too_small_is_said_before_a_page_is_touched(small_shm: Path) -> None:
    """D28."""
    free = filesystem_free_bytes(small_shm)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryLimitError) as refused:
        Arena(1 << 20, 1024, kind=ArenaKind.SHARED, shared_dir=small_shm)
    assert str(1 << 30) in str(refused.value)
    assert str(free) in str(refused.value)
    assert filesystem_free_bytes(small_shm) == free
    assert len(os.listdir("/proc/self/fd")) == descriptors
    fits = Arena(1 << 20, 32, kind=ArenaKind.SHARED, shared_dir=small_shm)
    assert filesystem_free_bytes(small_shm) <= free - (32 << 20), "its room cannot be taken from under it"
    fits.view(31)[:] = bytes(1 << 20)
    fits.close()


def test_a_missing_shared_directory_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MemoryLimitError, match="No such file"):
        Arena(4096, 1, kind=ArenaKind.SHARED, shared_dir=tmp_path / "none")


def test_room_that_vanishes_between_check_and_use_leaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fired = []

    def full(*_: object) -> None:
        fired.append(True)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryLimitError, match="No space left"):
        Arena(4096, 1, kind=ArenaKind.SHARED, shared_dir=tmp_path)
    assert fired
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not list(tmp_path.iterdir())


def test_a_view_outlives_the_arena_and_no_new_one_is_given() -> None:
    arena = Arena(4096, 2)
    view = arena.view(0)
    arena.close()
    arena.close()
    view[:3] = b"abc"
    assert view[:3] == b"abc"
    with pytest.raises(ValueError):
        arena.view(1)


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_pages_are_touched_when_used_or_ahead_by_prefault() -> None:
    before = resident_pages()
    arena = Arena(1 << 20, 64)
    assert resident_pages() - before < 4096, "untouched"
    arena.prefault()
    assert resident_pages() - before > 12_000
    arena.close()
    arena.prefault()
