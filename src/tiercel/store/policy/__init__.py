"""What the store decides by: what computing and loading cost, which is faster, and what is worth keeping."""

from tiercel.store.policy.admission import SecondSight, Sight
from tiercel.store.policy.choose import Choice, Prompt, choose
from tiercel.store.policy.decision import Decision, DecisionLog, as_json, fell_short, why
from tiercel.store.policy.endurance import WriteBudget
from tiercel.store.policy.hints import HintError, Hints, parse_hints, parse_session, parse_ttl
from tiercel.store.policy.prefill import PrefillCost, PrefillEstimator
from tiercel.store.policy.speed import TierSpeed

__all__ = [
    "Choice",
    "Decision",
    "DecisionLog",
    "HintError",
    "Hints",
    "PrefillCost",
    "PrefillEstimator",
    "Prompt",
    "SecondSight",
    "Sight",
    "TierSpeed",
    "WriteBudget",
    "as_json",
    "choose",
    "fell_short",
    "parse_hints",
    "parse_session",
    "parse_ttl",
    "why",
]
