"""Each verdict on the host, where it fires and where it does not; and that a real host can be read."""

from __future__ import annotations

import math
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from tiercel.config.schema import GIB, KIB, MIB
from tiercel.doctor import Finding, Verdict, host
from tiercel.memory import MemoryLimit

WELL = host.Host(
    limits=(MemoryLimit(10 * GIB, "host"), MemoryLimit(8 * GIB, "cgroup")),
    shm_bytes=(3 * GIB, 4 * GIB),
    memfd_fault="",
    nodes=(host.Node("node0", 9 * GIB),),
    locked_bytes=math.inf,
    open_files=4096,
    now_s=1_800_000_000.0,
    synchronised=True,
)
TWO_NODES = (host.Node("node0", 3 * GIB), host.Node("node1", 4 * GIB))


def memory(seen: host.Host, ram: int = 2 * GIB, held: int = 0) -> Finding:
    return host.memory(seen, ram, held)


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (memory(WELL), "ok"),
        (memory(WELL, 9 * GIB), "warn"),
        (memory(WELL, 11 * GIB), "fail"),
        (memory(WELL, 11 * GIB, held=11 * GIB), "ok"),
        (host.cgroup(WELL, 2 * GIB, 0), "ok"),
        (host.cgroup(WELL, 7 * GIB, 0), "warn"),
        (host.cgroup(WELL, 9 * GIB, 0), "fail"),
        (host.cgroup(WELL, 9 * GIB, 9 * GIB), "ok"),
        (host.cgroup(replace(WELL, limits=WELL.limits[:1]), 9 * GIB, 0), "skip"),
        (host.shared_memory(WELL), "ok"),
        (host.shared_memory(replace(WELL, shm_bytes=(64 * MIB, 64 * MIB))), "warn"),
        (host.shared_memory(replace(WELL, shm_bytes=None)), "warn"),
        (host.memory_file(WELL), "ok"),
        (host.memory_file(replace(WELL, memfd_fault="Operation not permitted")), "fail"),
        (host.numa(WELL, 20 * GIB), "ok"),
        (host.numa(replace(WELL, nodes=TWO_NODES), 2 * GIB), "ok"),
        (host.numa(replace(WELL, nodes=TWO_NODES), 5 * GIB), "warn"),
        (host.numa(replace(WELL, nodes=()), 2 * GIB), "skip"),
        (host.locked_memory(WELL, 2 * GIB, rdma=True), "ok"),
        (host.locked_memory(replace(WELL, locked_bytes=64 * KIB), 2 * GIB, rdma=True), "warn"),
        (host.locked_memory(replace(WELL, locked_bytes=64 * KIB), 2 * GIB, rdma=False), "ok"),
        (host.open_files(WELL), "ok"),
        (host.open_files(replace(WELL, open_files=256)), "warn"),
        (host.clock(WELL), "ok"),
        (host.clock(replace(WELL, now_s=3600.0)), "fail"),
        (host.clock(replace(WELL, synchronised=False)), "ok"),
    ],
)
def test_each_verdict_fires_where_it_should_and_only_there(finding: Finding, verdict: str) -> None:
    assert finding.verdict == verdict
    # What is wrong comes with what to do, and what is right with nothing.
    assert bool(finding.advice) == (finding.verdict in (Verdict.WARN, Verdict.FAIL))
    assert "\n" not in finding.said + finding.advice


def test_this_host_can_be_read() -> None:
    seen = host.read_host()
    assert seen.limits[0].available_bytes > 0
    assert seen.memfd_fault == ""
    assert seen.now_s > 1.7e9


def test_limits_of_this_process_are_read_as_they_are() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(300, before[1]), before[1]))
    try:
        assert host.open_files(host.read_host()).verdict is Verdict.WARN
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_nodes_and_control_groups_are_read_from_their_files(tmp_path: Path) -> None:
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    files = {
        proc / "meminfo": "MemTotal: 8000000 kB\nMemAvailable: 4194304 kB\n",
        proc / "self" / "cgroup": "0::/kubepods/pod1\n",
        sys / "fs/cgroup/kubepods/pod1/memory.max": str(GIB),
        sys / "fs/cgroup/kubepods/pod1/memory.current": str(GIB // 4),
        sys / "devices/system/node/node0/meminfo": "Node 0 MemFree:  1048576 kB\n",
        sys / "devices/system/node/node1/meminfo": "Node 1 MemFree:  2097152 kB\n",
        sys / "devices/system/node/node2/meminfo": "nonsense\n",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    seen = host.read_host(proc, sys, tmp_path / "no-shm")
    assert [limit.available_bytes for limit in seen.limits] == [4 * GIB, GIB * 3 // 4]
    assert seen.nodes == (host.Node("node0", GIB), host.Node("node1", 2 * GIB))
    assert seen.shm_bytes is None
    assert host.cgroup(seen, GIB, 0).verdict is Verdict.FAIL
