"""What the store decides by: what computing costs, what loading costs, and which of the two is faster."""

from tiercel.store.policy.choose import Choice, Prompt, choose
from tiercel.store.policy.prefill import PrefillCost, PrefillEstimator
from tiercel.store.policy.speed import TierSpeed

__all__ = ["Choice", "PrefillCost", "PrefillEstimator", "Prompt", "TierSpeed", "choose"]
