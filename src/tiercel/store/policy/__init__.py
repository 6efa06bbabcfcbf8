"""What the store decides by: what computing and loading cost, which is faster, and what is worth keeping."""

from tiercel.store.policy.admission import SecondSight, Sight
from tiercel.store.policy.choose import Choice, Prompt, choose
from tiercel.store.policy.decision import (
    ACTIONS,
    ENGINE,
    OUTCOMES,
    Action,
    Decision,
    DecisionLog,
    Outcome,
    action_of,
    as_json,
    fell_short,
    why,
)
from tiercel.store.policy.endurance import WriteBudget
from tiercel.store.policy.hints import HintError, Hints, parse_hints, parse_session, parse_ttl, sift_hints
from tiercel.store.policy.prefill import PrefillCost, PrefillEstimator
from tiercel.store.policy.speed import TierSpeed

__all__ = [
    "ACTIONS",
    "ENGINE",
    "OUTCOMES",
    "Action",
    "Choice",
    "Decision",
    "DecisionLog",
    "HintError",
    "Hints",
    "Outcome",
    "PrefillCost",
    "PrefillEstimator",
    "Prompt",
    "SecondSight",
    "Sight",
    "TierSpeed",
    "WriteBudget",
    "action_of",
    "as_json",
    "choose",
    "fell_short",
    "parse_hints",
    "parse_session",
    "parse_ttl",
    "sift_hints",
    "why",
]
