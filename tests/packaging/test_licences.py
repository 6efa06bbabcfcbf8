"""What an installation brings along may be passed on."""

from __future__ import annotations

import pytest
from scripts import licences


def test_every_dependency_may_be_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert licences.main([]) == 0, capsys.readouterr().out
    told = capsys.readouterr().out
    assert "numpy" in told
    assert "torch" in told


@pytest.mark.parametrize(
    ("said", "fine"),
    [
        ("MIT", True),
        ("Apache-2.0 AND (MIT OR GPL-3.0-only)", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("MIT OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("GPL-3.0-only", False),
        ("GNU Affero General Public License v3", False),
        ("Proprietary", False),
        ("says nothing", False),
        ("", False),
    ],
)
def test_what_is_fine(said: str, fine: bool) -> None:
    assert licences.is_fine(said) is fine


def test_one_that_may_not_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(licences, "FINE", licences.FINE - {"BSD-2-Clause"})
    assert licences.main(["serve"]) == 1
    assert "to be looked at: " in capsys.readouterr().out
    assert licences.main(["serv"]) == 2
