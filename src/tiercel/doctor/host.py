"""The host: memory and its limits, shared memory, NUMA, locked memory, open files, the clock.

Each check is a judgement of plain numbers; `read_host` collects them. Nothing is changed; one page of a
memory file is touched.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

from tiercel.config import human_bytes
from tiercel.config.schema import MIB
from tiercel.doctor.finding import Finding, fail, ok, skip, warn
from tiercel.memory.limits import MemoryLimit, filesystem_free_bytes, memory_limits

# Beside the arena there is the engine, the index (180 bytes a block) and, for tiers without direct I/O, the
# page cache.
_ARENA_SHARE_MAX = 0.8
# What containers get unless told otherwise.
_SHM_DEFAULT_BYTES = 64 * MIB
_FILES_MIN = 1024
# A date before the first release is a clock that was never set.
_EARLIEST_S = 1_735_689_600.0
_STA_UNSYNC = 0x0040


@dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node and its free memory."""

    name: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Host:
    """What the checks judge. None: there is no such thing here, or it does not tell."""

    limits: tuple[MemoryLimit, ...]
    shm_bytes: tuple[int, int] | None
    memfd_fault: str
    nodes: tuple[Node, ...]
    locked_bytes: float
    open_files: float
    now_s: float
    synchronised: bool | None


def read_host(proc: Path = Path("/proc"), sys: Path = Path("/sys"), shm: Path = Path("/dev/shm")) -> Host:
    """Read them off. Raises nothing."""
    return Host(
        limits=tuple(memory_limits(proc, sys / "fs" / "cgroup")),
        shm_bytes=_filesystem(shm),
        memfd_fault=_memfd_fault(),
        nodes=_nodes(sys / "devices" / "system" / "node"),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        now_s=time.time(),
        synchronised=_synchronised(),
    )


def memory(host: Host, ram_bytes: int, held_bytes: int) -> Finding:
    """Whether the arena fits what the host has left; `held_bytes` a running daemon has taken already."""
    return _fits(host.limits[0], "available on this host", ram_bytes, held_bytes)


def cgroup(host: Host, ram_bytes: int, held_bytes: int) -> Finding:
    """Whether the arena fits the tightest memory limit of our control groups."""
    if len(host.limits) < 2:
        return skip("no control group limits memory here")
    tightest = min(host.limits[1:], key=lambda limit: limit.available_bytes)
    if held_bytes:
        # Who touches memory pays for it, and that is the daemon, in a group of its own.
        return ok(f"{human_bytes(tightest.available_bytes)} left to this process ({tightest.source})",
                  tightest.available_bytes, "bytes")  # fmt: skip
    return _fits(tightest, f"left ({tightest.source})", ram_bytes, 0)


def _fits(limit: MemoryLimit, what: str, ram_bytes: int, held_bytes: int) -> Finding:
    left = limit.available_bytes
    said = f"{human_bytes(left)} {what}"
    if held_bytes:
        return ok(f"{said}; the daemon's arena of {human_bytes(held_bytes)} is taken", left, "bytes")
    said += f"; blocks want {human_bytes(ram_bytes)}"
    if ram_bytes > left:
        advice = "lower ram.size or a tier in memory, or raise the limit: the start would be refused"
        return fail(said, advice, left, "bytes")
    if ram_bytes > left * _ARENA_SHARE_MAX:
        return warn(said, "lower ram.size: engines and the index need memory beside the arena", left, "bytes")
    return ok(said, left, "bytes")


def shared_memory(host: Host) -> Finding:
    """Room in /dev/shm: not ours to need, but engines with several processes do."""
    if host.shm_bytes is None:
        return warn("there is no /dev/shm", "Tiercel does without; engines of several processes do not")
    free, total = host.shm_bytes
    said = f"/dev/shm has {human_bytes(free)} of {human_bytes(total)} free"
    if total <= _SHM_DEFAULT_BYTES:
        return warn(said, "Tiercel does without; for an engine's workers give --shm-size or an emptyDir",
                    free, "bytes")  # fmt: skip
    return ok(said, free, "bytes")


def memory_file(host: Host) -> Finding:
    """Whether a daemon can share its arena, which is an anonymous memory file."""
    if host.memfd_fault:
        return fail(
            f"memory files do not work here: {host.memfd_fault}",
            "allow memfd_create, ftruncate and mmap (seccomp); without them there is no daemon",
        )
    return ok("memory files (memfd) work")


