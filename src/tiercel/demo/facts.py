"""How it was measured: the machine, the software and the settings of a run, as lines to show."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

from tiercel import __version__
from tiercel.demo.outcome import Fact


def machine_facts() -> list[Fact]:
    """The processor, its cores and load, memory and software. Shows nothing that it cannot find out."""
    facts = [Fact("processor", _processor()), Fact("cores", _cores())]
    if memory := _memory_gib():
        facts.append(Fact("memory", memory))
    facts.append(Fact("load before the start", f"{os.getloadavg()[0]:.1f} processes (1 minute)"))
    versions = [f"{name} {metadata.version(name)}" for name in ("torch", "transformers")]
    python = f"Python {'.'.join(map(str, sys.version_info[:3]))}"
    facts.append(
        Fact("software", ", ".join([f"tiercel {__version__}", *versions, python, platform.system()]))
    )
    return facts


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
