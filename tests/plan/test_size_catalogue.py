"""The built-in models: every one can be sized, and names mean what they look like."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiercel.errors import GeometryError
from tiercel.geometry import KVGeometry
from tiercel.plan.catalogue import UNCHECKED, find_model, models, open_model


@pytest.mark.parametrize("name", sorted(models()))
def test_every_model_is_read(name: str) -> None:
    model = models()[name]
    geometry = KVGeometry.from_config(model.config)
    assert geometry.sequence_bytes(1000) > 0
    assert model.source.startswith("https://") or UNCHECKED in model.source


@pytest.mark.parametrize("name", sorted(models()))
def test_the_last_part_of_a_name_is_enough(name: str) -> None:
    found = find_model(name.rpartition("/")[2].upper())
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("llama-3.1-8b", "meta-llama/Meta-Llama-3.1-8B"),
        ("Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B"),
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("deepseek-v3", "deepseek-ai/DeepSeek-V3"),
        ("gemma-3-27b-it", "google/gemma-3-27b"),
    ],
)
def test_short_names(asked: str, meant: str) -> None:
    found = find_model(asked)
    assert found is not None
    assert found.name == meant


def test_a_misspelt_name_names_its_neighbours() -> None:
    with pytest.raises(GeometryError, match=r"'lama-3\.1-8b'.*near: meta-llama/Meta-Llama-3\.1-8B"):
        open_model("lama-3.1-8b")


def test_an_existing_folder_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-8b").mkdir()
    assert open_model("qwen3-8b")[1] == Path("qwen3-8b")
