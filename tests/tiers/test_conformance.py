"""Every tier against the one contract."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tiers.memory_tier import MemoryTier

from tiercel.testing.conformance import TierContract
from tiercel.tiers import FilesTier, Tier


class TestMemoryTier(TierContract):
    @pytest.fixture
    def tier(self) -> Tier:
        return MemoryTier()


class TestFilesTierDirect(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return FilesTier(tmp_path / "cache", direct=True)


class TestFilesTierBuffered(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return FilesTier(tmp_path / "cache", direct=False)
