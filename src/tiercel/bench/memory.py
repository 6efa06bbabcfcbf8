"""The most memory that a group of processes held at once, looked up twice a second in /proc; of GPUs too.

Memory that processes share (an arena mapped by a daemon and its engines) counts once. A figure that cannot be
had is None, never a guess.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

_EVERY_S = 0.5
_GPU_EVERY = 4
_SMI_S = 5.0
_PROC = Path("/proc")


class Peak:
    """Watches processes and all that they start, in a thread of its own, while it is used as a context."""

    def __init__(self, pids: Callable[[], list[int]]) -> None:
        self._pids = pids
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bench-memory", daemon=True)
        self._smi = shutil.which("nvidia-smi")
        self.host_bytes: int | None = None
        self.gpu_bytes: int | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join(_SMI_S + _EVERY_S)

    def _watch(self) -> None:
        number = 0
        while True:
            family = descendants(self._pids())
            if (now := resident_bytes(family)) is not None:
                self.host_bytes = max(now, self.host_bytes or 0)
            used = _gpu_bytes(self._smi, family) if self._smi and number % _GPU_EVERY == 0 else None
            if used is not None:
                self.gpu_bytes = max(used, self.gpu_bytes or 0)
            number += 1
            if self._done.wait(_EVERY_S):
                return


def descendants(pids: Iterable[int]) -> set[int]:
    """`pids` and all that they started and is still there."""
    found = set(pids)
    if not found:
        return found
    parents: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            parents.setdefault(parent, []).append(int(entry.name))
    waiting = list(found)
    while waiting:
        for child in parents.get(waiting.pop(), []):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def _parent(entry: Path) -> int | None:
    try:
        # The name in parentheses may hold anything, spaces and parentheses too.
        return int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def resident_bytes(pids: Iterable[int]) -> int | None:
    """Resident memory of these processes, what they share counted once, as the largest; None for none."""
    own, shared, seen = 0, 0, False
    for pid in pids:
        fields = _status(pid)
        if "VmRSS" not in fields:
            continue
        seen = True
        shmem = fields.get("RssShmem", 0)
        own += fields["VmRSS"] - shmem
        shared = max(shared, shmem)
    return own + shared if seen else None


def _status(pid: int) -> dict[str, int]:
    try:
        lines = (_PROC / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    fields = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name in ("VmRSS", "RssShmem"):
            fields[name] = int(value.split()[0]) * 1024
    return fields


def _gpu_bytes(smi: str, pids: set[int]) -> int | None:
    """GPU memory of these processes; None where nvidia-smi does not say, such as in a container."""
    ask = [smi, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(ask, capture_output=True, text=True, timeout=_SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    used = None
    for line in told.splitlines():
        pid, _, mib = (part.strip() for part in line.partition(","))
        if pid.isdigit() and int(pid) in pids and mib.isdigit():
            used = (used or 0) + int(mib) * 2**20
    return used