def numa(host: Host, ram_bytes: int) -> Finding:
    """Whether the arena fits one NUMA node; across nodes copies are slower."""
    if len(host.nodes) < 2:
        return ok("1 NUMA node", 1, "nodes") if host.nodes else skip("this kernel tells no NUMA nodes")
    largest = max(host.nodes, key=lambda node: node.free_bytes)
    said = f"{len(host.nodes)} NUMA nodes, {human_bytes(largest.free_bytes)} free on {largest.name}"
    if ram_bytes > largest.free_bytes:
        advice = "the arena will span nodes: lower ram.size, or start with numactl --interleave=all"
        return warn(said, advice, len(host.nodes), "nodes")
    return ok(f"{said}; start daemon and engine on the GPU's node (numactl)", len(host.nodes), "nodes")


def locked_memory(host: Host, ram_bytes: int, rdma: bool) -> Finding:
    """The limit for locked memory, which registering memory for RDMA counts against."""
    if math.isinf(host.locked_bytes):
        return ok("no limit on locked memory", None)
    said = f"{human_bytes(host.locked_bytes)} of memory may be locked (ulimit -l)"
    if rdma and host.locked_bytes < ram_bytes:
        advice = "RDMA registers the arena: ulimit -l unlimited (systemd: LimitMEMLOCK=infinity)"
        return warn(said, advice, host.locked_bytes, "bytes")
    return ok(f"{said}; no tier here needs more", host.locked_bytes, "bytes")


def open_files(host: Host) -> Finding:
    """Descriptors: one per lease of an engine, and those of the tiers."""
    if math.isinf(host.open_files):
        return ok("no limit on open files", None)
    said = f"{host.open_files:,.0f} files may be open (ulimit -n)"
    if host.open_files < _FILES_MIN:
        return warn(said, "ulimit -n 8192 (systemd: LimitNOFILE=8192)", host.open_files, "files")
    return ok(said, host.open_files, "files")


def clock(host: Host) -> Finding:
    """Whether the clock can be right: records are dated by it. Object stores refuse one that is far off."""
    said = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(host.now_s))
    if host.now_s < _EARLIEST_S:
        return fail(said, "set the clock: records are dated by it", host.now_s, "s since 1970")
    how = {True: ", kept in step", False: ", not known to be kept in step", None: ""}[host.synchronised]
    return ok(said + how, host.now_s, "s since 1970")


def _filesystem(directory: Path) -> tuple[int, int] | None:
    try:
        seen = os.statvfs(directory)
        return filesystem_free_bytes(directory), seen.f_blocks * seen.f_frsize
    except OSError:
        return None


def _memfd_fault() -> str:
    try:
        fd = os.memfd_create("tiercel-doctor", os.MFD_CLOEXEC)
    except OSError as fault:
        return fault.strerror or str(fault)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        with mmap.mmap(fd, mmap.PAGESIZE, flags=mmap.MAP_SHARED) as page:
            page[0] = 1
    except (OSError, ValueError) as fault:
        return str(fault)
    finally:
        os.close(fd)
    return ""


def _nodes(folder: Path) -> tuple[Node, ...]:
    nodes = []
    for path in sorted(folder.glob("node[0-9]*")):
        try:
            lines = (path / "meminfo").read_text().splitlines()
            free = next(int(line.split()[-2]) * 1024 for line in lines if "MemFree:" in line)
        except (OSError, StopIteration, ValueError, IndexError):
            continue
        nodes.append(Node(path.name, free))
    return tuple(nodes)


def _limit(which: int) -> float:
    soft, _ = resource.getrlimit(which)
    return math.inf if soft == resource.RLIM_INFINITY else float(soft)


def _synchronised() -> bool | None:
    """Whether the kernel says that somebody keeps its clock in step; None where it does not say."""
    # `struct timex`: modes, then offset, freq, maxerror, esterror (longs), then status. Larger than any.
    state = (ctypes.c_long * 64)()
    try:
        if ctypes.CDLL(None, use_errno=True).adjtimex(state) < 0:
            return None
    except (OSError, AttributeError):
        return None
    status = ctypes.cast(ctypes.byref(state, 5 * ctypes.sizeof(ctypes.c_long)), ctypes.POINTER(ctypes.c_int))
    return not status[0] & _STA_UNSYNC
