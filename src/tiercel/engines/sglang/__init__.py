"""The SGLang storage backend: `TiercelHiCache`, which SGLang loads as HiCache's backend `dynamic`.

Loaded when asked for: what of SGLang is supported can be told without importing SGLang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercel.engines.sglang.storage import TiercelHiCache

__all__ = ["TiercelHiCache"]


def __getattr__(name: str) -> Any:  # as a module's __getattr__ is typed
    if name != "TiercelHiCache":
        raise AttributeError(name)
    from tiercel.engines.sglang.storage import TiercelHiCache

    return TiercelHiCache
