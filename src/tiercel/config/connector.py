"""What vLLM is told so that it takes Tiercel's connector: the value of `--kv-transfer-config`."""

from __future__ import annotations

from collections.abc import Mapping


def kv_transfer_config(extra: Mapping[str, object]) -> dict[str, object]:
    """Return the whole object; `extra` are settings, dotted, or `config`, the path of a file with them."""
    return {
        "kv_connector": "TiercelConnector",
        "kv_connector_module_path": "tiercel.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(extra),
    }
