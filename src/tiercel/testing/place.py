"""A configured place that a suite may fill and empty as it likes, because it was empty to begin with."""

from __future__ import annotations

from dataclasses import dataclass

from tiercel.config import TierConfig
from tiercel.errors import TierError
from tiercel.tiers import Fate, Tier
from tiercel.tiers.registry import check_tier, open_tier

# Larger than any record of the suite.
SLOT_BYTES = 8 << 20
_BATCH = 256


@dataclass(frozen=True, slots=True)
class Place:
    """What `open_tier` opens, again and again."""

    config: TierConfig

    def open(self) -> Tier:
        """A tier on the place. Raises `TierError`, also when it does not answer."""
        tier = open_tier(self.config, self.config.kind, SLOT_BYTES)
        check_tier(tier, f"tier of kind '{self.config.kind}'")
        return tier

    def refuse_used(self) -> None:
        """Raise `TierError` unless the place is empty: the suite deletes whatever it finds."""
        tier = self.open()
        try:
            held = sum(1 for _ in tier.scan())
        except OSError as fault:
            raise TierError(f"the place cannot be listed: {fault}") from None
        finally:
            tier.close()
        if held:
            raise TierError(
                f"the place holds {held} records, which the suite would delete; "
                "accepted: an empty place, such as a directory, database or prefix of its own"
            )

    def empty(self, tier: Tier) -> None:
        """Delete every record. Raises `TierError` when one stays."""
        keys = [one.key for one in tier.scan()]
        for start in range(0, len(keys), _BATCH):
            for outcome in tier.delete(keys[start : start + _BATCH]):
                if outcome.fate not in (Fate.OK, Fate.MISSING):
                    raise TierError(f"the place cannot be emptied: {outcome.reason or outcome.fate.value}")
