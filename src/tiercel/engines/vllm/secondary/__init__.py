"""Tiercel's tiers below vLLM's own CPU tier: what `secondary_tiers` of its `OffloadingConnector` loads."""

from tiercel.engines.vllm.secondary.tier import TiercelTier

__all__ = ["TiercelTier"]
