"""The vLLM connector: `TiercelConnector`, which vLLM loads by `kv_connector_module_path`.

Loaded when asked for: what of vLLM is supported can be told without importing vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercel.engines.vllm.connector import TiercelConnector

__all__ = ["TiercelConnector"]


def __getattr__(name: str) -> Any:  # as a module's __getattr__ is typed
    if name != "TiercelConnector":
        raise AttributeError(name)
    from tiercel.engines.vllm.connector import TiercelConnector

    return TiercelConnector
