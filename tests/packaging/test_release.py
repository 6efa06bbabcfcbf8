"""Version and changelog agree; an audit that cannot be done says so in one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from scripts import audit
from tests.deploy.manifests import ROOT

import tiercel

CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
HEADING = re.compile(r"^## \[(.+?)\](?: - (\S+))?$", re.MULTILINE)


def wrong_in(changelog: str, version: str) -> list[str]:
    """What in a changelog contradicts itself, or the version."""
    headings = HEADING.findall(changelog)
    if not headings or headings[0] != ("Unreleased", ""):
        return ["the first section is not [Unreleased]"]
    wrong = []
    released = []
    for name, day in headings[1:]:
        try:
            released.append((Version(name), date.fromisoformat(day)))
        except ValueError:
            wrong.append(f"[{name}] - {day}: no version with a date")
    if released != sorted(released, reverse=True):
        wrong.append("versions or dates are out of order")
    if released and Version(version) < released[0][0]:
        wrong.append(f"the package is {version}, the changelog has {released[0][0]} already")
    if not changelog.split("## [Unreleased]")[1].split("\n## [")[0].strip() and not released:
        wrong.append("nothing is said of this version")
    return wrong


def test_version_and_changelog_agree() -> None:
    assert str(Version(tiercel.__version__)) == tiercel.__version__
    assert wrong_in(CHANGELOG, tiercel.__version__) == []


@pytest.mark.parametrize(
    ("changelog", "word"),
    [
        ("# Changelog\n\n## [0.1.0] - 2026-11-01\n", "first section"),
        ("## [Unreleased]\n\n## [0.2.0] - 2026-11-01\n", "has 0.2.0 already"),
        ("## [Unreleased]\n\n## [0.0.9] - 2026-11-01\n\n## [0.1.0] - 2026-12-01\n", "out of order"),
        ("## [Unreleased]\n\n## [0.1.0] - soon\n", "no version with a date"),
        ("## [Unreleased]\n", "nothing is said"),
    ],
)
def test_a_changelog_that_does_not_is_found(changelog: str, word: str) -> None:
    assert any(word in one for one in wrong_in(changelog, "0.1.0"))


def test_the_version_is_said_once() -> None:
    """Everything else reads it from the package."""
    assert "version" in PROJECT["dynamic"]
    assert (ROOT / "src/tiercel/__init__.py").read_text().count(f'"{tiercel.__version__}"') == 1


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    found = [Requirement(line.split("#")[0]) for line in lines if line.strip() and line[0] not in "#-"]
    return {one.name.lower().replace("_", "-"): str(one.specifier) for one in found}


def test_what_is_pinned_is_what_is_asked_for() -> None:
    """The versions of the tests, and those in the daemon's image, are within what the package accepts."""
    asked = [Requirement(one) for one in PROJECT["dependencies"]]
    for extra in ("serve", "objects", "codecs", "encryption", "otel", "bench", "plots", "migrate"):
        asked += [Requirement(one) for one in PROJECT["optional-dependencies"][extra]]
    for file in ("requirements/dev.txt", "deploy/docker/requirements.txt"):
        pinned = pins(file)
        for one in asked:
            name = one.name.lower().replace("_", "-")
            if name in pinned:
                assert pinned[name].removeprefix("==") in one.specifier, (file, name)
    image = pins("deploy/docker/requirements.txt")
    assert {Requirement(one).name.replace("_", "-") for one in PROJECT["dependencies"]} <= image.keys()


# ---- the audit


@pytest.fixture
def offline(tmp_path: Path) -> Path:
    """A pip-audit that ends as the real one does without a network: a traceback, and 1."""
    program = tmp_path / "pip-audit"
    program.write_text(
        f"#!{sys.executable}\nfrom urllib.request import urlopen\nurlopen('http://127.0.0.1:9/', timeout=1)\n"
    )
    program.chmod(0o755)
    return program


def test_without_a_network_it_is_one_line(offline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main([str(offline)]) == audit.NOT_DONE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("audit: not done: the package index could not be asked for advisories: ")


def test_without_the_program_it_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main([str(tmp_path / "none")]) == audit.NOT_DONE
    assert capsys.readouterr().err.count("\n") == 1


FOUND = {"name": "torch", "version": "2.0", "vulns": [{"id": "CVE-1", "fix_versions": ["2.1"]}]}
CLEAN = {"name": "numpy", "version": "2.0", "vulns": []}
SKIPPED = {"name": "click", "skip_reason": "Dependency not found on PyPI and could not be audited"}


@pytest.mark.parametrize(
    ("packages", "code", "said"),
    [
        ([FOUND, CLEAN], 1, "torch 2.0: CVE-1, mended in ['2.1']"),
        ([CLEAN, SKIPPED], 0, "1 packages looked at, 0 vulnerabilities known; 1 not looked at"),
        ([SKIPPED], audit.NOT_DONE, "of 1 packages none was looked at"),
    ],
)
def test_what_it_finds_is_its_answer(
    packages: list[object], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An index that knows no advisories answers as if all was well: that is not done."""
    program = tmp_path / "pip-audit"
    program.write_text(f"#!{sys.executable}\nprint({json.dumps({'dependencies': packages})!r})\n")
    program.chmod(0o755)
    assert audit.main([str(program)]) == code
    out, err = capsys.readouterr()
    assert said in out + err


def test_make_says_so_too(tmp_path: Path) -> None:
    """Where not even the tools can be had."""
    done = subprocess.run(
        ["make", "audit", f"TOOLS={tmp_path / 'tools'}", "PYTHON=false"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2, "make's own, for a recipe that failed"
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("audit: not done: ")
