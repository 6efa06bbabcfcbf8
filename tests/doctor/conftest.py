"""Measuring takes seconds; here what is measured does not matter, only what comes of it."""

from __future__ import annotations

import pytest

from tiercel.doctor import patient, speed


@pytest.fixture(autouse=True)
def _briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_FILES_BYTES_MAX", 2 << 20)
    monkeypatch.setattr(speed, "_REMOTE_BYTES_MAX", 2 << 20)
    monkeypatch.setattr(speed, "_LEAST_S", 0.02)
    monkeypatch.setattr(patient, "_CLEAN_UP_S", 1.0)
