"""Settings of different sections that do not go together, or say nothing without another.

Only looks at what is configured: whether a model can do what is asked of it is for who loads it.
"""

from __future__ import annotations

from collections.abc import Mapping

from tiercel.config.schema import AttentionConfig, ModelConfig
from tiercel.config.sources import Assignment
from tiercel.config.units import format_bytes

POLICY, BUDGET, CHUNKS = "attention.policy", "attention.budget", "attention.chunks"
DEVICE_BUDGET = "model.kv_device_budget"


def check_attention(
    attention: AttentionConfig, model: ModelConfig, assigned: Mapping[str, Assignment]
) -> None:
    """Raise ConfigError for chunks where KV is not all at hand, and for a budget that nothing spends."""
    # Who says that the policy is `full` may have the budget of another one in a file, and need not clear it.
    if BUDGET in assigned and POLICY not in assigned:
        raise assigned[BUDGET].fail(
            f"{attention.budget:g} says nothing without {POLICY}; accepted: together with a policy, "
            "such as landmark"
        )
    if attention.chunks == "no":
        return
    others = []
    if attention.policy != "full":
        others.append(f"{POLICY} = {attention.policy}")
    if model.kv_device_budget_bytes is not None:
        others.append(f"{DEVICE_BUDGET} = {format_bytes(model.kv_device_budget_bytes)}")
    if others:
        raise assigned[CHUNKS].fail(
            f"'{attention.chunks}' does not go with {' and '.join(others)}, for chunks are moved where all "
            f"KV is at hand; accepted: {CHUNKS} = no, or neither a policy nor a device budget"
        )
