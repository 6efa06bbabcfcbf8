"""What every thread of ours inside vLLM does first."""

from __future__ import annotations

import contextlib
import os


def leave_pinned_core() -> None:
    """vLLM pins its threads to cores, and threads inherit that: ours may run wherever the process may."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
