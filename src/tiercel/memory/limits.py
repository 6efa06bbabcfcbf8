"""How much memory this process may take: host, cgroup (v1 and v2) and a shared-memory file system.

Only reads; `tiercel.memory.arena` asks before it touches a page, so that a cache that does not fit is
a sentence at start and not an out-of-memory kill an hour later.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED_BYTES = 1 << 60
_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The tightest bound on new memory, in bytes, and what sets it."""

    available_bytes: int
    source: str


def host_limit(proc: Path = _PROC, cgroup: Path = _CGROUP) -> MemoryLimit:
    """The smallest of the host's available memory and the free room of this process' cgroups."""
    return min(memory_limits(proc, cgroup), key=lambda limit: limit.available_bytes)


def memory_limits(proc: Path = _PROC, cgroup: Path = _CGROUP) -> list[MemoryLimit]:
    """The host's available memory, then the free room of each cgroup that bounds this process."""
    return [
        MemoryLimit(_meminfo_available(proc), "memory available on this host"),
        *_cgroup_limits(proc, cgroup),
    ]


def filesystem_free_bytes(directory: Path) -> int:
    """Bytes an unprivileged process may still write below `directory`."""
    seen = os.statvfs(directory)
    return seen.f_bavail * seen.f_frsize


def _meminfo_available(proc: Path) -> int:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return _UNLIMITED_BYTES
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _UNLIMITED_BYTES


def _cgroup_limits(proc: Path, cgroup: Path) -> list[MemoryLimit]:
    """Every memory cgroup from this process' own up to the root: any of them may be the tight one."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    limits: list[MemoryLimit] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon:
            continue
        if not controllers:
            limits += _walk_up(cgroup, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            limits += _walk_up(cgroup / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return limits


def _walk_up(root: Path, path: str, limit_name: str, usage_name: str) -> list[MemoryLimit]:
    found: list[MemoryLimit] = []
    folder = root / path.lstrip("/")
    while True:
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and limit < _UNLIMITED_BYTES:
            reclaimable = _inactive_file(folder)
            free = max(0, limit - max(0, (usage or 0) - reclaimable))
            found.append(MemoryLimit(free, f"cgroup limit of {limit} bytes in {folder / limit_name}"))
        if folder == root or root not in folder.parents:
            return found
        folder = folder.parent


def _inactive_file(folder: Path) -> int:
    """Page cache the kernel gives back under pressure; counted as usage, but free for us."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stats = dict(line.split()[:2] for line in lines if len(line.split()) >= 2)
    return int(stats.get("inactive_file", stats.get("total_inactive_file", "0")))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
