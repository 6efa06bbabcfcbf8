"""The machine a measurement ran on and how busy it was, as lines: without it a figure says nothing."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from tiercel import __version__


def machine_facts(packages: Sequence[str]) -> list[tuple[str, str]]:
    """The processor, its cores and load, memory and software, with the versions of those `packages` that are
    installed. Shows nothing that it cannot find out.
    """
    facts = [("processor", _processor()), ("cores", _cores())]
    if memory := _memory_gib():
        facts.append(("memory", memory))
    facts.append(("load before the start", f"{os.getloadavg()[0]:.1f} processes (1 minute)"))
    python = f"Python {'.'.join(map(str, sys.version_info[:3]))}"
    system = f"{platform.system()} {platform.release().partition('-')[0]}"
    facts.append(("software", ", ".join([f"tiercel {__version__}", *_versions(packages), python, system])))
    return facts


def _versions(packages: Sequence[str]) -> list[str]:
    found = []
    for name in packages:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _cores() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{usable} usable by this process"


def _memory_gib() -> str:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return ""
    total = next((line for line in lines if line.startswith("MemTotal:")), "")
    return f"{int(total.split()[1]) / 2**20:.0f} GiB" if total else ""
