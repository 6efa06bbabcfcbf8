"""The demo: conversations over long real documents, resumed from RAM, from disk and after a restart.

It measures and compares; it never prints a number that it did not measure. `run_demo` is the way in.
"""

from __future__ import annotations

from tiercel.demo.run import run_demo
from tiercel.demo.settings import DemoSettings

__all__ = ["DemoSettings", "run_demo"]
