"""Tiercel: a content-addressed store of KV-cache blocks with tiers below the engine's own memory.

Importing the package loads nothing else: every part is imported from where it lives
(`tiercel.store`, `tiercel.geometry`, ...), so that a tool that only sizes a model never pays for torch.
"""

from __future__ import annotations

__version__ = "0.1.0"
