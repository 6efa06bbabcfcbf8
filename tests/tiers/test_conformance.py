"""Every tier against the one contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiercel.testing.conformance import TierContract
from tiercel.tiers import FilesTier, Tier
from tiercel.tiers.memory import MemoryTier


class TestMemoryTier(TierContract):
    @pytest.fixture
    def tier(self) -> Tier:
        return MemoryTier(64 << 20)


class TestFilesTierDirect(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return FilesTier(tmp_path / "cache", direct=True)


class TestFilesTierBuffered(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return FilesTier(tmp_path / "cache", direct=False)
