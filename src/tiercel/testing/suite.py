"""The contract as `python -m tiercel.testing` runs it: every check on a tier just opened, its place emptied.

Not for import: the command gives this file to pytest, with a plugin that has the `place` fixture.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tiercel.testing.conformance import TierContract
from tiercel.testing.place import Place
from tiercel.tiers import Tier


class TestTier(TierContract):
    """Every check of the contract, on the place that the command was given."""

    @pytest.fixture
    def tier(self, place: Place) -> Iterator[Tier]:
        tier = place.open()
        place.empty(tier)
        yield tier
        tier.close()
