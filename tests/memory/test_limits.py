"""Limits: whichever of host and control groups is tightest, in both layouts of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiercel.memory import host_limit

GIB = 1 << 30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {64 * GIB // 1024} kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/a/b\n")
    return tmp_path / "proc"


def test_without_control_groups_the_host_is_the_limit(tmp_path: Path, proc: Path) -> None:
    limit = host_limit(proc, tmp_path / "cgroup")
    assert limit.available_bytes == 64 * GIB
    assert "host" in limit.source


def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path, proc: Path) -> None:
    cgroup = tmp_path / "cgroup"
    write(cgroup / "a/b/memory.max", "max\n")
    write(cgroup / "a/memory.max", f"{8 * GIB}\n")
    write(cgroup / "a/memory.current", f"{3 * GIB}\n")
    write(cgroup / "a/memory.stat", f"anon 5\ninactive_file {GIB}\n")
    limit = host_limit(proc, cgroup)
    assert limit.available_bytes == 6 * GIB, "page cache that can go is room"
    assert str(8 * GIB) in limit.source
    write(cgroup / "a/b/memory.max", f"{2 * GIB}\n")
    assert host_limit(proc, cgroup).available_bytes == 2 * GIB


def test_a_group_over_its_limit_leaves_nothing_not_less(tmp_path: Path, proc: Path) -> None:
    write(tmp_path / "cgroup/memory.max", "100")
    write(tmp_path / "cgroup/memory.current", "500")
    assert host_limit(proc, tmp_path / "cgroup").available_bytes == 0


def test_the_old_layout_is_read_too(tmp_path: Path, proc: Path) -> None:
    write(proc / "self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/x/y\n")
    memory = tmp_path / "cgroup/memory"
    write(memory / "memory.limit_in_bytes", "9223372036854771712")
    write(memory / "x/y/memory.limit_in_bytes", str(4 * GIB))
    write(memory / "x/y/memory.usage_in_bytes", str(GIB))
    write(memory / "x/y/memory.stat", f"total_inactive_file {GIB // 2}\n")
    assert host_limit(proc, tmp_path / "cgroup").available_bytes == 4 * GIB - GIB // 2


def test_inside_a_container_the_root_it_sees_is_the_limit(tmp_path: Path, proc: Path) -> None:
    write(proc / "self/cgroup", "4:memory:/docker/0123\n")
    write(tmp_path / "cgroup/memory/memory.limit_in_bytes", str(GIB))
    assert host_limit(proc, tmp_path / "cgroup").available_bytes == GIB


@pytest.mark.parametrize("text", ["", "garbage\n", "0::/../../etc\n", "a:b\n\n"])
def test_odd_listings_are_no_reason_to_fail(tmp_path: Path, proc: Path, text: str) -> None:
    write(proc / "self/cgroup", text)
    write(tmp_path / "cgroup/memory.max", "nonsense")
    assert host_limit(proc, tmp_path / "cgroup").available_bytes == 64 * GIB


def test_without_any_listing_there_is_no_limit_to_name(tmp_path: Path) -> None:
    assert host_limit(tmp_path / "none", tmp_path / "none").available_bytes >= 1 << 60


def test_a_limit_too_large_for_the_group_is_told_by_this_host() -> None:
    assert 0 < host_limit().available_bytes < 1 << 60
