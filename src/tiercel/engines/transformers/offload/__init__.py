"""Exact attention over KV that lies in host memory, with no more of it on the device than a budget allows."""

from __future__ import annotations

from tiercel.engines.transformers.offload.offload import Offload

__all__ = ["Offload"]
