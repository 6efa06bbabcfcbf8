"""The vLLM connector: `TiercelConnector`, which vLLM loads by `kv_connector_module_path`."""

from tiercel.engines.vllm.connector import TiercelConnector

__all__ = ["TiercelConnector"]
