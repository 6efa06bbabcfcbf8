"""Places below the arena. `base` has the protocol, every other module one kind of place."""

from tiercel.tiers.base import MISSING, OK, Fate, Outcome, Stored, Tier, Usage
from tiercel.tiers.files import FilesTier

__all__ = ["MISSING", "OK", "Fate", "FilesTier", "Outcome", "Stored", "Tier", "Usage"]
